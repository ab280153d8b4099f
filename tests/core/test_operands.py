"""Operands on another device, or of a dtype that they never have, are refused by every operation."""

import pytest

from fp8core.core.scaling import EPS
from fp8core.core.specs import TensorSpec
from fp8core.errors import DeviceError, DTypeError
from fp8core.interop.dlpack import contiguous
from fp8core.ops.dequantize import DEQUANTIZE_CALLS
from fp8core.ops.fnuz import NORMALIZE_CALLS
from fp8core.ops.grouped_mm import GROUPED_MM_CALLS
from fp8core.ops.layer_checks import check_layer
from fp8core.ops.linear import ARRAYS, LINEAR_CALLS, LinearOptions
from fp8core.ops.moe_permute import PERMUTE_CALLS
from fp8core.ops.moe_unpermute import UNPERMUTE_CALLS
from fp8core.ops.producers import NORM_CALLS, SILU_CALLS
from fp8core.ops.quantize import QUANTIZE_CALLS
from fp8core.ops.scaled_mm import SCALED_MM_NT_CALLS
from fp8core.ops.shards import REQUANTIZE_CALLS
from fp8core.problem import PER_TOKEN
from fp8core.target import HOST
from support.targets import H200

E4M3, BF16, FP32 = "float8_e4m3fn", "bfloat16", "float32"
X, CODES, PER_ROW, ONE = ((4, 64), BF16), ((4, 64), E4M3), ((4, 1), FP32), ((1,), FP32)
WEIGHT, PER_CHANNEL, BIAS = ((8, 64), E4M3), ((8, 1), FP32), ((8,), BF16)
IDS = ((4, 2), "int32")
RESULT = ((4, 8), BF16)


def scaled(given, *more):
    """Return the options of a quantization per token."""
    return (E4M3, PER_TOKEN, given, None, "float32", "k", EPS, *more)


CALLS = {
    "quantize": (QUANTIZE_CALLS, (X, CODES, PER_ROW, ONE), scaled(False, None)),
    "quantize, scale given": (QUANTIZE_CALLS, (X, CODES, PER_ROW, None), scaled(True, None)),
    "dequantize": (DEQUANTIZE_CALLS, (CODES, PER_ROW, X), (None, BF16)),
    "norm": (NORM_CALLS, (X, ((64,), BF16), X, CODES, PER_ROW, ONE), scaled(False, 1e-6, False)),
    "silu": (SILU_CALLS, (((4, 128), BF16), CODES, PER_ROW, ONE), scaled(False, False)),
    "product": (
        SCALED_MM_NT_CALLS,
        (CODES, WEIGHT, PER_ROW, PER_CHANNEL, BIAS, RESULT, None, ONE),
        (BF16, True, False),
    ),
    "product in FP8": (
        SCALED_MM_NT_CALLS,
        (CODES, WEIGHT, PER_ROW, PER_CHANNEL, None, ((4, 8), E4M3), ONE, None),
        (E4M3, True, False),
    ),
    "grouped product": (
        GROUPED_MM_CALLS,
        (CODES, ((2, 8, 64), E4M3), PER_ROW, ((2, 8, 1), FP32), ((2, 8), BF16), ((2,), "int32"), RESULT),
        (BF16, True),
    ),
    "linear": (LINEAR_CALLS, (X, WEIGHT, PER_CHANNEL, BIAS, None, ONE, RESULT), ()),
    "linear, scale given": (LINEAR_CALLS, (X, WEIGHT, PER_CHANNEL, BIAS, ONE, None, RESULT), ()),
    "linear of FP8": (LINEAR_CALLS, (CODES, WEIGHT, PER_CHANNEL, BIAS, PER_ROW, None, RESULT), ()),
    "requantize": (REQUANTIZE_CALLS, (CODES, ONE, CODES, None), (4,)),
    "normalize": (NORMALIZE_CALLS, (CODES, CODES, ONE, None, ONE, None), (E4M3, "float8_e4m3fnuz")),
    "permute": (PERMUTE_CALLS, (CODES, PER_ROW, IDS, None, None, None, None), (3, None)),
    "unpermute": (UNPERMUTE_CALLS, (X, IDS, ((4, 2), FP32), X), (None,)),
}
"""An operation, the shape and dtype of each operand, and options."""


EACH = [(call, at) for call, (_, operands, _) in CALLS.items() for at, x in enumerate(operands) if x is not None]
"""Every operand of every call."""


def described(call, changed=None, **fields):
    """Describe a call, with changes to the spec of one operand."""
    operation, operands, options = CALLS[call]
    specs = [
        None if x is None else TensorSpec(name, x[1], x[0], contiguous(x[0]), H200)
        for name, x in zip(operation.operands, operands, strict=True)
    ]
    if changed is not None:
        specs[changed] = specs[changed]._replace(**fields)
    return operation.describe(specs, options)


@pytest.mark.parametrize("call", CALLS)
def test_the_operands_go_together(call):
    assert described(call).results


@pytest.mark.parametrize(("call", "away"), [(call, at) for call, at in EACH if at])
def test_an_operand_on_another_device_is_refused(call, away):
    name = CALLS[call][0].operands[away]
    with pytest.raises(DeviceError, match=rf"^{name}(\[i\])? needs to be where \w+ is, on sm_90 .*, got host$"):
        described(call, away, target=HOST)


@pytest.mark.parametrize("away", ARRAYS[1:])
def test_an_array_of_a_layer_on_another_device_is_refused_when_it_is_assigned(away):
    layer = dict(zip(ARRAYS, (WEIGHT, PER_CHANNEL, BIAS, ONE), strict=True))
    devices = {**dict.fromkeys(ARRAYS, H200), away: HOST}
    specs = [TensorSpec(name, dtype, shape, contiguous(shape), devices[name]) for name, (shape, dtype) in layer.items()]
    with pytest.raises(DeviceError, match=rf"^{away} needs to be where weight is, on sm_90 .*, got host$"):
        check_layer(LinearOptions(), specs)


@pytest.mark.parametrize(("call", "at"), EACH)
def test_an_operand_of_bytes_is_refused(call, at):
    name = CALLS[call][0].operands[at]
    with pytest.raises(DTypeError, match=rf"^{name}(\[i\])? needs .*, got uint8"):
        described(call, at, dtype="uint8")
