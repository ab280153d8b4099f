"""The algorithms that a library's heuristic offers for a product, or the reason for none: queried once per product."""

import ctypes
import hashlib
import math
from functools import cache, lru_cache
from typing import Final, NamedTuple

from fp8core.dtypes import ITEMSIZE
from fp8core.errors import BackendError
from fp8core.features import features
from fp8core.kernels.gemm.blaslt.corrections import corrected_us, gpu_of
from fp8core.kernels.gemm.blaslt.descriptors import MODES, Layouts, Product, describe, pointers_of
from fp8core.kernels.gemm.blaslt.library import FailedError, Handle, Library, find
from fp8core.kernels.gemm.blaslt.ordering import COUNTER_BYTES, MEASURED_VERSIONS, Config, Work
from fp8core.runtime import device
from fp8core.table import PLANS_KEPT, Refusal, Unknown
from fp8core.target import Target

CANDIDATES_ASKED: Final = 8
COUNTERS_OPTIONAL: Final = MEASURED_VERSIONS
"""Versions of cuBLASLt that report a tile counter as needed by algorithms with scale vectors, but run them without one:
all 165 algorithms that were tried on an H200, to the same bits (experiments/2026-11-choice)."""
SOME_ADDRESS: Final = 4096
"""Placeholder for an operand in a query: the library looks at which addresses are given, not at their memory."""


class Candidate(NamedTuple):
    """An algorithm that the library offers for a product."""

    algorithm: bytes
    workspace_bytes: int
    waves: float
    """How many times the product's blocks fill the device."""

    us: float | None = None
    """The estimated time, on Hopper, where a model was fitted, and if that knows the tile."""

    @property
    def name(self) -> str:
        """The algorithm's name, the same in every process with one version of the library and one kind of device.

        It covers the workspace, with which the same algorithm computes differently than without.
        """
        return hashlib.sha256(self.algorithm + self.workspace_bytes.to_bytes(8, "little")).hexdigest()[:16]


@cache
def absence(target: Target) -> Unknown | None:
    """Return why the device of ``target`` cannot be queried on this machine, or None when it can."""
    if not 0 <= target.device < device.count():
        absent = target if target.device < 0 else f"device {target.device}"
        return Unknown(f"its library cannot be queried: this machine has no {absent}")
    here = device.target(target.device)
    if (here.platform, here.arch) != (target.platform, target.arch):
        return Unknown(f"its library cannot be queried: device {target.device} here is {here}")
    return None


def refusal(product: Product) -> Refusal | Unknown | None:
    """Return why the library cannot compute ``product``, in its own terms, or None if it offers an algorithm.

    The answer of a library that is not on this machine is Unknown.

    Raises:
        BackendError: the library failed without saying anything about the product. The next query asks again.
    """
    asked = _ask(product)
    return asked if isinstance(asked, str) else None


def algorithms(product: Product) -> tuple[Candidate, ...]:
    """Return the algorithms that the library offers, best first.

    Raises:
        BackendError: there is none, and the message has the library's answer; or a call failed, as in `refusal`.
    """
    asked = _ask(product)
    if isinstance(asked, str):
        raise BackendError(f"{asked}: {product}")
    return asked


@lru_cache(PLANS_KEPT)
def _ask(product: Product) -> tuple[Candidate, ...] | Refusal | Unknown:
    away = absence(product.target)
    if away is not None:
        return away
    library = find(product.target.platform)
    if isinstance(library, str):
        return Refusal(library)
    version = library.version
    if version is not None:
        for mode in MODES[product.scales]:
            needed = library.dialect.minimum_versions[mode]
            if version < needed:
                return Refusal(f"{library} has version {version}; {mode} needs {needed}")
    try:
        return heuristic(library, library.handles.of_device(product.target.device), product) or Refusal(
            f"{library} offers no algorithm for m={product.m} n={product.n} k={product.k} to {product.out}"
            f" with scales {' and '.join(MODES[product.scales])}"
        )
    except FailedError:
        raise
    except BackendError as error:
        return Refusal(error)


