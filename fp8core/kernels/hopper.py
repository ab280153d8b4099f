"""Products of few rows on sm_90a: the weight streamed at the memory's speed (``cuda_src/hopper_decode.cu``).

Everything that a launch needs follows from plain arithmetic on the problem (`hopper_layout`), but for the tensor maps:
they hold addresses, and are made when an address is first met.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Final

from fp8core.kernels.hopper_layout import (
    CHUNK,
    MOST_ROWS,
    Layout,
    alone,
    apart,
    dynamic_bytes,
    layout,
    rule,
    stages,
    width,
)
from fp8core.kernels.requirements import aligned, arch, platform
from fp8core.kernels.words import TYPE, ceil_div
from fp8core.problem import ITEMSIZE, WIDE, ScaledMm
from fp8core.runtime import device, jit
from fp8core.table import Kernel, Launch, Requirement

TENSOR_CORE_TYPES: Final = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
MAPS_KEPT: Final = 4096
"""A plan forgets its tensor maps when it has met so many addresses."""

SIGNATURE: Final = "128s128sPqqPqqPPqiiii"
"""weight's map, a's map, scale_a and its strides, scale_b and its strides, bias, out, ldo, m, n, chunks, early."""


class TensorMaps(dict[int, bytes]):
    """Tensor maps of row-major bytes by address: all else about the tensor is fixed, so that a hit is a look-up."""

    def __init__(self, rows: int, columns: int, stride: int, box_rows: int) -> None:
        super().__init__()
        self._geometry = (rows, columns, stride, box_rows)

    def __missing__(self, pointer: int) -> bytes:
        """Make and keep the map of the tensor at ``pointer``."""
        if len(self) >= MAPS_KEPT:
            self.clear()
        found = self[pointer] = encode(pointer, *self._geometry)
        return found


def encode(pointer: int, rows: int, columns: int, stride: int, box_rows: int) -> bytes:
    """Return the tensor map of uint8 ``[rows, columns]`` in boxes of ``box_rows`` x 128 bytes, swizzled by 128 bytes.

    What a box has outside the tensor is zero. Rows are ``stride`` bytes apart, a multiple of 16, as the address is.

    Raises:
        BackendError: the driver refuses; the message holds its status and the geometry.
    """
    memory = ctypes.create_string_buffer(128 + 64)
    address = ceil_div(ctypes.addressof(memory), 64) * 64
    wide, narrow = ctypes.c_uint64, ctypes.c_uint32
    uint8, no_interleave, swizzle_128, promote_128, zeros = 0, 0, 3, 2, 0  # promoting to 256 is 3 % slower
    arguments = (
        ctypes.c_void_p(address),
        uint8,
        2,
        ctypes.c_void_p(pointer),
        (wide * 2)(columns, rows),
        (wide * 1)(stride),
        (narrow * 2)(CHUNK, box_rows),
        (narrow * 2)(1, 1),
        no_interleave,
        swizzle_128,
        promote_128,
        zeros,
    )
    encoder = device.driver().cuTensorMapEncodeTiled
    status = encoder(*arguments)
    if status:
        status = device.retry_with_context(status, device.current(), encoder, *arguments)
    device.check(status, "cuTensorMapEncodeTiled", f"uint8 [{rows}, {columns}] with rows {stride} apart")
    return ctypes.string_at(address, 128)


def laid_out(problem: ScaledMm) -> Layout:
    """Return how a product lies on the multiprocessors."""
    # The order of a sum must not depend on m where it is asked not to: nor then may the layout.
    side = MOST_ROWS if problem.batch_invariant else width(problem.m)
    plan = layout(problem.n, problem.k, rule(side, problem.scale_a == "group"), problem.target)
    if width(problem.m) < 8 * plan.mates:
        plan = alone(plan, problem.n)
    return plan if problem.prefetch_weight else apart(plan, problem.target)


class MappedMm:
    """One launch of a product that the copy engine brings both operands of."""

    scratch_bytes = 0
    _weight_maps: TensorMaps
    _a_maps: TensorMaps
    _launch: Launch

    def __call__(
        self,
        stream: int,
        a: int,
        b: int,
        scale_a: int,
        scale_b: int,
        bias: int,
        out: int,
        _out_scale: int,
        _amax: int,
        _scratch: int,
    ) -> None:
        """Launch; `SCALED_MM`'s parameters."""
        self._launch(stream, self._weight_maps[b], self._a_maps[a], scale_a, scale_b, bias, out)


