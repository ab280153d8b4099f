"""cuBLASLt and hipBLASLt: two rows of names and numbers (`names`), and one plan over them (`launch`)."""

from fp8core.blaslt.heuristic import Offer, answer, offers
from fp8core.blaslt.launch import Launch, plan, with_scratch
from fp8core.blaslt.library import Library, find
from fp8core.blaslt.names import CUBLASLT, DIALECTS, HIPBLASLT, Dialect
from fp8core.blaslt.product import Product

__all__ = [
    "CUBLASLT",
    "DIALECTS",
    "HIPBLASLT",
    "Dialect",
    "Launch",
    "Library",
    "Offer",
    "Product",
    "answer",
    "find",
    "offers",
    "plan",
    "with_scratch",
]
