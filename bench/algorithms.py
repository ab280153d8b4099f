"""Describes in records which tile of a kernel, or which algorithm of a library, runs a product."""

from collections.abc import Callable
from typing import Any, Final

from fp8core.kernels.gemm.blaslt import library, mapping, ordering, query
from fp8core.kernels.gemm.blaslt.descriptors import Product
from fp8core.kernels.gemm.blaslt.pad_m import padded_product
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import ScaledMm
from fp8core.table import Choice

PRODUCTS: Final[dict[str, Callable[[ScaledMm], Product]]] = {
    "cublaslt": mapping.product,
    "cublaslt_relayout": mapping.product,
    "cublaslt_epilogue": mapping.accumulation,
    "cublaslt_pad_m": padded_product,
}
"""By kernel: the function that returns the product that the library computes."""


def name_of(p: ScaledMm, choice: Choice) -> str:
    """Return the name of a kernel's algorithm: a tile for `sm90_tiled`; empty for kernels with one algorithm."""
    return SCALED_MM.kernel(choice.kernel).algorithms(p)[choice.algorithm]


def described(p: ScaledMm, choice: Choice) -> dict[str, Any]:
    """Return the kernel, the algorithm's number and name, and cuBLASLt's attributes of its own algorithms."""
    return {"kernel": choice.kernel, "algorithm": choice.algorithm, "name": name_of(p, choice), **_about(p, choice)}


def _about(p: ScaledMm, choice: Choice) -> dict[str, Any]:
    if choice.kernel not in PRODUCTS:
        return {}
    offer = query.algorithms(PRODUCTS[choice.kernel](p))[choice.algorithm]
    found = library.find("cuda")
    assert isinstance(found, library.Library)
    config = ordering.Config.of(found, offer.algorithm)
    return {**config._asdict(), "waves": round(offer.waves, 3), "workspace": offer.workspace_bytes}
