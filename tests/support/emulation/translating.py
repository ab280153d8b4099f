"""The text of a kernel as C++ that the emulation compiles: shared memory by pointers, which GCC instruments."""

import re

SHARED = re.compile(
    r"(?P<extern>\bextern\s+)?(?<!define )\b(?:__shared__|SHARED)\s+"
    r"(?P<type>(?:(?:alignas|__align__)\s*\([^)]*\)\s*)?[^;\[\]()#]+?)"
    r"\s*\b(?P<name>\w+)\s*(?P<extents>(?:\[[^;]*\])?)\s*;"
)
"""A declaration of one shared variable."""
WIDE = re.compile(r"(?:alignas|__align__)\s*\(\s*(\d+)\s*\)")
MOST_ALIGNED = 64
"""Bytes: variables of more alignment are not among those that GCC tells of."""
DYNAMIC_SHARED = re.compile(r"^(\s*#\s*define\s+DYNAMIC_SHARED\(name\)).*$", re.MULTILINE)
"""The word of the platform headers for a block's dynamic shared memory."""
EXT_VECTOR = re.compile(r"\b(\w+)\s*__attribute__\(\(ext_vector_type\((\d+)\)\)\)")
"""A vector type as clang has it and GCC has not."""


def as_cpp(text: str, defines: tuple[str, ...], entry: str, words: str) -> str:
    """Return a flat text as C++.

    Args:
        text: of the kernel.
        defines: its options -DNAME=VALUE.
        entry: the kernel's name.
        words: the header of the platform's words.
    """
    lines = [re.sub(r"^-D(\w+)=?(.*)$", r"#define \1 \2", d) for d in defines]
    text = DYNAMIC_SHARED.sub(r"\1 unsigned char *const name = emulated_shared()", text)
    text = EXT_VECTOR.sub(r"EmulatedVector<\1, \2>", SHARED.sub(_shared, text))
    return "\n".join(
        (
            f'#include "{words}"',
            "#define FP8CORE_EMULATION 1",
            *lines,
            # Names with internal linkage: the shared variables of templates become plain statics.
            f"namespace {{\n{text}\n}}\nEMULATED_ENTRY({entry})\n",
        )
    )


def _shared(declaration: re.Match[str]) -> str:
    """Return a shared variable's declaration for the emulation: accesses go by a pointer, which GCC instruments."""
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
