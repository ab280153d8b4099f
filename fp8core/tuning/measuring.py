"""`tune`: times every candidate for the product of a call, and chooses the fastest."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final

from fp8core import interop, timing
from fp8core.errors import Fp8Error, TuningError, UnsupportedProblemError
from fp8core.interop.names import function_name
from fp8core.kernels.gemm.args import Matmul
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.explain import explain
from fp8core.ops.layer import Fp8Linear
from fp8core.ops.linear import linear
from fp8core.ops.quantized import Quantized
from fp8core.ops.scaled_mm import scaled_mm, scaled_mm_nt
from fp8core.problem import Linear, ScaledMm
from fp8core.runtime import device
from fp8core.target import ABSENT
from fp8core.tuning.values import Timed, Tuning, machine

MARGIN: Final = 0.02
"""A candidate must beat the default by at least this fraction; smaller differences are noise."""

Stopwatch = Callable[[ScaledMm, Sequence[Matmul]], Sequence[float]]
"""Returns the microseconds of each launch of a problem; infinite for a launch that fails or is far too slow."""


def tune(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tuning:
    """Time all kernels that can run the product of a call; in this process, such calls run the fastest from now on.

    The call is described as for `explain`, and not made. All able kernels, and all algorithms that cuBLASLt or
    hipBLASLt offer, are timed with synthetic operands of the call's shapes and strides. These take device memory
    during the timing: about 200 MB, or two weights. A problem consists of m, n, k, dtypes, scale modes, strides and
    alignments, so tune each m that matters. A layer is timed with a weight that may be read early, as in all its calls
    but the first. `save_tunings` keeps the result for other processes.

    Args:
        function: `scaled_mm`, `scaled_mm_nt`, `linear` or an `Fp8Linear`.
        *args: the call's arguments.
        **kwargs: the call's keyword arguments.

    Raises:
        TypeError: the function has no product, or does not take the arguments.
        TuningError: a current stream of the arguments' frameworks is being captured into a graph: timing would
            invalidate the capture.
        UnsupportedProblemError: the call is batch-invariant, or on the host, or its product has no elements, or no
            kernel can run it.
        Fp8Error: the call itself would be refused.

    Returns:
        Tuning: the times, and the choice. ``print`` it.

    Examples:
        ``tuning = fp8core.tune(layer, x)`` with arrays of a GPU. There is nothing to choose from on the host:

        >>> import numpy as np, fp8core
        >>> layer = fp8core.Fp8Linear.from_weight(np.ones((4, 32), np.float32))
        >>> fp8core.tune(layer, np.ones((1, 32), np.float32))
        Traceback (most recent call last):
        fp8core.errors.UnsupportedProblemError: tune needs a GPU, whose kernels it times, got the host
    """
    if not isinstance(function, Fp8Linear) and not any(
        function is known for known in (scaled_mm, scaled_mm_nt, linear)
    ):
        raise TypeError(
            "tune needs an operation with a product: scaled_mm, scaled_mm_nt, linear or an fp8core.Fp8Linear, got "
            f"{function_name(function)}"
        )
    refuse_captures((*args, *kwargs.values()))
    problem = product_of(explain(function, *args, **kwargs).problem)
    tuning = timed(problem._replace(prefetch_weight=isinstance(function, Fp8Linear)), timing.times)
    tuning.apply()
    return tuning


def product_of(problem: Any) -> ScaledMm:
    """Return the product of a `Linear` problem, or a problem that is itself a product."""
    product = problem.product if isinstance(problem, Linear) else problem
    assert isinstance(product, ScaledMm)
    return product


def refuse_captures(operands: Sequence[Any] = ()) -> None:
    """Raise TuningError if CuPy's current stream, or that of an operand's framework, is being captured."""
    if device.count() == 0:
        return
    streams = [("CuPy's current stream", int(device.cupy().cuda.get_current_stream().ptr))]
    for operand in chain.from_iterable(x if isinstance(x, Quantized) else (x,) for x in operands):
        with suppress(Fp8Error):  # not an array, or one that `explain` refuses with the operand's name
            view = interop.view(operand, "operand")
            if view.target.platform != "host":
                streams.append((f"the current stream of a {type(operand).__name__}", interop.stream_of(view)))
    for name, stream in streams:
        if device.capturing(stream):
            raise TuningError(f"tune needs streams that are not being captured into a graph, got {name}")


def timed(problem: ScaledMm, times: Stopwatch) -> Tuning:
    """Time all candidates of a problem with ``times``, and return the tuning."""
    if problem.target.platform == "host":
        raise UnsupportedProblemError("tune needs a GPU, whose kernels it times, got the host")
    if problem.target.device == ABSENT:
        got = f"got {problem.target}, which is not in it"
        raise UnsupportedProblemError(f"tune needs a GPU of this machine, whose kernels it times, {got}")
    if problem.batch_invariant:
        raise UnsupportedProblemError("tune needs a product whose kernel may depend on m, got a batch-invariant one")
    if not problem.m * problem.n * problem.k:
        got = f"m={problem.m} n={problem.n} k={problem.k}"
        raise UnsupportedProblemError(f"tune needs a product with elements, as it times kernels, got {got}")
    choices = SCALED_MM.candidates(problem)
    if not choices:
        raise UnsupportedProblemError(f"no kernel can run {SCALED_MM.explain(problem)}")
    found = list(times(problem, [SCALED_MM.planned(problem, choice) for choice in choices]))
    names = {kernel: SCALED_MM.kernel(kernel).algorithms(problem) for kernel, _ in choices}
    results = [
        Timed(*choice, us, names[choice.kernel][choice.algorithm]) for choice, us in zip(choices, found, strict=True)
    ]
    least = min(found)
    default = results[0]
    chosen = default if default.us <= least * (1 + MARGIN) else results[found.index(least)]
    fully = tuple(one for one in results if math.isfinite(one.us))
    return Tuning(machine(problem.target), chosen, default, fully, problem)
