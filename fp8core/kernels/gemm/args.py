"""What a scaled product is launched with, declared once for kernels, library calls and compositions of both."""

from functools import partial
from typing import Protocol


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
