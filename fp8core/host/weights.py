"""Operations on weights on the host: requantize fused shards, convert to the other E4M3, compare and expand scales."""

from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8core.host.codes import SMALLEST_NORMAL, decode_table, encode, reciprocal, replace
from fp8core.host.memory import CHUNK, Codes, Workspace, matrix, vector
from fp8core.problem import AllClose, Expand, Normalize, Requantize
from fp8core.runtime.plans import AllCloseNumbers, ExpandNumbers, NormalizeNumbers, Plan, RequantizeNumbers

UNSET: Final = np.float32(-448.0)
"""A scale other than the first that is at most this marks a weight that was fused on disk."""

RELATIVE_TOLERANCE: Final = np.float32(1e-5)


def _fused_on_disk(scales: NDArray[np.float32]) -> bool:
    """Return whether the scales of shards say that only the first was loaded, which is that of them all."""
    with np.errstate(invalid="ignore"):
        return bool((scales[1:] <= UNSET).any())


def rescale_table(dtype: str, scale: np.float32, largest: np.float32) -> Codes:
    """Return for each of the 256 codes at ``scale`` the nearest code at the scale ``largest``."""
    numbers = decode_table(dtype) * scale * reciprocal(np.array(largest))
    codes = np.empty(256, np.uint8)
    encode(numbers, dtype, codes, Workspace(256))
    return codes


def plan_requantize(problem: Requantize) -> Plan[RequantizeNumbers]:
    """Return the plan that requantizes fused shards to their largest scale.

    A code becomes that of ``float(code) * scale * (1 / largest)``. Shards with the largest scale keep their bytes. All
    shards do if a scale other than the first is at most -448, or if there is only one scale: the result is then the
    first scale. They also do if the largest scale is 0, below 2**-126, infinite or NaN: no other code would be nearer.
    """
    identity = np.arange(256, dtype=np.uint8)

    @np.errstate(all="ignore")
    def launch(n: RequantizeNumbers, _stream: int, weight: int, scales: int, out: int, max_scale: int) -> None:
        """Requantize ``[sum(widths), cols]``; ``out`` may be ``weight``; ``max_scale`` is one fp32."""
        widths, scales_count = n.widths, n.scales_count
        rows = sum(widths)
        codes = matrix(weight, problem.dtype, (rows, problem.cols), (n.weight_stride, 1))
        result = matrix(out, problem.dtype, (rows, problem.cols), (n.out_stride, 1))
        given = vector(scales, "float32", scales_count)
        fused_on_disk = _fused_on_disk(given)
        largest = given[0] if fused_on_disk else given.max()
        untouched = fused_on_disk or not SMALLEST_NORMAL <= abs(largest) < np.inf
        start, work = 0, Workspace.of(codes.size)
        for scale, width in zip(given if scales_count > 1 else given.repeat(len(widths)), widths, strict=True):
            shard = slice(start, start := start + width)
            kept = untouched or scale == largest
            if not (kept and weight == out):
                table = identity if kept else rescale_table(problem.dtype, scale, largest)
                replace(codes[shard], table, result[shard], work)
        vector(max_scale, "float32", 1)[0] = largest

    return Plan(RequantizeNumbers, lambda numbers: partial(launch, numbers))


def normalize_table(dtype: str) -> Codes:
    """Return the codes in the other E4M3 of all 256 codes; scales are doubled (to fnuz) or halved (to fn)."""
    table = np.arange(256, dtype=np.uint8)
    if dtype == "float8_e4m3fn":
        table[[0x80, 0x7F, 0xFF]] = 0x00, 0x80, 0x80
    else:
        # +-240 at half the scale is +-480, which fn cannot represent: +-448 is the nearest.
        table[[0x80, 0x7F, 0xFF]] = 0x7F, 0x7E, 0xFE
    return table


def plan_normalize(problem: Normalize) -> Plan[NormalizeNumbers]:
    """Return the plan that converts a weight to the other E4M3 with the same real values."""
    table = normalize_table(problem.dtype)
    factor = np.float32(2.0 if problem.dtype == "float8_e4m3fn" else 0.5)

    @np.errstate(all="ignore")
    def launch(
        n: NormalizeNumbers,
        _stream: int,
        weight: int,
        out: int,
        scale: int,
        scale_out: int,
        input_scale: int,
        input_scale_out: int,
    ) -> None:
        """Normalize ``count`` contiguous codes and the fp32 scales; outputs may be the inputs, scales may be absent."""
        count = n.code_count
        shape, strides = (1, count), (count, 1)
        result = matrix(out, problem.dtype, shape, strides)
        replace(matrix(weight, problem.dtype, shape, strides), table, result, Workspace.of(count))
        of_input = (input_scale, input_scale_out, n.input_scale_count)
        for pointer, doubled, many in ((scale, scale_out, n.scale_count), of_input):
            np.multiply(vector(pointer, "float32", many), factor, out=vector(doubled, "float32", many))

    return Plan(NormalizeNumbers, lambda numbers: partial(launch, numbers))


def plan_all_close(_problem: AllClose) -> Plan[AllCloseNumbers]:
    """Return the plan that tests whether all scales equal the first, or differ by at most 1e-5 of it, and finitely."""

    @np.errstate(all="ignore")
    def launch(n: AllCloseNumbers, _stream: int, x: int, result: int) -> None:
        """Write 1 to the int32 at ``result`` when all fp32 numbers are close to the first, else 0."""
        count = n.scale_count
        scales = vector(x, "float32", count)
        first = scales[:1]
        allowed = np.minimum(RELATIVE_TOLERANCE * np.abs(first), np.finfo(np.float32).max)
        close = all(
            bool(((np.abs(part - first) <= allowed) | (part == first)).all())
            for part in (scales[start : start + CHUNK] for start in range(0, count, CHUNK))
        )
        matrix(result, "int32", (1, 1), (1, 1))[0, 0] = close

    return Plan(AllCloseNumbers, lambda numbers: partial(launch, numbers))


def plan_expand(_problem: Expand) -> Plan[ExpandNumbers]:
    """Return the plan that writes the scale of each shard, or the single scale of all, once per row.

    As in `plan_requantize`, all shards have the first scale if one other than that is at most -448.
    """

    def launch(n: ExpandNumbers, _stream: int, scales: int, out: int) -> None:
        """Write ``sum(widths)`` fp32 numbers to ``out``."""
        widths, scales_count = n.widths, n.scales_count
        given = vector(scales, "float32", scales_count)
        kept = given[:1] if _fused_on_disk(given) else given
        vector(out, "float32", sum(widths))[:] = np.repeat(np.broadcast_to(kept, len(widths)), widths)

    return Plan(ExpandNumbers, lambda numbers: partial(launch, numbers))
