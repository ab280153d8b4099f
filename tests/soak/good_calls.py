"""One good call of each public function, and of which kind each of its arguments is."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import fp8core
from fp8core import GROUP_128, PER_TENSOR, w8a8
from support.engines import fresh, fresh_fp8, fresh_scale

M, N, K = 4, 32, 64


class Good(NamedTuple):
    """A good call: its arguments as NumPy arrays, and which kind each one is of."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    kinds: dict[str, str]
    also: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Other names that a refusal may use for an argument."""


_FLAGS = {"use_fast_accum": "flag", "batch_invariant": "flag"}
_RESULT = {"out": "out", "stream": "stream"}
_SCALING = {
    "dtype": "fp8 dtype",
    "group_shape": "group",
    "scale_format": "format",
    "scale_layout": "layout",
    "eps": "eps",
    **_RESULT,
}


def _scaling(rows: int, cols: int) -> dict[str, Any]:
    return {
        "dtype": "float8_e4m3fn",
        "group_shape": GROUP_128,
        "scale_format": "float32",
        "scale_layout": "k",
        "eps": np.float32(1e-10),
        "out": fresh_fp8((rows, cols)),
        "stream": None,
    }


def _product(stored: bool) -> Good:
    weight = fresh_fp8((N, K))
    return Good(
        fp8core.scaled_mm_nt if stored else fp8core.scaled_mm,
        {
            "a": fresh_fp8((M, K)),
            "weight" if stored else "b": weight if stored else weight.T,
            "scale_a": fresh_scale((M, 1)),
            "scale_b": fresh_scale((N, 1) if stored else (1, N)),
            "bias": fresh((N,)),
            "out_dtype": "bfloat16",
            "amax": np.ones(1, np.float32),
            "use_fast_accum": np.False_,
            "batch_invariant": 0,
            "out": fresh((M, N)),
            "stream": None,
        },
        {
            "a": "fp8",
            "weight" if stored else "b": "fp8",
            "scale_a": "scale, there",
            "scale_b": "scale, there",
            "bias": "bias",
            "out_dtype": "result dtype",
            "amax": "one float",
            **_FLAGS,
            **_RESULT,
        },
    )


def _grouped() -> Good:
    return Good(
        fp8core.grouped_scaled_mm_nt,
        {
            "a": fresh_fp8((M, K)),
            "weight": fresh_fp8((2, N, K)),
            "scale_a": fresh_scale((M, 1)),
            "scale_b": fresh_scale((2, N, 1)),
            "offs": np.array([1, M], np.int32),
            "bias": fresh((2, N)),
            "out_dtype": "bfloat16",
            "use_fast_accum": 1,
            "out": fresh((M, N)),
            "stream": None,
        },
        {
            "a": "fp8",
            "weight": "fp8",
            "scale_a": "scale, there",
            "scale_b": "scale, there",
            "offs": "ends",
            "bias": "bias",
            "out_dtype": "dtype",
            "use_fast_accum": "flag",
            **_RESULT,
        },
    )


def _permute() -> Good:
    arguments = {"x": fresh((M, K)), "topk_ids": np.array([[1, 0]] * M, np.int32), "experts": 2, "stream": None}
    kinds = {"x": "high", "topk_ids": "experts", "experts": "count", "stream": "stream"}
    return Good(fp8core.moe_permute, arguments, kinds)


def _unpermute() -> Good:
    inverse = np.arange(2 * M, dtype=np.int32).reshape(M, 2)
    arguments = {"y": fresh((2 * M, K)), "inverse": inverse, "topk_weights": fresh((M, 2), "float32")}
    arguments |= {"out_dtype": "bfloat16", "out": fresh((M, K)), "stream": None}
    kinds = {"y": "high", "inverse": "places", "topk_weights": "weights of choices", "out_dtype": "dtype", **_RESULT}
    return Good(fp8core.moe_unpermute, arguments, kinds, {"inverse": ("topk_weights", "out"), "y": ("out",)})


_LAYER = {**_FLAGS, "bias": "bias", "group_shape": "group of a product", "out_dtype": "result dtype"}


def _linear(function: Callable[..., Any], *, call: bool) -> Good:
    arguments = {
        "weight": fresh_fp8((N, K)),
        "weight_scale": fresh_scale((N, 1)),
        "bias": fresh((N,)),
        "input_scale": fresh_scale((1,)),
        "group_shape": PER_TENSOR,
        "out_dtype": "bfloat16",
        "use_fast_accum": True,
        "batch_invariant": False,
    }
    kinds = {"weight": "fp8", "weight_scale": "scale, there", "input_scale": "scale", **_LAYER}
    if call:
        arguments |= {"x": fresh((M, K)), "out": fresh((M, N)), "stream": None}
        kinds |= {"x": "high", **_RESULT}
    return Good(function, arguments, kinds)


def _dequantize() -> Good:
    arguments = {"q": fresh_fp8((M, K)), "scale": fresh_scale((M, 1)), "group_shape": (1, -1), "dtype": "float32"}
    arguments |= {"out": fresh((M, K), "float32"), "stream": None}
    kinds = {"q": "fp8", "scale": "scale, there", "group_shape": "group or none", "dtype": "dtype", **_RESULT}
    return Good(fp8core.dequantize, arguments, kinds)


def _shards() -> Good:
    arguments = {"weight": fresh_fp8((N, K)), "weight_scale": fresh_scale((1,)), "logical_widths": [N]}
    kinds = {"weight": "fp8", "weight_scale": "scale, there", "logical_widths": "widths of rows", **_RESULT}
    return Good(fp8core.requantize_with_max_scale, arguments | {"out": fresh_fp8((N, K)), "stream": None}, kinds)


def _normalize() -> Good:
    arguments = {"weight": fresh_fp8((N, K)), "weight_scale": fresh_scale((1,)), "input_scale": fresh_scale((1,))}
    kinds = {
        "weight": "fp8 of any shape",
        "weight_scale": "scales, any",
        "input_scale": "scales, any, or none",
        **_RESULT,
    }
    return Good(fp8core.normalize_e4m3fn_to_e4m3fnuz, arguments | {"out": fresh_fp8((N, K)), "stream": None}, kinds)


GOOD: dict[str, Callable[[], Good]] = {
    "quantize": lambda: Good(
        fp8core.quantize,
        {"x": fresh((M, K)), "rows_padded": M, **_scaling(M, K)},
        {"x": "high", "rows_padded": "rows", **_SCALING},
    ),
    "quantize, static": lambda: Good(
        fp8core.quantize,
        {"x": fresh((M, K)), "scale": fresh_scale((1,)), "group_shape": PER_TENSOR, "out": None},
        {"x": "high", "scale": "scale", "group_shape": "group"},
    ),
    "quantize, bounded": lambda: Good(
        fp8core.quantize, {"x": fresh((M, K)), "scale_ub": np.float32(1)}, {"scale_ub": "bound"}
    ),
    "rms_norm_quant": lambda: Good(
        fp8core.rms_norm_quant,
        {
            "x": fresh((M, K)),
            "weight": fresh((K,)),
            "epsilon": 1e-5,
            "residual": fresh((M, K)),
            "round_intermediate": False,
            **_scaling(M, K),
        },
        {
            "x": "high",
            "weight": "high",
            "epsilon": "epsilon",
            "residual": "out",
            "round_intermediate": "flag",
            **_SCALING,
        },
    ),
    "silu_and_mul_quant": lambda: Good(
        fp8core.silu_and_mul_quant,
        {"x": fresh((M, 2 * K)), "round_intermediate": True, **_scaling(M, K)},
        {"x": "high", "round_intermediate": "flag", **_SCALING},
    ),
    "dequantize": _dequantize,
    "scaled_mm": lambda: _product(stored=False),
    "scaled_mm_nt": lambda: _product(stored=True),
    "grouped_scaled_mm_nt": _grouped,
    "moe_permute": _permute,
    "moe_unpermute": _unpermute,
    "linear": lambda: _linear(fp8core.linear, call=True),
    "Fp8Linear": lambda: _linear(fp8core.Fp8Linear, call=False),
    "Fp8Linear.from_weight": lambda: Good(
        fp8core.Fp8Linear.from_weight,
        {"weight": fresh((N, K)), "weight_group_shape": (1, -1), "dtype": "float8_e4m3fn", **_layer_options()},
        {"weight": "high", "weight_group_shape": "group of a weight", "dtype": "fp8 dtype", **_LAYER},
    ),
    "Fp8Linear.__call__": lambda: Good(
        fp8core.Fp8Linear(fresh_fp8((N, K)), fresh_scale((1,))),
        {"x": fresh((M, K)), "out": fresh((M, N)), "stream": None},
        {"x": "high", **_RESULT},
    ),
    "requantize_with_max_scale": _shards,
    "convert_to_channelwise": lambda: Good(
        fp8core.convert_to_channelwise,
        {"weight_scale": fresh_scale((1,)), "logical_widths": [N], "stream": None},
        {"weight_scale": "scale, there", "logical_widths": "widths", "stream": "stream"},
    ),
    "normalize_e4m3fn_to_e4m3fnuz": _normalize,
    "all_close_1d": lambda: Good(
        fp8core.all_close_1d, {"x": fresh_scale((5,)), "stream": None}, {"x": "scales, any", "stream": "stream"}
    ),
    "per_tensor_dequantize": lambda: Good(
        fp8core.per_tensor_dequantize,
        {"q": fresh_fp8((M, K)), "scale": fresh_scale((1,)), "stream": None},
        {"q": "fp8", "scale": "scale, there", "stream": "stream"},
    ),
    "w8a8.scaled_fp8_quant": lambda: Good(
        w8a8.scaled_fp8_quant,
        {"input": fresh((M, K)), "scale": fresh_scale((1,)), "output": fresh_fp8((M, K)), "num_token_padding": M},
        {"input": "high", "scale": "scale", "output": "out", "num_token_padding": "rows"},
    ),
    "w8a8.Fp8LinearOp": lambda: Good(
        w8a8.Fp8LinearOp().apply,
        {
            "input": fresh((M, K)),
            "weight": fresh_fp8((N, K)).T,
            "weight_scale": fresh_scale((N, 1)),
            "bias": fresh((N,)),
            "input_scale": fresh_scale((1,)),
        },
        {"input": "high", "weight": "fp8", "weight_scale": "scale, there", "bias": "bias", "input_scale": "scale"},
    ),
}


def _layer_options() -> dict[str, Any]:
    options = {"bias": fresh((N,)), "group_shape": (1, -1), "out_dtype": "bfloat16"}
    return {**options, "use_fast_accum": True, "batch_invariant": False}