class DecodeMm(MappedMm):
    """One launch for up to 64 rows: ``round(scale_a * (scale_b * acc) + bias)``; blocked scales join every 128 of k."""

    def __init__(
        self,
        problem: ScaledMm,
        plan: Layout | None = None,
        signature: str = SIGNATURE,
        numbers: tuple[Any, ...] = (),
        **source: int,
    ) -> None:
        side = width(problem.m)
        blockwise = problem.scale_a == "group"
        scale_rows = {"block": 128, "group": 1}.get(problem.scale_b, 0)
        plan = plan or laid_out(problem)
        depth = stages(plan, side, scale_rows, problem.target)
        self._weight_maps = TensorMaps(problem.n, problem.k, problem.ldb, plan.tile)
        self._a_maps = TensorMaps(problem.m, problem.k, problem.lda, side // plan.mates)
        # The weight is read before the predecessor has ended, unless that may be who writes it.
        early = int(problem.prefetch_weight)
        strides = (*numbers, *problem.scale_a_strides, *problem.scale_b_strides)
        launcher = jit.prepare(
            problem.target,
            "hopper_decode",
            "hopper_decode",
            {
                "WIDTH": side,
                "BLOCKS": plan.blocks,
                "MATES": plan.mates,
                "ROW_GROUPS": plan.row_groups,
                "K_GROUPS": plan.k_groups,
                "STAGES": depth,
                "A_STAGES": plan.a_stages,
                "RESIDENTS": plan.residents,
                "A_TYPE": TENSOR_CORE_TYPES[problem.a],
                "B_TYPE": TENSOR_CORE_TYPES[problem.b],
                "BLOCKWISE": int(blockwise),
                "SCALE_ROWS": scale_rows or 128,
                "OUT": TYPE[problem.out],
                "BIAS": TYPE[problem.bias] if problem.bias else -1,
                "AHEAD": plan.ahead,
                **(source or {"A_VECTORS": 0}),
            },
            signature,
            block=128 * plan.row_groups * plan.k_groups + 64 + 32 * blockwise,
            shared_bytes=dynamic_bytes(plan, side, scale_rows, depth, problem.target),
            cluster=plan.cluster,
            programmatic=True,
        )
        shape = (problem.ldo, problem.m, problem.n, ceil_div(problem.k, CHUNK))
        self._launch = launcher.bind((plan.cluster * plan.clusters, 1, 1), *strides, *shape, early)


class Panels:
    """More than 64 rows as launches of 64, each row with the bits that it has alone; every launch reads the weight."""

    scratch_bytes = 0

    def __init__(self, problem: ScaledMm) -> None:
        full, rest = divmod(problem.m, MOST_ROWS)
        sizes = [MOST_ROWS] * full + [rest] * (rest > 0)
        plans = {rows: DecodeMm(problem._replace(m=rows)) for rows in set(sizes)}
        self._launches = [(MOST_ROWS * i, plans[rows]) for i, rows in enumerate(sizes)]
        self._row_bytes = (problem.lda, 4 * problem.scale_a_strides[0], problem.ldo * ITEMSIZE[problem.out])

    def __call__(
        self,
        stream: int,
        a: int,
        b: int,
        scale_a: int,
        scale_b: int,
        bias: int,
        out: int,
        out_scale: int,
        amax: int,
        scratch: int,
    ) -> None:
        """Launch; `SCALED_MM`'s parameters."""
        a_row, scale_row, out_row = self._row_bytes
        for row, launch in self._launches:
            places = (a + row * a_row, b, scale_a + row * scale_row, scale_b, bias, out + row * out_row)
            launch(stream, *places, out_scale, amax, scratch)


def plan_decode(problem: ScaledMm) -> Callable[..., None]:
    """Return the launch of the row "hopper_decode"."""
    return DecodeMm(problem) if problem.m <= MOST_ROWS else Panels(problem)


FEW_ROWS: Final = Requirement(
    lambda p: p.m <= MOST_ROWS or p.batch_invariant,
    f"measured slower for more rows, as it reads the weight once for every {MOST_ROWS}: preferred for m <= {MOST_ROWS}"
    " or batch_invariant; got m={p.m}",
)
OCP_FORMATS: Final = Requirement(
    lambda p: p.a in TENSOR_CORE_TYPES and p.b in TENSOR_CORE_TYPES and (p.a, p.b) != ("float8_e5m2", "float8_e5m2"),
    "multiplies e4m3fn by e4m3fn or e5m2, got a {p.a} and b {p.b}",
)
DECODE_SCALES: Final = Requirement(
    lambda p: (
        (p.scale_a in ("tensor", "row") and p.scale_b in ("tensor", "row"))
        or (p.scale_a == "group" and p.scale_b in ("group", "block"))
    ),
    "takes scales per tensor or row in any mix, or 1x128 with 1x128 or 128x128,"
    " got scale_a per {p.scale_a} and scale_b per {p.scale_b}",
)
WIDE_RESULT: Final = Requirement(
    lambda p: p.out in WIDE and not p.out_scale and not p.amax,
    "gives float32, float16 or bfloat16 without out_scale and amax, got {p.out}",
)
STRIDES_OF_16: Final = Requirement(
    lambda p: p.k > 0 and p.lda % 16 == 0 and p.ldb % 16 == 0,
    "needs k > 0 and lda and ldb that are multiples of 16, got k={p.k} lda={p.lda} ldb={p.ldb}",
)
WHOLE_WORDS: Final = Requirement(
    lambda p: p.vectors_alignment % 4 == 0,
    "needs scales and bias at addresses divisible by 4, got {p.vectors_alignment}",
)

HOPPER_ROWS: Final[tuple[Kernel, ...]] = (
    Kernel(
        "hopper_decode",
        (
            platform("cuda"),
            arch(90),
            OCP_FORMATS,
            DECODE_SCALES,
            WIDE_RESULT,
            aligned(16),
            STRIDES_OF_16,
            WHOLE_WORDS,
        ),
        plan_decode,
        (FEW_ROWS,),
    ),
)
"""The rows of `scaled_mm` that are Hopper's own."""
