"""Translates the source of a kernel to C++ for the emulation: GCC instruments accesses to shared memory by pointers."""

import re

SHARED = re.compile(
    r"(?P<extern>\bextern\s+)?(?<!define )\b(?:__shared__|SHARED)\s+"
    r"(?P<type>(?:(?:alignas|__align__)\s*\([^)]*\)\s*)?[^;\[\]()#]+?)"
    r"\s*\b(?P<name>\w+)\s*(?P<extents>(?:\[[^;]*\])?)\s*;"
)
"""The declaration of one shared variable."""
WIDE = re.compile(r"(?:alignas|__align__)\s*\(\s*(\d+)\s*\)")
MOST_ALIGNED = 64
"""Bytes: GCC does not report variables with a greater alignment to the hooks of its instrumentation."""
DYNAMIC_SHARED = re.compile(r"^(\s*#\s*define\s+DYNAMIC_SHARED\(name\)).*$", re.MULTILINE)
"""The platform headers' macro for a block's dynamic shared memory."""
EXT_VECTOR = re.compile(r"\b(\w+)\s*__attribute__\(\(ext_vector_type\((\d+)\)\)\)")
"""A vector type that clang has and GCC lacks."""


def as_cpp(text: str, defines: tuple[str, ...], entry: str, words: str) -> str:
    """Return the flat source of a kernel as C++.

    Args:
        text: the source.
        defines: the compile options of the form -DNAME=VALUE.
        entry: the kernel's name.
        words: the header to include, with the platform's vocabulary.
    """
    lines = [re.sub(r"^-D(\w+)=?(.*)$", r"#define \1 \2", d) for d in defines]
    text = DYNAMIC_SHARED.sub(r"\1 unsigned char *const name = emulated_shared()", text)
    text = EXT_VECTOR.sub(r"EmulatedVector<\1, \2>", SHARED.sub(_shared, text))
    return "\n".join(
        (
            f'#include "{words}"',
            "#define FP8CORE_EMULATION 1",
            *lines,
            # Internal linkage makes plain statics of the shared variables of templates.
            f"namespace {{\n{text}\n}}\nEMULATED_ENTRY({entry})\n",
        )
    )


def _shared(declaration: re.Match[str]) -> str:
    """Return a shared variable's declaration for the emulation: GCC instruments its accesses, which use a pointer."""
    kind, name, extents = declaration["type"], declaration["name"], declaration["extents"]
    if declaration["extern"]:
        return f"{kind} *const {name} = static_cast<{kind} *>(emulation_dynamic_shared());"
    hidden = f"{name}_emulated_shared"
    if (wide := WIDE.match(kind)) and int(wide[1]) > MOST_ALIGNED:
        type_ = f"{name}_emulated_type"
        return (
            f"typedef {kind[wide.end() :]} {type_}{extents}; "
            f"static alignas({MOST_ALIGNED}) unsigned char {hidden}[sizeof({type_}) + {int(wide[1]) - MOST_ALIGNED}]; "
            f"auto &{name} = emulated_aligned<{type_}, {wide[1]}>({hidden});"
        )
    return f"static {kind} {hidden}{extents}; auto &{name} = emulated_variable({hidden});"
