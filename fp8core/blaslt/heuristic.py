"""What a library offers for a product, or why nothing: asked once a product."""

import ctypes
from functools import cache, lru_cache
from typing import Final, NamedTuple

from fp8core import device
from fp8core.blaslt.library import Library, Owned, find
from fp8core.blaslt.product import MODES, Layouts, Product, describe, pointers_of
from fp8core.dispatch import PLANS_KEPT
from fp8core.errors import BackendError
from fp8core.problem import Target

WORKSPACE_BYTES: Final = 32 << 20
"""What NVIDIA advises for sm_90; more is offered to no algorithm."""
OFFERS_ASKED: Final = 8
SOME_ADDRESS: Final = 4096
"""Stands for an operand when the library is asked: it looks at which addresses are given, not behind them."""


class Offer(NamedTuple):
    """An algorithm that the library offers for a product."""

    algorithm: bytes
    workspace_bytes: int
    waves: float
    """How often the product fills the device."""


@cache
def absence(target: Target) -> str | None:
    """Return why the device of ``target`` cannot be asked on this machine, or None when it can."""
    if target.device >= device.count():
        return f"its library cannot be asked: this machine has no device {target.device}"
    here = device.target(target.device)
    if (here.platform, here.arch) != (target.platform, target.arch):
        return f"its library cannot be asked: here device {target.device} is {here}"
    return None


def answer(product: Product) -> str | None:
    """Return why the library cannot compute ``product``, in its own terms, or None when it offers an algorithm."""
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
def _ask(product: Product) -> tuple[Offer, ...] | str:
    away = absence(product.target)
    if away is not None:
        return away
    library = find(product.target.platform)
    if isinstance(library, str):
        return library
    version = library.version
    if version is not None:
        for mode in MODES[product.scales]:
            needed = library.dialect.minimum_versions[mode]
            if version < needed:
                return f"{library} has version {version}; {mode} needs {needed}"
    try:
        return heuristic(library, library.handle(product.target.device), product) or (
            f"{library} offers no algorithm for m={product.m} n={product.n} k={product.k} to {product.out}"
            f" with scales {' and '.join(MODES[product.scales])}"
        )
    except BackendError as error:
        return str(error)


def heuristic(library: Library, handle: int, product: Product) -> tuple[Offer, ...]:
    """Return what the library's heuristic offers for ``product``, best first.

    Raises:
        BackendError: a call failed; "not supported" comes as an error or as no offer, as the library likes.
    """
    dialect = library.dialect
    layouts = Layouts(library, product)
    operation = describe(library, product)
    for name in pointers_of(product):
        if name:
            operation.set(name, SOME_ADDRESS)
    preference = Owned(library, "MatmulPreference", subject=product)
    preference.set("MAX_WORKSPACE_BYTES", WORKSPACE_BYTES)
    for operand in "ABCD":
        preference.set(f"MIN_ALIGNMENT_{operand}_BYTES", product.alignment)
    results = ctypes.create_string_buffer(OFFERS_ASKED * dialect.result_bytes)
    count = ctypes.c_int()
    status = library.function("MatmulAlgoGetHeuristic")(
        handle,
        operation.handle,
        layouts.weight.handle,
        layouts.tokens.handle,
        layouts.addend.handle,
        layouts.out.handle,
        preference.handle,
        OFFERS_ASKED,
        ctypes.addressof(results),
        ctypes.addressof(count),
    )
    library.check("MatmulAlgoGetHeuristic", status, product)
    found = (results.raw[i * dialect.result_bytes : (i + 1) * dialect.result_bytes] for i in range(count.value))
    read = ((raw, Result.from_buffer_copy(raw, dialect.algorithm_bytes)) for raw in found)
    return tuple(
        Offer(raw[: dialect.algorithm_bytes], result.workspace_bytes, result.waves)
        for raw, result in read
        if result.status == 0
    )


class Result(ctypes.Structure):
    """What follows the algorithm in a heuristic's result."""

    _fields_ = (("workspace_bytes", ctypes.c_size_t), ("status", ctypes.c_int), ("waves", ctypes.c_float))
    workspace_bytes: int
    status: int
    waves: float
