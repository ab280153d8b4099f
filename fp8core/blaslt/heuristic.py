"""What a library offers for a product, or why nothing: asked once a product."""

import ctypes
from functools import cache, lru_cache
from typing import Final, NamedTuple

from fp8core.blaslt.library import Library, Owned, find
from fp8core.blaslt.product import MODES, Layouts, Product, describe, pointers_of
from fp8core.blaslt.tiles import cost
from fp8core.errors import BackendError
from fp8core.problem import Target
from fp8core.runtime import device
from fp8core.table import PLANS_KEPT, Refusal, Unknown

WORKSPACE_BYTES: Final = 32 << 20
"""What NVIDIA advises for sm_90; more is offered to no algorithm."""
OFFERS_ASKED: Final = 8
HOPPER: Final = 90
"""The architecture on which the order of the offers was measured."""
SOME_ADDRESS: Final = 4096
"""Stands for an operand when the library is asked: it looks at which addresses are given, not behind them."""


class Offer(NamedTuple):
    """An algorithm that the library offers for a product."""

    algorithm: bytes
    workspace_bytes: int
    waves: float
    """How often the product fills the device."""


@cache
def absence(target: Target) -> Unknown | None:
    """Return why the device of ``target`` cannot be asked on this machine, or None when it can."""
    if target.device >= device.count():
        return Unknown(f"its library cannot be asked: this machine has no device {target.device}")
    here = device.target(target.device)
    if (here.platform, here.arch) != (target.platform, target.arch):
        return Unknown(f"its library cannot be asked: here device {target.device} is {here}")
    return None


def answer(product: Product) -> Refusal | Unknown | None:
    """Return why the library cannot compute ``product``, in its own terms, or None when it offers an algorithm.

    Unknown is what a library on another machine would say.
    """
    asked = _ask(product)
    return asked if isinstance(asked, str) else None


def offers(product: Product) -> tuple[Offer, ...]:
    """Return the algorithms that the library offers, the one that it would take first.

    Raises:
        BackendError: there is none; the message says what the library answered.
    """
    asked = _ask(product)
    if isinstance(asked, str):
        raise BackendError(f"{asked}: {product}")
    return asked


@lru_cache(PLANS_KEPT)
def _ask(product: Product) -> tuple[Offer, ...] | Refusal | Unknown:
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
        return heuristic(library, library.handle(product.target.device), product) or Refusal(
            f"{library} offers no algorithm for m={product.m} n={product.n} k={product.k} to {product.out}"
            f" with scales {' and '.join(MODES[product.scales])}"
        )
    except BackendError as error:
        return Refusal(error)


def heuristic(library: Library, handle: int, product: Product) -> tuple[Offer, ...]:
    """Return what the library offers for ``product``: best first, by its own word, or on Hopper by `cost`.

    On Hopper it is asked with and without a workspace, as otherwise split k crowds out what is often better. And for
    vectors of scales its heuristic knows a single kernel, while most of what it offers for a scale each can apply
    vectors just as well, which the library confirms when it is asked about one algorithm.

    Raises:
        BackendError: a call failed; "not supported" comes as an error or as no offer, as the library likes.
    """
    question = Question(library, handle, product)
    found = question.offered(WORKSPACE_BYTES)
    if product.target.arch != HOPPER:
        return found
    others: tuple[Offer, ...] = ()
    if product.scales == "row":
        similar = Question(library, handle, product._replace(scales="tensor"))
        others = (*similar.offered(WORKSPACE_BYTES), *similar.offered(0))
    own = dict.fromkeys((*found, *question.offered(0)))
    able = (*own, *(offer for offer in dict.fromkeys(others) if offer not in own and question.takes(offer)))
    sizes = product.m, product.n, product.target.multiprocessors
    return tuple(sorted(able, key=lambda offer: cost(library, offer.algorithm, *sizes)))


class Question:
    """A product in the library's descriptors, about which it can be asked.

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

    def offered(self, workspace_bytes: int) -> tuple[Offer, ...]:
        """Return the algorithms that the library's heuristic offers with so much workspace, in its order."""
        size = self._library.dialect.result_bytes
        preference = Owned(self._library, "MatmulPreference", subject=self._product)
        preference.set("MAX_WORKSPACE_BYTES", workspace_bytes)
        for operand in "ABCD":
            preference.set(f"MIN_ALIGNMENT_{operand}_BYTES", self._product.alignment)
        results = ctypes.create_string_buffer(OFFERS_ASKED * size)
        count = ctypes.c_int()
        status = self._library.function("MatmulAlgoGetHeuristic")(
            *self._subject,
            preference.handle,
            OFFERS_ASKED,
            ctypes.addressof(results),
            ctypes.addressof(count),
        )
        self._library.check("MatmulAlgoGetHeuristic", status, self._product)
        read = (self._read(results.raw[i * size : (i + 1) * size]) for i in range(count.value))
        return tuple(offer for offer, status in read if status == 0)

    def takes(self, offer: Offer) -> bool:
        """Return whether the library would run this product by an algorithm that it offered for another."""
        result = ctypes.create_string_buffer(self._library.dialect.result_bytes)
        status = self._library.function("MatmulAlgoCheck")(*self._subject, offer.algorithm, ctypes.addressof(result))
        checked, result_status = self._read(result.raw)
        return status == 0 and result_status == 0 and checked.workspace_bytes <= offer.workspace_bytes

    def _read(self, raw: bytes) -> tuple[Offer, int]:
        """Return the offer and the status of a heuristic's result."""
        size = self._library.dialect.algorithm_bytes
        result = Result.from_buffer_copy(raw, size)
        return Offer(raw[:size], result.workspace_bytes, result.waves), result.status


class Result(ctypes.Structure):
    """What follows the algorithm in a heuristic's result."""

    _fields_ = (("workspace_bytes", ctypes.c_size_t), ("status", ctypes.c_int), ("waves", ctypes.c_float))
    workspace_bytes: int
    status: int
    waves: float
