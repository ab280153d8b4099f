"""Emulated quantizations: compares every able kernel, on operands in guarded memory, bit for bit with the reference."""

from typing import Any, NamedTuple

import numpy as np

from fp8core.kernels.quantize import QUANTIZE
from fp8core.problem import GroupShape, Quantize, ScaleFormat, ScaleLayout
from fp8core.target import Target
from support import reference
from support.emulation.running import alignment, empty, matrix, plans, same_bytes, teasing


class Case(NamedTuple):
    """One launch: the problem, and the layout of its operands."""

    target: Target
    x: str
    data: str
    group_shape: GroupShape
    rows: int
    cols: int
    static: bool = False
    scale_format: ScaleFormat = "float32"
    scale_layout: ScaleLayout = "k"
    gap: int = 0
    """Elements between the rows of x, and between the rows of codes."""
    more: int = 0
    """Further codes between the rows of codes."""
    offset: int = 0
    padded: int = 0
    upper: tuple[float, float] = (0.0, float("inf"))
    """An upper bound on the device (0: none) and one in the arguments."""


def run(emulator: Any, case: Case, seed: int = 0, special: bool = True, eps: float = 1e-10, size: float = 1) -> None:
    """Launch every kernel that is able to quantize the case.

    Args:
        emulator: the emulator, which replaces `jit.prepare`.
        case: the problem and its layout.
        seed: the seed of the random elements.
        special: whether NaN and infinities are among the elements.
        eps: the least amax of a group.
        size: a factor on the elements.
    """
    x = teasing(case.rows, case.cols, case.x, seed, special=special)
    if size != 1:
        x = (np.clip(x, -4, 4) * size).astype(x.dtype)
    total = max(case.rows, case.padded)
    shape = case.group_shape.scale_shape(total, case.cols)
    random = np.random.default_rng(seed + 1)
    given = np.exp2(random.uniform(-6, 3, shape)).astype(np.float32) if case.static else None
    on_device, in_arguments = case.upper
    bound = min([b for b in case.upper if b and np.isfinite(b)], default=None)
    want = reference.quantize(x, case.data, case.group_shape, given, bound, case.scale_format, eps, total)
    with emulator.watch() as memory:
        source = matrix(memory, x, case.cols + case.gap, offset=case.offset)
        data = empty(memory, (total, case.cols), np.uint8, case.cols + case.gap + case.more)
        scale_type = np.uint8 if case.scale_format == "ue8m0_bytes" else np.float32
        stored = shape[::-1] if case.scale_layout == "mn" else shape
        scale = memory.array(given) if given is not None else memory.empty(stored, scale_type)
        seen = scale.T if case.scale_layout == "mn" else scale
        strides = [
            0 if extent == 1 else s // scale.itemsize for extent, s in zip(seen.shape, seen.strides, strict=True)
        ]
        upper = memory.array(np.array([on_device], np.float32)) if on_device else None
        problem = Quantize(
            *(case.target, case.x, case.data, case.group_shape, case.static, case.scale_format, case.scale_layout),
            *(case.cols, alignment(source, data)),
        )
        for kernel, launch in plans(QUANTIZE, problem):
            launch(
                *(
                    0,
                    source.pointer,
                    source.stride,
                    data.pointer,
                    data.stride,
                    scale.ctypes.data,
                    *strides,
                    case.rows,
                    total,
                ),
                *(upper.ctypes.data if upper is not None else 0, in_arguments, eps),
            )
            same_bytes(data.values, want.codes, f"{kernel}: data")
            if not case.static:
                same_bytes(seen, want.scale, f"{kernel}: scale")
            assert (data.gap == 0xA5).all(), f"{kernel}: wrote between the rows"
