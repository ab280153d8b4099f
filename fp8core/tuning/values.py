"""Tunings as plain values: can be printed, applied, written as a line of JSON, and read back."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from fp8core.core.operation import forget
from fp8core.errors import TuningError, UnsupportedProblemError
from fp8core.kernels.gemm import args
from fp8core.kernels.gemm.blaslt import library
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.linear.table import LINEAR
from fp8core.problem import Granularity, ScaledMm
from fp8core.runtime import device, sources
from fp8core.table import Choice
from fp8core.target import Target
from fp8core.tuning.typed import typed


class Machine(NamedTuple):
    """Everything besides the call that times depend on."""

    gpu: str
    driver: int
    """The version from ``cuDriverGetVersion`` or ``hipDriverGetVersion``: 13000 is 13.0."""
    library: int
    """The version of the BLAS library; 0 if there is none, or if it does not report one."""
    fp8core: str
    sources: str
    """A hash of the kernels, and of the modules that prepare them."""


class Timed(NamedTuple):
    """A kernel, the number of its algorithm (0 runs without tuning), and the microseconds of a call."""

    kernel: str
    algorithm: int
    us: float
    name: str = ""
    """The name of the algorithm if the kernel has several: their order is not the same in every process."""

    def __str__(self) -> str:
        return f"{self.kernel}{f' algorithm {self.algorithm}' if self.algorithm else ''}: {self.us:.2f} us"


class Line(NamedTuple):
    """The contents of a line of JSON besides its checksum."""

    machine: Machine
    problem: ScaledMm
    chosen: tuple[str, int, str]
    """The kernel, the algorithm and its name."""
    default: tuple[str, int, str]
    """Those of the choice without tuning."""
    timed: tuple[Timed, ...]


@dataclass(frozen=True, repr=False)
class Tuning:
    """The result of `tune` for the product of a call; another process on such a machine can `apply` it.

    ``print`` lists all times. `save_tunings` and `load_tunings` keep the tunings of a process in a file; ``to_json``
    and ``from_json`` convert a single one.

    Examples:
        Made-up times of a product of 16 rows:

        >>> import fp8core
        >>> from fp8core.ops.explain import explain_product
        >>> from fp8core.tuning import Machine, Timed
        >>> machine = Machine("NVIDIA H200", driver=13000, library=130000, fp8core=fp8core.__version__, sources="0")
        >>> times = Timed("sm90_decode", 0, 8.0), Timed("cublaslt", 0, 10.0), Timed("cublaslt", 1, 9.0)
        >>> problem = explain_product(16, 4096, 7168, target="sm_90").problem
        >>> tuning = fp8core.Tuning(machine, times[0], times[1], times, problem)
        >>> tuning.m, tuning.n, tuning.k, tuning.chosen.kernel, tuning.gain
        (16, 4096, 7168, 'sm90_decode', 0.25)
        >>> print(tuning)
        16 x 4096 x 7168, float8_e4m3fn x float8_e4m3fn to bfloat16, scales per row and row, on NVIDIA H200
        > sm90_decode: 8.00 us
          cublaslt algorithm 1: 9.00 us
          cublaslt: 10.00 us
        >>> fp8core.Tuning.from_json(tuning.to_json()) == tuning
        True
    """

    machine: Machine
    """Everything besides the call that times depend on: GPU, driver, BLAS library, fp8core and its kernels."""
    chosen: Timed
    """The kernel, and the number of its algorithm, that such calls run from now on, and ``us``, the microseconds of a
    call; these are infinite if no candidate was timed fully."""
    default: Timed
    """The choice without tuning; its time is infinite if its launch failed or was far slower than another's."""
    timed: tuple[Timed, ...]
    """All candidates that were timed fully, in the order of preference without tuning."""
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
        """The axis that a and b share: input channels."""
        return self._problem.k

    @property
    def dtypes(self) -> tuple[str, str, str]:
        """The names of the dtypes of a, of the weight and of the result."""
        return self._problem.a, self._problem.b, self._problem.out

    @property
    def scales(self) -> tuple[Granularity, Granularity]:
        """The granularity of the scales of a and of the weight: "tensor", "row", "group" (1x128), "block" (128x128)."""
        return self._problem.scale_a, self._problem.scale_b

    @property
    def gain(self) -> float:
        """How much slower `default` is, as a fraction of the tuned time: 0.1 is 10 %.

        It is infinite if only the default was not timed fully, and 0 if no candidate was.
        """
        return self.default.us / self.chosen.us - 1 if self.timed else 0.0

    def _call(self) -> str:
        (a, b, out), (scale_a, scale_b) = self.dtypes, self.scales
        shape = f"{self.m} x {self.n} x {self.k}"
        return f"{shape}, {a} x {b} to {out}, scales per {scale_a} and {scale_b}, on {self.machine.gpu}"

    def __repr__(self) -> str:
        return f"Tuning({self._call()}; {self.chosen})"

    def __str__(self) -> str:
        rows = [f"{'>' if t == self.chosen else ' '} {t}" for t in sorted(self.timed, key=lambda t: t.us)]
        return "\n".join([self._call(), *rows])

    @property
    def key(self) -> tuple[Machine, ScaledMm]:
        """The machine, and the product without the ordinal of its device."""
        return self.machine, self._problem._replace(target=normal(self._problem.target), prefetch_weight=False)

    def problems(self) -> list[ScaledMm]:
        """Return the products that the tuning applies to, for every device here that is like the timed one.

        Each comes twice: as in the first call of an `Fp8Linear`, and as in its later calls, which read the weight
        early.
        """
        places = [at for i in range(device.count()) if alike(at := device.target(i), self._problem.target)]
        return [
            self._problem._replace(target=at, prefetch_weight=prefetch)
            for at in places
            if machine(at) == self.machine
            for prefetch in (False, True)
        ]

    def apply(self) -> None:
        """Make all calls with this problem run the chosen kernel, on every device like the timed one.

        A call that another thread makes meanwhile may still run the former kernel.

        Raises:
            TuningError: the GPU, its driver, the BLAS library or fp8core differs from that of the times.
            UnsupportedProblemError: the chosen kernel or algorithm is not available here, and nothing has changed.
        """
        problems = self.problems()
        if not problems:
            here = [machine(device.target(i)) for i in range(device.count())]
            raise TuningError(f"the tuning needs {self.machine}, got {here or 'no such device'}")
        choices = {problem: self._choice(problem) for problem in problems}
        with choosing():
            for problem, choice in choices.items():
                SCALED_MM.prefer(problem, choice)
            APPLIED[self.key] = self

    def _choice(self, problem: ScaledMm) -> Choice:
        """Return the chosen kernel and algorithm as the table has them here."""
        choice = SCALED_MM.numbered(problem, self.chosen.kernel, self.chosen.name)
        if choice is None:
            raise UnsupportedProblemError(
                f"{self.chosen.kernel} has no algorithm {self.chosen.name or 0} for {SCALED_MM.explain(problem)}"
            )
        return choice

    def to_json(self) -> str:
        """Return the tuning as one line, which begins with a checksum."""
        text = self._fields()
        return json.dumps({"check": checksum(text)} | text)

    def _fields(self) -> dict[str, Any]:
        return {
            "machine": self.machine._asdict(),
            "problem": self._problem._asdict() | {"target": self._problem.target._asdict()},
            "chosen": _named(self.chosen),
            "default": _named(self.default),
            "timed": [list(one) for one in self.timed],
        }

    @classmethod
    def from_json(cls, text: str) -> "Tuning":
        """Return the tuning that `to_json` wrote.

        Raises:
            TuningError: the text is not such a line, is damaged, or is from a version with other fields.
        """
        if not isinstance(text, str):
            raise TuningError(f"not a tuning: text needs a line of JSON, got {type(text).__name__}")
        try:
            found = json.loads(text)
            if not isinstance(found, dict) or "check" not in found:
                raise ValueError("it has no checksum")
            if found.pop("check") != checksum(found):
                raise ValueError("its checksum is wrong")
            line: Line = typed(Line, found, "a line")
        except RecursionError as error:
            raise TuningError(f"not a tuning: nested too deep in {text[:80]!r}") from error
        except json.JSONDecodeError as error:
            raise TuningError(f"not a tuning: invalid JSON ({error}) in {text[:80]!r}") from error
        except ValueError as error:
            raise TuningError(f"not a tuning: {error} in {text[:80]!r}") from error
        chosen, default = (time_of(*named, line.timed) for named in (line.chosen, line.default))
        return cls(line.machine, chosen, default, line.timed, line.problem)


