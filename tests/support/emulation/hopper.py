"""The sources of sm90_tiled and sm90_decode for the emulation: hopper.h replaces the PTX headers, and C++ the kernels'
own assembly."""

import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fp8core.kernels.gemm.sm90 import decode_unaligned, tensor_maps
from fp8core.runtime import sources
from support.emulation import Emulator, Schedule

HEADER = Path(__file__).with_name("hopper.h")
MAP = struct.Struct("=8q64x")
OPERANDS = re.compile(r'"=?[frh]"\(')
Edit = tuple[str, str]
"""A regular expression that occurs once in the flat source, and its replacement."""
TILED: tuple[Edit, ...] = (
    (r"DEVICE word64 descriptor_of\(unsigned low\) \{\n    word64 made;.*?\n\}\n", ""),
    (r"hardware_round_pair(?=<C::out_type>)", "emulated_round_pair"),
    # One variable per declaration, as translating.py requires.
    (r"(__shared__ alignas\(8\) word64) (barriers\[.*?\]), (vector_barriers.*?;)", r"\1 \2; \1 \3"),
)
"""Edits of sm90_tiled's own assembly, and of what the emulation cannot parse."""
ROUNDS_OF_DECODE: tuple[Edit, ...] = (
    (r"hardware_round_pair(?=<C::out_type>\(sums)", "emulated_round_pair"),
    (r"hardware_round_pair(?=<C::out_type>\(values)", "emulated_round_pair"),
)
DECODE: dict[str, tuple[Edit, ...]] = {
    "decode": ROUNDS_OF_DECODE,
    "decode_rows": (
        *ROUNDS_OF_DECODE,
        (r"(__shared__ alignas\(8\) float) (channel_scales\[.*?\]), (channel_biases.*?;)", r"\1 \2; \1 \3"),
    ),
}
"""The edits of sm90_decode and sm90_decode_rows."""
WITHOUT_ASSEMBLY = {"wgmma": ("columns_of", "wgmma_k_block"), "transpose": ("quad_transpose",)}
"""By header that hopper.h replaces: the functions without assembly, which are kept."""


SCHEDULES = [
    Schedule("next", "at once"),
    Schedule("first", "late", 1),
    Schedule("last", "late", 2),
    Schedule("groups", "at once"),
    Schedule("groups", "late", 1),
    Schedule("groups", "sometime", 3),
    Schedule("any", "sometime", 4),
]
"""Schedules with loaders far ahead or late, with starving warps, and with copies that land at once, late or between."""


def launching(emulator: Emulator, texts: Mapping[str, str], patch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that checks a product under a schedule.

    texts: by the name of a kernel's file, the source to run. The function's ``text``, if given, replaces the first one.
    """
    others = sources.flatten
    for module in (tensor_maps, decode_unaligned):
        patch.setattr(module, "encode", encode_map)
    patch.setattr(tensor_maps, "_SHARED", {})

    def launch(product: Any, schedule: Schedule, text: str = "") -> None:
        own = {**texts, next(iter(texts)): text} if text else texts
        patch.setattr(sources, "flatten", lambda platform, name: own[name] if name in own else others(platform, name))
        emulator.schedule = schedule
        with emulator.watch() as memory:
            product.check(memory)

    return launch


def encode_map(
    pointer: int, rows: int, columns: int, stride: int, box_rows: int, box_columns: int = 128, item: int = 1
) -> bytes:
    """Return a tensor map for hopper.h; this replaces `tensor_maps.encode`."""
    swizzled = item == 1 and box_columns in tensor_maps.SWIZZLE
    return MAP.pack(pointer, rows, columns * item, stride, box_rows, box_columns * item, item, swizzled)


def hopper_text(folder: Path, name: str, edits: Sequence[Edit] = ()) -> str:
    """Return the flat source of ``cuda_src/<name>``, prepared in ``folder``, which is empty or contains that file.

    Raises:
        AssertionError: the pattern of an edit does not occur exactly once.
    """
    shutil.copytree(sources.root() / "cuda_src", folder / "cuda_src", dirs_exist_ok=True)
    own = folder / "cuda_src" / "ptx"
    for header in ("tma", "wgmma", "transpose"):
        kept = "".join(_functions((own / f"{header}.cuh").read_text(), WITHOUT_ASSEMBLY.get(header, ())))
        (own / f"{header}.cuh").write_text(f'#pragma once\n#include "hopper.cuh"\n{kept}')
    (own / "mbarrier.cuh").write_text("#pragma once\n")  # platform.cuh includes it
    words = HEADER.read_text().replace("#pragma once", '#pragma once\n#include "../platform.cuh"')
    (own / "hopper.cuh").write_text(words)
    text = _shared_accesses(sources.flatten_file(folder, f"cuda_src/{name}"))
    for pattern, replacement in edits:
        text, count = re.subn(pattern, replacement, text, flags=re.DOTALL)
        assert count == 1, f"{pattern!r} occurs {count} times in the kernel's text"
    return text


def tiled_text(folder: Path, edits: Sequence[Edit] = ()) -> str:
    """Return the flat source of gemm/sm90/tiled.cu with ``edits``, prepared in an empty ``folder``."""
    return hopper_text(folder, "gemm/sm90/tiled.cu", (*TILED, *edits))


def decode_text(folder: Path, name: str = "decode", edits: Sequence[Edit] = ()) -> str:
    """Return the flat source of decode.cu or decode_rows.cu with ``edits``, prepared in an empty ``folder``."""
    return hopper_text(folder, f"gemm/sm90/{name}.cu", (*DECODE[name], *edits))


def _functions(text: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the source of all functions with these names; each name must have one."""
    for name in names:
        whole = rf"^(?:template <[^\n]*>\n)?DEVICE [^\n;]*\b{name}\((?:[^\n]*\}}\n|.*?^\}}\n)"
        found = re.findall(whole, text, re.DOTALL | re.MULTILINE)
        assert found, f"no {name} in the text"
        yield from found


def _shared_accesses(text: str) -> str:
    """Return the text with ``asm volatile`` of ld.shared and st.shared replaced by functions of hopper.h."""
    while found := re.search(r'asm volatile\(\s*"(ld|st)\.shared\.', text):
        end = _closing(text, text.index("(", found.start()))
        statement = text[found.start() : end]
        values = [statement[m.end() : _closing(statement, m.end() - 1) - 1] for m in OPERANDS.finditer(statement)]
        if found[1] == "ld":
            values = [values[-1], *values[:-1]]
        word = {"ld": "shared_load", "st": "shared_store"}[found[1]] + ("_byte" if ".u8 " in statement else "")
        text = f"{text[: found.start()]}{word}({', '.join(values)}){text[end:]}"
    return text


def _closing(text: str, opening: int) -> int:
    """Return the index after the parenthesis that closes the one at ``opening``."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise AssertionError("an open parenthesis")
