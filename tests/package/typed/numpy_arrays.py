"""What checkers know of calls with NumPy arrays, with arrays of unknown type (CuPy), and of layers; it also runs."""

from typing import Any, assert_type

import ml_dtypes
import numpy as np
import numpy.typing as npt

import fp8core
from fp8core import Float8Array, Fp8Linear, GroupShape, Permuted, Quantized
from fp8core.types import Array, NumpyArray, Stream

x: npt.NDArray[np.float32] = np.ones((4, 256), np.float32)
weight = np.ones((8, 256), np.float32)

q = fp8core.quantize(x, group_shape=fp8core.GROUP_128, dtype="float8_e4m3fn")
assert_type(q, Quantized[NumpyArray, NumpyArray])
assert_type(q.data, NumpyArray)
assert_type(q.group_shape, GroupShape | None)
data, scale = q
assert_type(scale, NumpyArray)
assert_type(q.T, Quantized[NumpyArray, NumpyArray])
assert_type(q.dequantize("float16"), NumpyArray)
assert_type(fp8core.dequantize(q), NumpyArray)
assert_type(fp8core.dequantize(data, scale, group_shape=(1, 128), dtype=np.float32), NumpyArray)
assert q.data.dtype == ml_dtypes.float8_e4m3fn

assert_type(fp8core.rms_norm_quant(x, weight[0], 1e-6, scale_format="ue8m0"), Quantized[NumpyArray, NumpyArray])
assert_type(fp8core.silu_and_mul_quant(x, scale=0.5), Quantized[NumpyArray, NumpyArray])

w = fp8core.quantize(weight)
a = fp8core.quantize(x, scale_ub=np.float32(3), stream=None)
assert_type(fp8core.scaled_mm(a, w.T, out_dtype="float32"), NumpyArray)
assert_type(fp8core.scaled_mm(a.data, w.data.T, a.scale, w.scale.T, out_dtype=ml_dtypes.bfloat16), NumpyArray)
assert_type(fp8core.scaled_mm_nt(a, w, bias=np.ones(8, np.float32)), NumpyArray)
assert_type(fp8core.scaled_mm_nt(fp8core.quantize(x), fp8core.quantize(weight)), NumpyArray)
experts = fp8core.quantize(np.ones((2, 8, 256), np.float32))
ends = np.array([1, 4], np.int32)
assert_type(fp8core.grouped_scaled_mm_nt(a, experts, offs=ends), NumpyArray)
assert_type(fp8core.grouped_scaled_mm_nt(a.data, experts.data, a.scale, experts.scale, offs=ends), NumpyArray)
choices = np.array([[0, 1]] * 4)
rows, offs, inverse = fp8core.moe_permute(x, choices, experts=2)
assert_type(rows, NumpyArray)
assert_type(offs, NumpyArray)
assert_type(fp8core.moe_permute(a, choices, 2), Permuted[Quantized[NumpyArray, NumpyArray], NumpyArray])
assert_type(fp8core.moe_unpermute(rows, inverse, np.ones((4, 2), np.float32), out_dtype="bfloat16"), NumpyArray)
assert_type(fp8core.linear(x, w, group_shape=fp8core.PER_TOKEN), NumpyArray)
assert_type(fp8core.linear(a, w), NumpyArray)

layer = Fp8Linear.from_weight(weight, bias=np.ones(8, np.float32))
assert_type(layer, Fp8Linear)
assert_type(layer(x), NumpyArray)
assert_type(layer(a), NumpyArray)
assert_type(layer.in_features, int)
assert_type(layer.group_shape, GroupShape)

one, fused = fp8core.requantize_with_max_scale(w.data.copy(), 0.5, [4, 4])
assert_type(one, NumpyArray)
assert_type(fp8core.convert_to_channelwise(np.ones(2, np.float32), [4, 4]), NumpyArray)
assert_type(fp8core.per_tensor_dequantize(w.data, 0.5), NumpyArray)
assert_type(fp8core.normalize_e4m3fn_to_e4m3fnuz(w.data, w.scale), tuple[NumpyArray, NumpyArray, NumpyArray | None])
assert_type(fp8core.all_close_1d(np.ones(3, np.float32)), bool)

told = fp8core.explain(fp8core.linear, fp8core.ArraySpec((4, 256), "bfloat16"), w, target="sm_90")
assert_type(told, fp8core.Explanation)
assert_type(told.chosen, str | None)
assert_type(told.short, str)
assert_type(fp8core.capabilities("sm_90")["scaled_mm_block"].able, bool)


class LikeCupy:
    """CuPy's arrays have no types for checkers; this is one as it would be."""

    shape: tuple[int, ...] = (4, 256)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory."""
        return {}

    def get(self, stream: object = None, order: str = "C") -> NumpyArray:
        """Return a copy in host memory."""
        return x

    def __dlpack__(self, stream: object = None) -> object:
        """Return a capsule."""
        return None


class CupyLikeStream:
    """As ``cupy.cuda.Stream``."""

    ptr: int = 0


def on_a_gpu(x: LikeCupy, stream: Stream) -> LikeCupy:
    """Quantize and multiply arrays as CuPy's: FP8 data is a Float8Array, other results are arrays of CuPy."""
    q = fp8core.quantize(x, stream=stream)
    assert_type(q, Quantized[Float8Array, LikeCupy])
    assert_type(q.data, Float8Array)
    assert_type(fp8core.linear(x, q), LikeCupy)
    assert_type(fp8core.linear(q, q), LikeCupy)
    assert_type(q.dequantize(stream=CupyLikeStream()), LikeCupy)
    assert_type(fp8core.grouped_scaled_mm_nt(q, q, offs=x), Any)
    permuted = fp8core.moe_permute(q, x, 2)
    assert_type(permuted, Permuted[Quantized[Float8Array, LikeCupy], LikeCupy])
    assert_type(fp8core.moe_permute(x, x, 2).rows, LikeCupy)
    assert_type(fp8core.moe_permute(q.data, x, 2).rows, Float8Array)
    assert_type(fp8core.moe_unpermute(x, permuted.inverse), LikeCupy)
    assert_type(fp8core.scaled_mm_nt(q, q), Any)  # a Float8Array or an array of CuPy, as out_dtype says
    assert_type(fp8core.rms_norm_quant(x, x, 1e-6), Quantized[Float8Array, LikeCupy])
    return fp8core.dequantize(q)


def of_any_framework(x: Array, weight: Quantized[object, object], choices: Array) -> Array:
    """Give and take arrays of whatever framework."""
    assert_type(fp8core.quantize(x), Quantized[Array, Array])
    permuted = fp8core.moe_permute(x, choices, 2)
    assert_type(fp8core.moe_unpermute(permuted.rows, permuted.inverse), Array)
    return fp8core.linear(x, weight)


def of_unknown_type(x: Any) -> None:
    """Leave what is unknown unknown."""
    q = fp8core.quantize(x)
    assert_type(q, Any)
    assert_type(fp8core.linear(q, q), Any)
    permuted = fp8core.moe_permute(x, choices, 2)
    assert_type(permuted, Any)
    assert_type(fp8core.moe_unpermute(permuted.rows, permuted.inverse), Any)
    assert_type(fp8core.scaled_mm_nt(fp8core.quantize(x), fp8core.quantize(x)), Any)


of_any_framework(x, w, choices)
of_unknown_type(x)
for made in (q.data, q.dequantize(), layer(x), one, fused, fp8core.scaled_mm_nt(a, w)):
    assert isinstance(made, np.ndarray)
