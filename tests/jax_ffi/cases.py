"""Calls of every public function, as JAX would meet them in a model; arrays are NumPy's, for JAX and the host alike."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN, Quantized, w8a8

N, K = 256, 512
BF16 = ml_dtypes.bfloat16


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    """Run the tests of a module that imports this on JAX's CPU, also where there is a GPU."""
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def wide(*shape: int, dtype: Any = BF16, seed: int = 0) -> np.ndarray:
    """Return values that differ from each other, and from those of other seeds."""
    return np.random.default_rng(math.prod(shape) + seed).standard_normal(shape).astype(np.float32).astype(dtype)


def weight(group: tuple[int, int] = PER_CHANNEL, n: int = N, k: int = K) -> Quantized:
    return fp8core.quantize(wide(n, k, seed=1), group_shape=group)


def same(given: Any, wanted: Any) -> bool:
    """Return whether two arrays, or tuples of them, have the same dtypes, shapes and bytes."""
    if isinstance(wanted, tuple):
        return len(given) == len(wanted) and all(map(same, given, wanted))
    given, wanted = np.asarray(given), np.asarray(wanted)
    alike = given.dtype == wanted.dtype and given.shape == wanted.shape
    return alike and given.tobytes() == wanted.tobytes()


def near(given: Any, wanted: Any) -> bool:
    """Return whether arrays, or tuples of them, are the same but for what a BLAS rounds otherwise in other shapes."""
    if isinstance(wanted, tuple):
        return len(given) == len(wanted) and all(map(near, given, wanted))
    given, wanted = np.asarray(given), np.asarray(wanted)
    if given.dtype != wanted.dtype or given.shape != wanted.shape:
        return False
    given, wanted = given.astype(np.float32), wanted.astype(np.float32)
    return bool(np.linalg.norm(given - wanted) <= 2**-9 * np.linalg.norm(wanted))


class Case(NamedTuple):
    name: str
    function: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...]]
    """Of so many rows."""


def _x(m: int) -> tuple[Any, ...]:
    return (wide(m, K),)


def _norm(m: int) -> tuple[Any, ...]:
    return wide(m, K), wide(K, seed=2)


def _scaled(m: int) -> tuple[Any, ...]:
    return wide(m, K, dtype=np.float16), np.full((1,), 0.03, np.float32)


def _bounded(m: int) -> tuple[Any, ...]:
    return wide(m, K, dtype=np.float32), np.full((1,), 1.5, np.float32)


def _linear(group: tuple[int, int]) -> Callable[[int], tuple[Any, ...]]:
    return lambda m: (wide(m, K), *weight(group), wide(N, seed=4))


def _both(x_group: tuple[int, int], w_group: tuple[int, int]) -> Callable[[int], tuple[Any, ...]]:
    return lambda m: (*fp8core.quantize(wide(m, K), group_shape=x_group), *weight(w_group), wide(N, seed=4))


GROUPS = 3
"""Weights of a grouped product."""