def heuristic(library: Library, handle: int, product: Product) -> tuple[Candidate, ...]:
    """Return the library's algorithms for ``product``, best first: in its own order, or on Hopper by estimates.

    On Hopper it is queried with and without a workspace: with one alone, split-k algorithms crowd out others that are
    often better. For vectors of scales its heuristic offers a single kernel, but most algorithms that it offers for a
    scale per tensor can apply vectors, too; the library confirms that when it is asked about one algorithm.

    Raises:
        BackendError: a call failed. The library reports "not supported" either as an error or as no candidate.
    """
    query = HeuristicQuery(library, handle, product)
    found = query.offered(library.dialect.workspace_bytes)
    if "wgmma" not in features(product.target):
        return found
    others: tuple[Candidate, ...] = ()
    if product.scales == "row":
        similar = HeuristicQuery(library, handle, product._replace(scales="tensor"))
        others = (*similar.offered(library.dialect.workspace_bytes), *similar.offered(0))
    own = dict.fromkeys((*found, *query.offered(0)))
    able = (
        *own,
        *(candidate for candidate in dict.fromkeys(others) if candidate not in own and query.takes(candidate)),
    )
    work, gpu = work_of(product), gpu_of(product.target, library.version)
    times = [corrected_us(work, Config.of(library, one.algorithm), one.workspace_bytes, gpu) for one in able]
    estimated = (one._replace(us=time if math.isfinite(time) else None) for one, time in zip(able, times, strict=True))
    return tuple(sorted(estimated, key=lambda one: math.inf if one.us is None else one.us))


def work_of(product: Product) -> Work:
    """Return the properties of a product that its time depends on."""
    blockwise, vectors = product.scales.startswith("group"), product.scales == "row"
    out_bytes, multiprocessors = ITEMSIZE[product.out], product.target.multiprocessors
    return Work(product.m, product.n, product.k, vectors, blockwise, out_bytes, multiprocessors)


class HeuristicQuery:
    """A product in the library's descriptors, for queries about it.

    Raises:
        BackendError: a descriptor cannot be made.
    """

    def __init__(self, library: Library, handle: int, product: Product) -> None:
        self._library, self._product = library, product
        layouts = Layouts(library, product)
        operation = describe(library, product)
        for name in pointers_of(product):
            if name:
                operation.set(name, SOME_ADDRESS)
        self._owned = layouts, operation
        matrices = (layouts.weight, layouts.tokens, layouts.addend, layouts.out)
        self._subject = handle, operation.handle, *(matrix.handle for matrix in matrices)

    def offered(self, workspace_bytes: int) -> tuple[Candidate, ...]:
        """Return the algorithms that the library's heuristic offers with so much workspace, in its order."""
        size = self._library.dialect.result_bytes
        preference = Handle(self._library, "MatmulPreference", subject=self._product)
        preference.set("MAX_WORKSPACE_BYTES", workspace_bytes)
        for operand in "ABCD":
            preference.set(f"MIN_ALIGNMENT_{operand}_BYTES", self._product.alignment)
        results = ctypes.create_string_buffer(CANDIDATES_ASKED * size)
        count = ctypes.c_int()
        status = self._library.function("MatmulAlgoGetHeuristic")(
            *self._subject,
            preference.handle,
            CANDIDATES_ASKED,
            ctypes.addressof(results),
            ctypes.addressof(count),
        )
        self._library.check("MatmulAlgoGetHeuristic", status, self._product)
        read = (self._read(results.raw[i * size : (i + 1) * size]) for i in range(count.value))
        return tuple(candidate for candidate, status in read if status == 0)

    def takes(self, candidate: Candidate) -> bool:
        """Return whether the library runs this product by an algorithm that it has offered for another one.

        If it asks here for a tile counter, without which it has offered the algorithm, that is not needed: see
        `COUNTERS_OPTIONAL`.
        """
        result = ctypes.create_string_buffer(self._library.dialect.result_bytes)
        status = self._library.function("MatmulAlgoCheck")(
            *self._subject, candidate.algorithm, ctypes.addressof(result)
        )
        if status in self._library.dialect.failures:
            self._library.check("MatmulAlgoCheck", status, self._product)
        checked, result_status = self._read(result.raw)
        optional = COUNTER_BYTES if (self._library.version or 0) in COUNTERS_OPTIONAL else 0
        given = max(candidate.workspace_bytes, optional)
        return status == 0 and result_status == 0 and checked.workspace_bytes <= given

    def _read(self, raw: bytes) -> tuple[Candidate, int]:
        """Return the candidate and the status of a heuristic result."""
        size = self._library.dialect.algorithm_bytes
        result = Result.from_buffer_copy(raw, size)
        return Candidate(raw[:size], result.workspace_bytes, result.waves), result.status


class Result(ctypes.Structure):
    """The fields that follow the algorithm in a heuristic result."""

    _fields_ = (("workspace_bytes", ctypes.c_size_t), ("status", ctypes.c_int), ("waves", ctypes.c_float))
    workspace_bytes: int
    status: int
    waves: float
