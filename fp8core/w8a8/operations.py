"""The operations behind vLLM's names, with its names of operands in error messages."""

from typing import Any, Final

from fp8core import interop
from fp8core.core import specs
from fp8core.dtypes import FORMATS, HIGH_PRECISION
from fp8core.ops.quantize import quantize_operation
from fp8core.ops.scaled_mm import product_operation

QUANTIZE: Final = quantize_operation("input", "output")
QUANTIZE_INPUT: Final = quantize_operation("input", "output", "input_scale", "input_scale_ub")
PRODUCT: Final = product_operation("qinput", "weight", stored=False, results=HIGH_PRECISION)
APPLY: Final = product_operation("input", "weight", "input_scale", "weight_scale", stored=False, results=HIGH_PRECISION)
"""Like all operations here, with vLLM's operand names in error messages."""
VARIANTS: Final = {"quantize": (QUANTIZE, QUANTIZE_INPUT), "scaled_mm": (PRODUCT, APPLY)}
"""By the name of an operation: the operations here that differ from it in the names of operands and take less."""
INPUT: Final = interop.Operand("input", *HIGH_PRECISION)
ANY_INPUT: Final = interop.Operand("input", *HIGH_PRECISION, *FORMATS)
OUTPUT: Final = interop.Operand("output", *FORMATS)
WEIGHT: Final = interop.Operand("weight", *FORMATS)
QINPUT: Final = interop.Operand("qinput", *FORMATS)
UPPER: Final = interop.ScaleOperand("scale_ub", "float32")
INPUT_UPPER: Final = interop.ScaleOperand("input_scale_ub", "float32")
PER_TOKEN_IF_DYNAMIC: Final = "use_per_token_if_dynamic"


def upper_bound(x: Any, name: interop.ScaleOperand, *, used: bool) -> Any:
    """Return an upper bound of amax, or None where it is ignored; refuse what is neither a number nor an array."""
    if x is not None and interop.scalar(x) is None:
        interop.declared(x, name)
    return x if used else None


def fp8_of(x: Any, name: interop.Operand) -> str:
    """Return the dtype of an array; refuse any but FP8."""
    dtype, target = interop.declared(x, name)
    specs.check_fp8(specs.TensorSpec(name, dtype, (), (), target))
    return dtype