def stacked(group: tuple[int, int] = PER_CHANNEL) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes and scales of a weight for each group."""
    each = [fp8core.quantize(wide(N, K, seed=seed), group_shape=group) for seed in range(GROUPS)]
    data, scale = (np.stack(parts) for parts in zip(*each, strict=True))
    return data, scale


def ends(m: int, end: int) -> np.ndarray:
    """Return where groups of m rows end, an empty one among them; the last one at row ``end``."""
    return np.array([m // 3, m // 3, end], np.int32)


def _grouped(
    x_group: tuple[int, int], w_group: tuple[int, int], beyond: int = 0
) -> Callable[[int], tuple[np.ndarray, ...]]:
    """Return inputs whose last group ends ``beyond`` the last row."""

    def inputs(m: int) -> tuple[np.ndarray, ...]:
        a = fp8core.quantize(wide(m, K), group_shape=x_group)
        return *a, *stacked(w_group), wide(GROUPS, N, seed=4), ends(m, m + beyond)

    return inputs


def _grouped_mm(a: Any, sa: Any, w: Any, sb: Any, bias: Any, offs: Any) -> Any:
    return fp8core.grouped_scaled_mm_nt(a, w, sa, sb, bias=bias, offs=offs)


def _grouped_pairs(a: Any, sa: Any, w: Any, sb: Any, bias: Any, offs: Any) -> Any:
    pairs = Quantized(a, sa, GROUP_128), Quantized(w, sb, BLOCK_128)
    return fp8core.grouped_scaled_mm_nt(*pairs, offs=offs, out_dtype="float16")


def _grouped_numbers(a: Any, sa: Any, w: Any, sb: Any, bias: Any, offs: Any) -> Any:
    return fp8core.grouped_scaled_mm_nt(a, w, 0.5, sb[:, 0], offs=offs, out_dtype="float32")


def _grouped_rest(a: Any, sa: Any, w: Any, sb: Any, bias: Any, offs: Any) -> Any:
    return fp8core.grouped_scaled_mm_nt(a, w, sa, sb, bias=bias, offs=offs)[:-1]


def choices(m: int) -> np.ndarray:
    """Return two experts of each token, all of which exist."""
    return (np.arange(2 * m, dtype=np.int32) * 5 % GROUPS).reshape(m, 2)


def _routed(m: int) -> tuple[np.ndarray, ...]:
    return wide(m, K), choices(m), wide(m, 2, dtype=np.float32, seed=6)


def _permute(x: Any, ids: Any, shares: Any) -> Any:
    return tuple(fp8core.moe_permute(x, ids, GROUPS))


def _permute_pair(x: Any, ids: Any, shares: Any) -> Any:
    q = fp8core.quantize(x, group_shape=GROUP_128, scale_layout="mn")
    rows, *rest = fp8core.moe_permute(q, ids, experts=GROUPS)
    return *rows, *rest


def _unpermute(x: Any, ids: Any, shares: Any) -> Any:
    return fp8core.moe_unpermute(x, ids - 1, out_dtype="float32"), fp8core.moe_unpermute(x, ids, shares)


def _mixture(x: Any, ids: Any, shares: Any, w: Any, scale: Any) -> Any:
    """Some choices are no expert's."""
    rows, offs, inverse = fp8core.moe_permute(fp8core.quantize(x), ids - 1, GROUPS - 1)
    y = fp8core.grouped_scaled_mm_nt(rows, Quantized(w[:-1], scale[:-1], PER_CHANNEL), offs=offs)
    return fp8core.moe_unpermute(y, inverse, shares)


def _quantize(**keywords: Any) -> Callable[..., Any]:
    return lambda x: tuple(fp8core.quantize(x, **keywords))


def _mm(a: Any, sa: Any, w: Any, sb: Any, bias: Any) -> Any:
    return fp8core.scaled_mm(a, w.T, sa, sb.T, bias=bias)


def _mm_nt(a: Any, sa: Any, w: Any, sb: Any, bias: Any) -> Any:
    return fp8core.scaled_mm_nt(a, w, sa, sb, bias=bias)


def _mm_fp8(a: Any, sa: Any, w: Any, sb: Any, bias: Any) -> Any:
    return fp8core.scaled_mm_nt(a, w, sa, sb, out_dtype="float8_e4m3fn", out_scale=2.0)