APPLIED: Final[dict[tuple[Machine, ScaledMm], Tuning]] = {}
"""The tunings of this process, which can be saved: for each product the one tuned or loaded last."""


def is_for(tuning: Tuning, target: Target) -> bool:
    """Return whether a tuning may apply to a target without a device: its driver and library are not known.

    One without a model may be any that is like the timed one.
    """
    from fp8core import __version__

    machine = tuning.machine
    same = (machine.fp8core, machine.sources) == (__version__, digest())
    return same and target.model in ("", machine.gpu) and alike(target, tuning._problem.target)


def apply_ahead(tuning: Tuning, target: Target) -> None:
    """Choose the kernel for a target without a device, too, unless it is a library's, which cannot be queried."""
    with choosing():
        for prefetch in (False, True):
            problem = tuning._problem._replace(target=target, prefetch_weight=prefetch)
            choice = SCALED_MM.numbered(problem, tuning.chosen.kernel, tuning.chosen.name)
            if choice is not None:
                SCALED_MM.prefer(problem, choice)


@contextmanager
def choosing() -> Iterator[None]:
    """Drop all planned calls after a block that changes choices of the table, however the block ends."""
    try:
        yield
    finally:
        LINEAR.forget()
        forget()


def checksum(fields: dict[str, Any]) -> str:
    """Return a checksum by which damaged lines are detected."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _named(one: Timed) -> list[str | int]:
    return [one.kernel, one.algorithm, one.name]


def time_of(kernel: str, algorithm: int, name: str, timed: Sequence[Timed]) -> Timed:
    """Return the entry of an algorithm in ``timed``; one with infinite time if it was not timed fully."""
    wanted = (one for one in timed if (one.kernel, one.algorithm, one.name) == (kernel, algorithm, name))
    return next(wanted, Timed(kernel, algorithm, math.inf, name))


def alike(one: Target, other: Target) -> bool:
    """Return whether two targets are equal except for the device's ordinal and model."""
    return normal(one) == normal(other)


def normal(target: Target) -> Target:
    """Return a target without the device's ordinal and model."""
    return target._replace(device=0, model="")


@cache
def machine(target: Target) -> Machine:
    """Return the `Machine` of a device."""
    from fp8core import __version__

    found = library.find(target.platform)
    version = 0 if isinstance(found, str) else found.version or 0
    return Machine(device.name(target.device), device.driver_version(), version, __version__, digest())


@cache
def digest() -> str:
    """Return a hash of the device sources and of the modules that choose and prepare kernels."""
    top = Path(args.__file__).parents[1]
    modules = sources.digest_of(top, sorted(top.rglob("*.py")))
    return hashlib.sha256(f"{sources.digest()}{modules}".encode()).hexdigest()[:16]
