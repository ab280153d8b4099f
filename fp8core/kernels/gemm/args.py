"""What a scaled product is launched with, declared once for kernels, library calls and compositions of both."""

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
    """What every kernel of a product takes beside a and b; strides are in elements, 0 where a scale is broadcast."""

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
        """Return a problem's numbers; addresses are those of each launch."""
        return cls(0, *p.scale_a_strides, 0, *p.scale_b_strides, 0, 0, p.ldo)


class MatmulArgs(NamedTuple):
    """Of the kernels that load a and b by their addresses: MATMUL_PARAMETERS of cuda_src/gemm/args.cuh."""

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
        """Return a problem's numbers; ``row_tiles`` tiles cover the rows."""
        return cls(0, p.lda, 0, p.ldb, ScaledArgs.of(p), p.m, p.n, p.k, row_tiles)


class MatmulBetaArgs(NamedTuple):
    """Of sm89_decode and gfx9_decode."""

    matmul: MatmulArgs
    beta: Float32


def ending(p: ScaledMm) -> dict[str, int]:
    """Return the constants of `Ending` (cuda_src/gemm/epilogue.cuh), which every kernel of a product has."""
    return {"FP8_ACTIVATION": ACTIVATION[p.activation], "FP8_ACCUMULATES": int(p.beta != 0)}


class Matmul(partial[None]):
    """A product made ready, called as a `MatmulLaunch`: nothing is allocated, on any thread, with any current device.

    (A partial application without arguments: it adds these fields and costs no Python frame.)
    """

    scratch_bytes: int
    """How much memory a call is given as its scratch."""
    prefetches_weight: bool
    """Whether the launch does as `ScaledMm.prefetch_weight` says. One that may not read the weight early lets its
    dependents start only when all that precedes it on the stream has ended, so that later ones may."""
    owns: object
    """What has to live as long as the launch."""


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
    """Return the launch of a kernel that gives a high-precision result, and so has no out_scale, amax and scratch.

    Args:
        launch: of a stream, a, b, scale_a, scale_b, bias and out; b comes before a where it is loaded by TMA.
        a_maps: tensor maps of a, where TMA loads it.
        b_maps: tensor maps of b, where TMA loads it: such kernels do as `ScaledMm.prefetch_weight` says.
    """
    # Operands are spelled out: to gather them and to pass on the first costs 70 ns a call.
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