def _layer(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return fp8core.linear(x, Quantized(w, scale, PER_CHANNEL), bias=bias)


def _static_layer(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return fp8core.linear(x, w, scale, bias=bias, input_scale=0.02)


def _quantized_layer(a: Any, sa: Any, w: Any, sb: Any, bias: Any) -> Any:
    return fp8core.linear(Quantized(a, sa), Quantized(w, sb), bias=bias, activation="gelu")


def _blocks(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return fp8core.linear(x, w, scale, bias=bias, group_shape=GROUP_128)


def _chain(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    q = fp8core.quantize(x, group_shape=GROUP_128, scale_layout="mn")
    y = fp8core.scaled_mm_nt(q, Quantized(w, scale, BLOCK_128))
    return q.dequantize(), fp8core.silu_and_mul_quant(y, group_shape=(1, 32)).dequantize("float16")


def _fnuz(w: Any, scale: Any) -> Any:
    there = fp8core.normalize_e4m3fn_to_e4m3fnuz(w, scale, scale)
    return *there, *fp8core.normalize_e4m3fnuz_to_e4m3fn(*there)


def _vllm_layer(x: Any, w: Any, scale: Any, bias: Any) -> Any:
    return w8a8.Fp8LinearOp(use_per_token_if_dynamic=True).apply(x, w.T, scale, bias=bias)


def _vllm_product(a: Any, sa: Any, w: Any, sb: Any, bias: Any) -> Any:
    shape = 1, len(a) - 1, N
    return w8a8.cutlass_w8a8_scaled_mm(
        qinput=a, weight=w.T, out_dtype="bfloat16", scale_a=sa, scale_b=sb, bias=bias, output_shape=shape
    )


CASES = (
    *(
        Case(f"quantize_{group}_{layout}", _quantize(group_shape=group, scale_layout=layout), _x)
        for group in (PER_TOKEN, PER_TENSOR, GROUP_128, BLOCK_128)
        for layout in ("k", "mn")
    ),
    Case("quantize_e5m2", _quantize(dtype="float8_e5m2", group_shape=(1, 64), scale_format="ue8m0"), _x),
    Case("quantize_bytes", _quantize(group_shape=(1, 32), scale_format="ue8m0_bytes"), _x),
    Case("quantize_padded", _quantize(rows_padded=24), _x),
    Case("quantize_static", lambda x, s: tuple(fp8core.quantize(x, scale=s)), _scaled),
    Case("quantize_number", lambda x, s: tuple(fp8core.quantize(x, scale=0.25)), _scaled),
    Case("quantize_bound", lambda x, u: tuple(fp8core.quantize(x, scale_ub=u)), _bounded),
    Case("quantize_number_bound", lambda x, u: tuple(fp8core.quantize(x, scale_ub=1.25)), _bounded),
    Case("norm", lambda x, w: tuple(fp8core.rms_norm_quant(x, w, 1e-6)), _norm),
    Case(
        "norm_mn",
        lambda x, w: tuple(fp8core.rms_norm_quant(x, w, 1e-6, group_shape=GROUP_128, scale_layout="mn")),
        _norm,
    ),
    Case("norm_static", lambda x, w: tuple(fp8core.rms_norm_quant(x, w, 1e-6, scale=0.1)), _norm),
    Case("silu", lambda x: tuple(fp8core.silu_and_mul_quant(x, round_intermediate=True)), _x),
    Case("dequantize", lambda x: fp8core.quantize(x, group_shape=(1, 64)).dequantize("bfloat16"), _x),
    Case("dequantize_number", lambda q, s, *_: fp8core.per_tensor_dequantize(q, 0.5), _both(PER_TOKEN, PER_CHANNEL)),
    Case("scaled_mm", _mm, _both(PER_TOKEN, PER_CHANNEL)),
    Case("scaled_mm_blocks", _mm, _both(GROUP_128, BLOCK_128)),
    Case("scaled_mm_groups", _mm_nt, _both(GROUP_128, GROUP_128)),
    Case("scaled_mm_nt", _mm_nt, _both(PER_TENSOR, PER_TENSOR)),
    Case("scaled_mm_fp8", _mm_fp8, _both(PER_TOKEN, PER_CHANNEL)),
    Case("grouped", _grouped_mm, _grouped(PER_TOKEN, PER_CHANNEL)),
    Case("grouped_blocks", _grouped_pairs, _grouped(GROUP_128, BLOCK_128, beyond=7)),
    Case("grouped_groups", _grouped_mm, _grouped(GROUP_128, GROUP_128)),
    Case("grouped_numbers", _grouped_numbers, _grouped(PER_TOKEN, PER_TENSOR)),
    Case("grouped_rest", _grouped_rest, _grouped(PER_TOKEN, PER_CHANNEL, beyond=-1)),
    Case("permute", _permute, _routed),
    Case("permute_pair", _permute_pair, _routed),
    Case("unpermute", _unpermute, _routed),
    Case("mixture", _mixture, lambda m: (*_routed(m), *stacked())),
    Case("linear", _layer, _linear(PER_CHANNEL)),
    Case("linear_static", _static_layer, _linear(PER_CHANNEL)),
    Case("linear_quantized", _quantized_layer, _both(PER_TOKEN, PER_CHANNEL)),
    Case("linear_blocks", _blocks, _linear(BLOCK_128)),
    Case("chain", _chain, _linear(BLOCK_128)),
    Case("expand", lambda s: fp8core.convert_to_channelwise(s, [3, 0, 5]), lambda m: (wide(3, dtype=np.float32) ** 2,)),
    Case(
        "requantize",
        lambda w, s: fp8core.requantize_with_max_scale(w, s, [N // 2, N // 2]),
        lambda m: (np.array(weight().data), np.array([0.5, 0.25], np.float32)),
    ),
    Case("w8a8_quantize", lambda x: w8a8.scaled_fp8_quant(x, num_token_padding=24), _x),
    Case("w8a8_number", lambda x: w8a8.scaled_fp8_quant(x, 0.5), _x),
    Case("w8a8_bound", lambda x, u: w8a8.scaled_fp8_quant(x, None, None, u, True), _bounded),
    Case("w8a8_layer", _vllm_layer, _linear(PER_CHANNEL)),
    Case("w8a8_product", _vllm_product, _both(PER_TOKEN, PER_CHANNEL)),
    Case("fnuz", _fnuz, lambda m: tuple(weight())),
)
