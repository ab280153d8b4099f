"""The text of sm90_tiled for the emulation: hopper.h in the place of PTX, and C++ for what it has of assembly itself."""

import re
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

from fp8core.runtime import sources

HEADER = Path(__file__).with_name("hopper.h")
MAP = struct.Struct("=7q72x")
OPERANDS = re.compile(r'"=?[frh]"\(')
Edit = tuple[str, str]
"""A regular expression that occurs once in the flat text, and what replaces it."""
TILED: tuple[Edit, ...] = (
    (r"DEVICE word64 descriptor_of\(unsigned low\) \{\n    word64 made;.*?\n\}\n", ""),
    (r"hardware_round_pair(?=<C::out_type>)", "emulated_round_pair"),
    # The emulation takes one variable a declaration.
    (r"(__shared__ alignas\(8\) word64) (barriers\[.*?\]), (vector_barriers.*?;)", r"\1 \2; \1 \3"),
)
"""What sm90_tiled has of its own that the emulation does not."""


def encode_map(
    pointer: int, rows: int, columns: int, stride: int, box_rows: int, box_columns: int = 128, item: int = 1
) -> bytes:
    """Return a tensor map that hopper.h understands, in the place of `tensor_maps.encode`."""
    return MAP.pack(pointer, rows, columns * item, stride, box_rows, box_columns * item, item)


def hopper_text(folder: Path, name: str, edits: Sequence[Edit] = ()) -> str:
    """Return the flat text of ``cuda_src/<name>``; ``folder`` is one without cuda_src, or with the file that is meant.

    Raises:
        AssertionError: an edit did not find its place.
    """
    shutil.copytree(sources.root() / "cuda_src", folder / "cuda_src", dirs_exist_ok=True)
    own = folder / "cuda_src" / "ptx"
    for header in ("tma", "wgmma", "transpose"):
        (own / f"{header}.cuh").write_text('#pragma once\n#include "hopper.cuh"\n')
    (own / "mbarrier.cuh").write_text("#pragma once\n")  # which platform.cuh includes
    words = HEADER.read_text().replace("#pragma once", '#pragma once\n#include "../platform.cuh"')
    (own / "hopper.cuh").write_text(words)
    text = _shared_accesses(sources.flatten_file(folder, f"cuda_src/{name}"))
    for pattern, replacement in edits:
        text, count = re.subn(pattern, replacement, text, flags=re.DOTALL)
        assert count == 1, f"{pattern!r} occurs {count} times in the kernel's text"
    return text


def tiled_text(folder: Path, edits: Sequence[Edit] = ()) -> str:
    """Return the flat text of gemm/sm90/tiled.cu with ``edits``; ``folder`` is an empty one."""
    return hopper_text(folder, "gemm/sm90/tiled.cu", (*TILED, *edits))


def _shared_accesses(text: str) -> str:
    """Return the text with ``asm volatile`` of ld.shared and st.shared as words of hopper.h."""
    while found := re.search(r'asm volatile\(\s*"(ld|st)\.shared\.', text):
        end = _closing(text, text.index("(", found.start()))
        statement = text[found.start() : end]
        values = [statement[m.end() : _closing(statement, m.end() - 1) - 1] for m in OPERANDS.finditer(statement)]
        if found[1] == "ld":
            values = [values[-1], *values[:-1]]
        word = {"ld": "shared_load", "st": "shared_store"}[found[1]]
        text = f"{text[: found.start()]}{word}({', '.join(values)}){text[end:]}"
    return text


def _closing(text: str, opening: int) -> int:
    """Return where the parenthesis that opens at ``opening`` is closed, past it."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise AssertionError("an open parenthesis")
