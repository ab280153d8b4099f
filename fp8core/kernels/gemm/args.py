"""The arguments of a scaled product, declared once for kernels, library calls and compositions of both."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from fp8core.kernels.encodings import ACTIVATION
from fp8core.problem import ScaledMm
from fp8core.runtime.args import Float32, Int32, Int64, Pointer


class MatmulLaunch(Protocol):
    """Launches a product: a stream, and addresses of device memory, 0 for an operand that the problem lacks."""

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
        /,
    ) -> None:
        """Launch; ``scratch`` is aligned to 256 bytes."""


class ScaledArgs(NamedTuple):
    """The arguments of every product kernel beside a and b; strides are in elements, 0 where a scale is broadcast."""

    scale_a: Pointer
    scale_a_row: Int64
    scale_a_k: Int64
    scale_b: Pointer
    scale_b_row: Int64
    scale_b_k: Int64
    bias: Pointer
    out: Pointer
    ldo: Int64

    @classmethod
    def of(cls, p: ScaledMm) -> "ScaledArgs":
        """Return the arguments of a problem; each launch fills in the addresses."""
        return cls(0, *p.scale_a_strides, 0, *p.scale_b_strides, 0, 0, p.ldo)


class MatmulArgs(NamedTuple):
    """The arguments of kernels that load a and b by address: MATMUL_PARAMETERS of cuda_src/gemm/args.cuh."""

    a: Pointer
    lda: Int64
    b: Pointer
    ldb: Int64
    scaled: ScaledArgs
    m: Int32
    n: Int32
    k: Int32
    row_tiles: Int32

    @classmethod
    def of(cls, p: ScaledMm, row_tiles: int) -> "MatmulArgs":
        """Return the arguments of a problem; ``row_tiles`` tiles cover the rows."""
        return cls(0, p.lda, 0, p.ldb, ScaledArgs.of(p), p.m, p.n, p.k, row_tiles)


class MatmulBetaArgs(NamedTuple):
    """The arguments of sm89_decode and gfx9_decode."""

    matmul: MatmulArgs
    beta: Float32


def ending(p: ScaledMm) -> dict[str, int]:
    """Return the constants of `Ending` (cuda_src/gemm/epilogue.cuh), which every product kernel takes."""
    return {"FP8_ACTIVATION": ACTIVATION[p.activation], "FP8_ACCUMULATES": int(p.beta != 0)}


class Matmul(partial[None]):
    """A prepared product, called as a `MatmulLaunch` on any thread, with any current device; a call allocates nothing.

    (A partial application without arguments: it adds these fields and costs no Python frame.)
    """

    scratch_bytes: int
    """The bytes of scratch that a call needs."""
    prefetches_weight: bool
    """Whether the launch obeys `ScaledMm.prefetch_weight`. One that may not prefetch the weight lets its dependents
    start only when everything before it on the stream has ended, so that later ones may prefetch."""
    owns: object
    """Objects that have to live as long as the launch."""


def ready(
    launch: MatmulLaunch, *, scratch_bytes: int = 0, prefetches_weight: bool = False, owns: object = None
) -> Matmul:
    """Return ``launch`` with its properties."""
    made = Matmul(launch)
    made.scratch_bytes, made.prefetches_weight, made.owns = scratch_bytes, prefetches_weight, owns
    return made


Maps = Mapping[int, bytes]
"""Tensor maps by the address of the tensor."""


def ready_kernel(launch: Callable[..., None], *, a_maps: Maps | None = None, b_maps: Maps | None = None) -> Matmul:
    """Return the launch of a kernel with a high-precision result, which has no out_scale, amax or scratch.

    Args:
        launch: takes a stream, a, b, scale_a, scale_b, bias and out; b comes before a if TMA loads it.
        a_maps: tensor maps of a, if TMA loads it.
        b_maps: tensor maps of b, if TMA loads it: such kernels obey `ScaledMm.prefetch_weight`.
    """
    # Operands are spelled out: gathering and slicing them costs 70 ns per call.
    if b_maps is None:
        return ready(
            lambda stream, a, b, scale_a, scale_b, bias, out, _out_scale, _amax, _scratch: launch(
                stream, a, b, scale_a, scale_b, bias, out
            )
        )
    if a_maps is None:
        return ready(
            lambda stream, a, b, scale_a, scale_b, bias, out, _out_scale, _amax, _scratch: launch(
                stream, b_maps[b], a, scale_a, scale_b, bias, out
            ),
            prefetches_weight=True,
        )
    return ready(
        lambda stream, a, b, scale_a, scale_b, bias, out, _out_scale, _amax, _scratch: launch(
            stream, b_maps[b], a_maps[a], scale_a, scale_b, bias, out
        ),
        prefetches_weight=True,
    )
