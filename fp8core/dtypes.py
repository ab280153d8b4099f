"""The dtypes of arrays, by their names: the properties of FP8 formats, and the sizes of elements."""

from typing import Final, Literal, NamedTuple

Fp8Name = Literal["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]


class Format(NamedTuple):
    """The properties of an 8-bit floating-point format."""

    name: str
    largest: float
    """The largest finite number of the format."""
    maximum: float
    """The quantization maximum: 224 for e4m3fnuz, as in all serving stacks on MI300."""
    mantissa: int
    bias: int
    fnuz: bool
    nan: int
    """The byte that a NaN becomes."""


FORMATS: Final[dict[str, Format]] = {
    f.name: f
    for f in (
        Format("float8_e4m3fn", 448.0, 448.0, 3, 7, False, 0x7F),
        Format("float8_e4m3fnuz", 240.0, 224.0, 3, 8, True, 0x80),
        Format("float8_e5m2", 57344.0, 57344.0, 2, 15, False, 0x7F),
        Format("float8_e5m2fnuz", 57344.0, 57344.0, 2, 16, True, 0x80),
    )
}
HIGH_PRECISION: Final = ("float32", "float16", "bfloat16")
"""The dtypes of inputs that are quantized, and of results in high precision."""

ITEMSIZE: Final[dict[str, int]] = {
    **dict.fromkeys(FORMATS, 1),
    "float8_e8m0fnu": 1,
    "uint8": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int32": 4,
    "int64": 8,
}
