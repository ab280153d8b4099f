"""A product in the terms of the BLASLt libraries: its values, its matrices and its descriptor.

Row-major ``out[m, n] = a[m, k] @ b[n, k]^T`` is the libraries' column-major ``D[n, m] = A^T B``, where their A is the
weight (k rows, n columns) and their B the tokens (k, m): the only orientation that every GPU supports for FP8.
"""

import ctypes
from typing import Final, Literal, NamedTuple

from fp8core.dtypes import FORMATS
from fp8core.kernels.gemm.blaslt.dialects import (
    EPILOGUE_BIAS,
    EPILOGUE_DEFAULT,
    EPILOGUE_GELU,
    SCALE_MODES,
    SCALE_TYPE,
    ScaleMode,
)
from fp8core.kernels.gemm.blaslt.library import Handle, Library
from fp8core.target import Target

Scales = Literal["unit", "tensor", "row", "group x block", "group x group"]

MODES: Final[dict[Scales, tuple[ScaleMode, ScaleMode]]] = {
    "unit": ("SCALAR", "SCALAR"),
    "tensor": ("SCALAR", "SCALAR"),
    "row": ("OUTER_VEC", "OUTER_VEC"),
    "group x block": ("BLK128x128", "VEC128"),
    "group x group": ("VEC128", "VEC128"),
}
"""The modes of the weight's scale and of the tokens' scale. A unit scale is SCALAR without an address."""


class Product(NamedTuple):
    """``out = scale_a * (scale_b * (a @ b)) + bias``, with the shapes and strides that the library gets.

    Also with ``beta`` times the previous out, and GELU.
    """

    target: Target
    m: int
    n: int
    k: int
    a: str
    b: str
    out: str
    scales: Scales
    """"row": vectors of m and n floats. "group": [k/128][m] or [k/128][n], dense. "block": [n/128] rows of k/128
    floats, each padded to a multiple of four."""
    bias: str
    """The dtype of the n numbers of a bias, or ""."""
    out_scale: bool
    """Whether the result is multiplied by a number on the device before it is rounded (to an FP8 format)."""
    amax: bool
    fast_accum: bool
    lda: int
    ldb: int
    ldo: int
    alignment: int
    """Of the addresses of a, b and out, in bytes."""
    gelu: bool = False
    """Whether to apply GELU, in its tanh approximation."""
    beta: float = 0.0


class Layouts:
    """The layouts of a product's four matrices."""

    def __init__(self, library: Library, product: Product) -> None:
        types = library.dialect.types
        m, n, k = product.m, product.n, product.k

        def layout(dtype: str, rows: int, columns: int, leading: int) -> Handle:
            return Handle(library, "MatrixLayout", types[dtype], rows, columns, leading, subject=product)

        self.weight = layout(product.b, k, n, product.ldb)
        self.tokens = layout(product.a, k, m, product.lda)
        self.out = layout(product.out, n, m, product.ldo)
        wide = product.out in FORMATS and not library.dialect.addend  # C is not read: beta is 0
        self.addend = layout(product.bias or "bfloat16", n, m, product.ldo) if wide else self.out


def describe(library: Library, product: Product) -> Handle:
    """Return the descriptor of the operation, without addresses."""
    dialect = library.dialect
    operation = Handle(library, "MatmulDesc", dialect.compute_32f, SCALE_TYPE, subject=product)
    operation.set("TRANSA", dialect.operation_t)
    operation.set("TRANSB", dialect.operation_n)
    operation.set("FAST_ACCUM", int(product.fast_accum))
    operation.set("EPILOGUE", EPILOGUE_BIAS * bool(product.bias) | EPILOGUE_GELU * product.gelu or EPILOGUE_DEFAULT)
    if product.bias:
        operation.set("BIAS_DATA_TYPE", dialect.types[product.bias])
    for operand, mode in zip("AB", MODES[product.scales], strict=True):
        if mode != "SCALAR":  # the default; cuBLASLt before 12.8 does not know the attribute
            operation.set(f"{operand}_SCALE_MODE", SCALE_MODES[mode])
    return operation


def pointers_of(product: Product) -> tuple[str, ...]:
    """Return the attributes for the addresses of scale_a, scale_b, bias, out_scale and amax; "" where absent."""
    scaled = product.scales != "unit"
    return (
        "B_SCALE_POINTER" if scaled else "",
        "A_SCALE_POINTER" if scaled else "",
        "BIAS_POINTER" if product.bias else "",
        "D_SCALE_POINTER" if product.out_scale else "",
        "AMAX_D_POINTER" if product.amax else "",
    )


class Operation:
    """A descriptor and the addresses that it contains; one call uses it at a time."""

    def __init__(self, library: Library, product: Product) -> None:
        self._owned = describe(library, product)
        self._library, self._product = library, product
        self._names = pointers_of(product)
        self._set = library.untyped("MatmulDescSetAttribute")
        self._value = ctypes.c_uint64()
        self.handle = self._owned.handle
        self.argument = ctypes.c_void_p.from_param(self.handle)
        # Converted once: argument types of the function would convert them in every call.
        numbers, value, size = library.dialect.attributes, ctypes.byref(self._value), ctypes.c_size_t.from_param(8)
        named = [(i, name) for i, name in enumerate(self._names) if name]
        self._settings = [(i, (self.argument, numbers[name], value, size)) for i, name in named]
        self.addresses: tuple[int, ...] = (0, 0, 0, 0, 0)

    def point(self, addresses: tuple[int, ...]) -> None:
        """Write the addresses that differ from those of the last call."""
        known = self.addresses
        for i, arguments in self._settings:
            if addresses[i] != known[i]:
                self._value.value = addresses[i]
                status = self._set(*arguments)
                if status:
                    self._library.check("MatmulDescSetAttribute", status, f"{self._names[i]} of {self._product}")
        self.addresses = addresses
