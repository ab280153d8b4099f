"""The fastest kernel of a product on this GPU: timed on request, and never in the middle of a call."""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

from fp8core import interop, timing
from fp8core.core.operation import forget
from fp8core.errors import Fp8Error, TuningError, UnsupportedProblemError
from fp8core.kernels.gemm.args import Matmul
from fp8core.kernels.gemm.blaslt import library
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.linear.table import LINEAR
from fp8core.ops.explain import explain
from fp8core.ops.layer import Fp8Linear
from fp8core.ops.linear import linear
from fp8core.ops.scaled_mm import scaled_mm, scaled_mm_nt
from fp8core.problem import Granularity, Linear, ScaledMm, Target
from fp8core.runtime import device
from fp8core.table import Choice

MARGIN: Final = 0.02
"""A candidate must beat the default by at least this fraction; smaller differences are noise."""

Stopwatch = Callable[[ScaledMm, Sequence[Matmul]], Sequence[float]]
"""Returns the microseconds of each launch of a problem, infinite for one that is out of the question."""


class Machine(NamedTuple):
    """What times depend on beside the call."""

    gpu: str
    driver: int
    """As ``cuDriverGetVersion`` or ``hipDriverGetVersion`` gives it: 13000 is 13.0."""
    library: int
    """The version of the BLAS library; 0 without one, or of one that does not tell."""
    fp8core: str


class Timed(NamedTuple):
    """A kernel, which of its algorithms (0 is the one that runs without tuning), and the microseconds of a call."""

    kernel: str
    algorithm: int
    us: float

    def __str__(self) -> str:
        return f"{self.kernel}{f' algorithm {self.algorithm}' if self.algorithm else ''}: {self.us:.2f} us"


