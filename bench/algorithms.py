"""Which tile of a kernel, or which algorithm of a library, runs a product: as records name it."""

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
"""The product that the library is asked for, by kernels."""


def name_of(p: ScaledMm, choice: Choice) -> str:
    """Return the name of an algorithm of a kernel: of `sm90_tiled` a tile, empty of kernels that have one alone."""
    return SCALED_MM.kernel(choice.kernel).algorithms(p)[choice.algorithm]


def described(p: ScaledMm, choice: Choice) -> dict[str, Any]:
    """Return the kernel, the algorithm by its number and its name, and what cuBLASLt says of one of its own."""
    return {"kernel": choice.kernel, "algorithm": choice.algorithm, "name": name_of(p, choice), **_about(p, choice)}


def _about(p: ScaledMm, choice: Choice) -> dict[str, Any]:
    if choice.kernel not in PRODUCTS:
        return {}
    offer = query.algorithms(PRODUCTS[choice.kernel](p))[choice.algorithm]
    found = library.find("cuda")
    assert isinstance(found, library.Library)
    config = ordering.Config.of(found, offer.algorithm)
    return {**config._asdict(), "waves": round(offer.waves, 3), "workspace": offer.workspace_bytes}