@dataclass(frozen=True, repr=False)
class Tuning:
    """What `tune` found for the product of a call: a value that another process on such a machine can `apply`.

    ``print`` lists all times. ``to_json`` and ``from_json`` carry it to another process.

    Examples:
        Made-up times of a product of 16 rows:

        >>> import fp8core
        >>> from fp8core.ops.explain import explain_product
        >>> from fp8core.tuning import Machine, Timed
        >>> machine = Machine("NVIDIA H200", driver=13000, library=130000, fp8core=fp8core.__version__)
        >>> times = Timed("sm90_decode", 0, 8.0), Timed("cublaslt", 0, 10.0), Timed("cublaslt", 1, 9.0)
        >>> problem = explain_product(16, 4096, 7168, target="sm_90").problem
        >>> tuning = fp8core.Tuning(machine, times[0], times, problem)
        >>> tuning.m, tuning.n, tuning.k, tuning.chosen.kernel
        (16, 4096, 7168, 'sm90_decode')
        >>> print(tuning)
        16 x 4096 x 7168, float8_e4m3fn x float8_e4m3fn to bfloat16, scales per row and row, on NVIDIA H200
        > sm90_decode: 8.00 us
          cublaslt algorithm 1: 9.00 us
          cublaslt: 10.00 us
        >>> fp8core.Tuning.from_json(tuning.to_json()) == tuning
        True
    """

    machine: Machine
    chosen: Timed
    """What such calls run from now on; its time is infinite where nothing could be timed to the end."""
    timed: tuple[Timed, ...]
    """What was timed to the end, in the order of preference without tuning."""
    _problem: ScaledMm

    @property
    def m(self) -> int:
        """Rows of a."""
        return self._problem.m

    @property
    def n(self) -> int:
        """Output channels."""
        return self._problem.n

    @property
    def k(self) -> int:
        """The shared axis."""
        return self._problem.k

    @property
    def dtypes(self) -> tuple[str, str, str]:
        """The names of the dtypes of a, of the weight and of the result."""
        return self._problem.a, self._problem.b, self._problem.out

    @property
    def scales(self) -> tuple[Granularity, Granularity]:
        """What shares a scale in a and in the weight: "tensor", "row", "group" (1x128) or "block" (128x128)."""
        return self._problem.scale_a, self._problem.scale_b

    def _call(self) -> str:
        (a, b, out), (scale_a, scale_b) = self.dtypes, self.scales
        shape = f"{self.m} x {self.n} x {self.k}"
        return f"{shape}, {a} x {b} to {out}, scales per {scale_a} and {scale_b}, on {self.machine.gpu}"

    def __repr__(self) -> str:
        return f"Tuning({self._call()}; {self.chosen})"

    def __str__(self) -> str:
        rows = [f"{'>' if t == self.chosen else ' '} {t}" for t in sorted(self.timed, key=lambda t: t.us)]
        return "\n".join([self._call(), *rows])

    def apply(self) -> None:
        """Let every call with this problem run what was chosen, on every device like the one that was timed.

        Nothing else that uses the same problem should be running meanwhile: it may still get the former kernel.

        Raises:
            TuningError: the GPU, its driver, the BLAS library or fp8core is another than where the times come from.
        """
        places = [at for i in range(device.count()) if alike(at := device.target(i), self._problem.target)]
        here = [machine(at) for at in places]
        if self.machine not in here:
            raise TuningError(f"the tuning is of {self.machine}, and here is {here or 'no such device'}")
        for at, there in zip(places, here, strict=True):
            if there == self.machine:
                for prefetch_weight in (False, True):  # the first call of an Fp8Linear, and all others
                    problem = self._problem._replace(target=at, prefetch_weight=prefetch_weight)
                    SCALED_MM.prefer(problem, Choice(*self.chosen[:2]))
        LINEAR.forget()
        forget()

    def to_json(self) -> str:
        """Return the tuning as one line."""
        named = {"target": self._problem.target._asdict()}
        return json.dumps(
            {
                "machine": self.machine._asdict(),
                "problem": self._problem._asdict() | named,
                "chosen": self.chosen[:2],
                "timed": self.timed,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Tuning":
        """Return the tuning that `to_json` wrote.

        Raises:
            TuningError: the text is not such a line, or comes from a version whose lines have other fields.
        """
        try:
            found = json.loads(text)
            fields = found["problem"] | {
                "target": Target(**found["problem"]["target"]),
                "scale_a_strides": tuple(found["problem"]["scale_a_strides"]),
                "scale_b_strides": tuple(found["problem"]["scale_b_strides"]),
            }
            chosen, timed = Choice(*found["chosen"]), tuple(Timed(*one) for one in found["timed"])
            return cls(Machine(**found["machine"]), _time_of(chosen, timed), timed, ScaledMm(**fields))
        except (KeyError, TypeError, ValueError) as error:
            raise TuningError(f"not a tuning: {error!r} in {text[:80]!r}") from error


def tune(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tuning:
    """Time what can run the product of a call, and let the fastest run such calls from now on in this process.

    The call is described as for `explain`; it is not made. Every able kernel is timed, and every algorithm that
    cuBLASLt or hipBLASLt offers, on operands of the call's shapes and strides and of made-up values, which take
    device memory of their own meanwhile: about 200 MB, or two weights. m, n, k, dtypes, scale modes, strides and
    alignments make a problem, so tune each m that matters.

    Args:
        function: `scaled_mm`, `scaled_mm_nt`, `linear` or an `Fp8Linear`.
        *args: the call's arguments.
        **kwargs: the call's keyword arguments.

    Raises:
        TypeError: the function has no product, or does not take the arguments.
        TuningError: a stream that the arguments' frameworks work on is being captured into a graph: timing would
            make the capture invalid.
        UnsupportedProblemError: the call is batch-invariant, on the host, or one that no kernel can run.
        Fp8Error: what the call itself would refuse.

    Returns:
        The times, and what was chosen: ``print`` it.

    Examples:
        ``tuning = fp8core.tune(layer, x)`` with arrays of a GPU. There is nothing to choose from on the host:

        >>> import numpy as np, fp8core
        >>> layer = fp8core.Fp8Linear.from_weight(np.ones((4, 32), np.float32))
        >>> fp8core.tune(layer, np.ones((1, 32), np.float32))
        Traceback (most recent call last):
        fp8core.errors.UnsupportedProblemError: tune chooses among kernels of a GPU, got arrays on the host
    """
    if function not in (scaled_mm, scaled_mm_nt, linear) and not isinstance(function, Fp8Linear):
        raise TypeError(
            f"tune needs an operation with a product: scaled_mm, scaled_mm_nt, linear or an Fp8Linear, got {function!r}"
        )
    refuse_captures((*args, *kwargs.values()))
    problem = explain(function, *args, **kwargs).problem
    if isinstance(problem, Linear):
        problem = problem.product
    assert isinstance(problem, ScaledMm)
    tuning = timed(problem, timing.times)
    tuning.apply()
    return tuning


def refuse_captures(operands: Sequence[Any]) -> None:
    """Raise TuningError where CuPy's current stream, or that of an operand's framework, is being captured."""
    if device.count() == 0:
        return
    streams = {"CuPy's current stream": int(device.cupy().cuda.get_current_stream().ptr)}
    for operand in operands:
        with suppress(Fp8Error):  # no array, or one that `explain` refuses with the operand's name
            view = interop.view(operand, "operand")
            if view.target.platform != "host":
                streams[f"the current stream of a {type(operand).__name__}"] = interop.stream_of(view)
    for name, stream in streams.items():
        if device.capturing(stream):
            raise TuningError(f"tune needs streams that are not being captured into a graph, got {name}")


def timed(problem: ScaledMm, times: Stopwatch) -> Tuning:
    """Return what ``times`` says of the candidates of a problem."""
    if problem.target.platform == "host":
        raise UnsupportedProblemError("tune chooses among kernels of a GPU, got arrays on the host")
    if problem.batch_invariant:
        raise UnsupportedProblemError("a batch-invariant product has the same kernel for every m, so it is not tuned")
    choices = SCALED_MM.candidates(problem)
    if not choices:
        raise UnsupportedProblemError(f"no kernel can run {SCALED_MM.explain(problem)}")
    found = times(problem, [SCALED_MM.planned(problem, choice) for choice in choices])
    least = min(found)
    chosen = choices[0] if found[0] <= least * (1 + MARGIN) else choices[list(found).index(least)]
    results = tuple(Timed(*choice, us) for choice, us in zip(choices, found, strict=True) if math.isfinite(us))
    return Tuning(machine(problem.target), _time_of(chosen, results), results, problem)


def _time_of(chosen: Choice, timed: Sequence[Timed]) -> Timed:
    return next((one for one in timed if one[:2] == chosen), Timed(*chosen, math.inf))


def alike(one: Target, other: Target) -> bool:
    """Return whether two targets differ in nothing but the device's number."""
    return one._replace(device=other.device) == other


@cache
def machine(target: Target) -> Machine:
    """Return what times on a device depend on."""
    from fp8core import __version__

    found = library.find(target.platform)
    version = 0 if isinstance(found, str) else found.version or 0
    return Machine(device.name(target.device), device.driver_version(), version, __version__)
