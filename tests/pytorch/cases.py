"""Calls of every public function, as torch would meet them in a model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR
from pytorch.tensors import GROUPS, K, N, ends, poisoned, stacked, weight, wide


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """Forget what was compiled before each test of the modules that import this."""
    torch._dynamo.reset()


class Case(NamedTuple):
    name: str
    function: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...]]
    """Of so many rows; the first is what has them."""


def _x(m: int) -> tuple[torch.Tensor]:
    return (wide(m, K),)


def _norm(m: int) -> tuple[torch.Tensor, ...]:
    return wide(m, K), wide(K, seed=2), wide(m, K, seed=3)


def _with_weight(group: tuple[int, int]) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda m: (wide(m, K), *weight(group), wide(N, seed=4))


def _both(x_group: tuple[int, int], w_group: tuple[int, int]) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda m: (*fp8core.quantize(wide(m, K), group_shape=x_group), *weight(w_group), wide(N, seed=4))


def _grouped(
    x_group: tuple[int, int], w_group: tuple[int, int], beyond: int = 0
) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Return inputs of a grouped product whose last group ends ``beyond`` the last row."""

    def inputs(m: int) -> tuple[torch.Tensor, ...]:
        a = fp8core.quantize(wide(m, K), group_shape=x_group)
        return *a, *stacked(w_group), wide(GROUPS, N, seed=4), ends(m, m + beyond)

    return inputs


def _into(name: str, call: Callable[..., Any], cols: int) -> "tuple[Case, ...]":
    """Return calls of a quantization with results given: the codes, the scale, both; and the codes by a given scale."""

    def inputs(m: int) -> tuple[torch.Tensor, ...]:
        return (
            wide(m, K),
            poisoned(m, cols, dtype=torch.float8_e4m3fn),
            poisoned(m, 1, dtype=torch.float32),
            torch.full((1,), 0.02),
        )

    def codes(x: torch.Tensor, out: torch.Tensor, kept: torch.Tensor, static: torch.Tensor) -> Any:
        return *call(x + 1, out=out), out

    def scale(x: torch.Tensor, out: torch.Tensor, kept: torch.Tensor, static: torch.Tensor) -> Any:
        return *call(x + 1, out=(None, kept)), kept

    def both(x: torch.Tensor, out: torch.Tensor, kept: torch.Tensor, static: torch.Tensor) -> Any:
        return *call(x + 1, out=(out, kept)), kept + 1, out

    def given(x: torch.Tensor, out: torch.Tensor, kept: torch.Tensor, static: torch.Tensor) -> Any:
        return *call(x + 1, out=out, scale=static), out

    functions = {"out": codes, "scale": scale, "out_scale": both, "static_out": given}
    return tuple(Case(f"{name}_{kind}", function, inputs) for kind, function in functions.items())


def _norm_in_place(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> tuple[Any, ...]:
    total = residual * 1
    q = fp8core.rms_norm_quant(x, w, 1e-6, residual=total, group_shape=GROUP_128, scale_layout="mn")
    return *q, total


def _norm_of_input(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> tuple[Any, ...]:
    q = fp8core.rms_norm_quant(x, w, 1e-6, residual=residual, scale=0.05, group_shape=PER_TENSOR)
    return *q, residual + 1


def _producer_and_linear(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    q = fp8core.silu_and_mul_quant(torch.cat((x, x), -1))
    return fp8core.linear(q, w, scale, bias=bias)


def _amax(a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor, bias: torch.Tensor) -> tuple[Any, ...]:
    amax = torch.full((1,), -1.0, device=a.device)
    c = fp8core.scaled_mm_nt(a, b, sa, sb, out_dtype="float8_e4m3fn", out_scale=2.0, amax=amax)
    return c, amax


def _amax_and_out(
    a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor, bias: torch.Tensor
) -> tuple[Any, ...]:
    amax = torch.full((2,), -1.0, device=a.device)
    out = torch.full((2, a.shape[0], b.shape[0]), 7.0, dtype=torch.float32, device=a.device)
    fp8core.scaled_mm_nt(a, b, sa, sb, bias=bias.float(), out_dtype="float32", out=out[0], amax=amax[:1])
    fp8core.scaled_mm(a, b.T, sa, sb.T, out_dtype="float32", out=out[1], amax=amax[1:])
    return fp8core.scaled_mm(a, b.T, sa, sb.T, bias=bias, amax=amax[:1]), out, amax


def _mm_out(a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    out = torch.full((a.shape[0], b.shape[0]), 7.0, dtype=torch.float16, device=a.device)
    fp8core.scaled_mm_nt(a, b, sa, sb, bias=bias.half(), out_dtype=torch.float16, out=out)
    fp8core.scaled_mm_nt(a, b, sa, sb, activation="silu", beta=-0.5, out_dtype=torch.float16, out=out)
    return out


def _grouped_of_tokens(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    a = fp8core.quantize(x, group_shape=GROUP_128, scale_layout="mn")
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    pair = fp8core.Quantized(w, scale, BLOCK_128)
    return fp8core.grouped_scaled_mm_nt(a, pair, offs=counts.cumsum(0, dtype=torch.int32)).relu()


def _grouped_out(
    a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor, bias: torch.Tensor, offs: torch.Tensor
) -> torch.Tensor:
    """Rows after the last end keep what they have."""
    out = torch.full((a.shape[0], b.shape[1]), 7.0, dtype=torch.float16, device=a.device)
    fp8core.grouped_scaled_mm_nt(a, b, sa, sb, offs=offs, bias=bias.float(), out_dtype="float16", out=out)
    return out * 1


def _choices(m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two experts of each token, all of which exist, and the weights of these."""
    return torch.arange(2 * m).view(m, 2) * 5 % GROUPS, wide(m, 2, seed=6).float()


def _permute(x: torch.Tensor, ids: torch.Tensor) -> tuple[Any, ...]:
    """Quantized by groups, and as they are."""
    q, *rest = fp8core.moe_permute(fp8core.quantize(x, group_shape=GROUP_128, scale_layout="mn"), ids, GROUPS)
    return *fp8core.moe_permute(x + 1, ids.int(), GROUPS), *q, *rest, q.dequantize()


def _permute_one_scale(x: torch.Tensor, ids: torch.Tensor) -> tuple[Any, ...]:
    q, *rest = fp8core.moe_permute(fp8core.quantize(x, group_shape=PER_TENSOR), ids, GROUPS)
    return *rest, q.dequantize()


def _unpermute_out(y: torch.Tensor, inverse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    fp8core.moe_unpermute(y * 2, inverse, out_dtype=torch.float32, out=out)
    return out * 1


def _mixture(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Some choices are no expert's."""
    rows, offs, inverse = fp8core.moe_permute(fp8core.quantize(x), ids - 1, experts=GROUPS - 1)
    y = fp8core.grouped_scaled_mm_nt(rows, w[:-1], scale_b=scale[:-1], offs=offs)
    return fp8core.moe_unpermute(y, inverse, shares).relu()


def _dequantize_out(q: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    fp8core.dequantize(q, scale, dtype="bfloat16", out=out)
    return out * 1


def _linear_out(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    fp8core.linear(x, w, scale, out=out)
    return out.relu()


def _requantize_out(w: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = torch.zeros_like(w.view(torch.uint8)).view(w.dtype)
    rows = w.shape[0]
    return fp8core.requantize_with_max_scale(w, scales, [rows - 1, 1], out=out)[0], out, w


def _requantize(w: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
    fused = w.view(torch.uint8).clone().view(w.dtype)
    rows = w.shape[0]
    return fp8core.requantize_with_max_scale(fused, scales, [rows // 2, rows - rows // 2])[0], fused


def _normalize_out(w: torch.Tensor, scale: torch.Tensor, input_scale: Any = None) -> tuple[Any, ...]:
    out = torch.full_like(w.view(torch.uint8), 0x5A).view(torch.float8_e4m3fnuz)
    done = fp8core.normalize_e4m3fn_to_e4m3fnuz(w, scale, input_scale, out=out)
    return *done, out, w


def _normalize_in_place(w: torch.Tensor, scale: torch.Tensor, input_scale: Any = None) -> tuple[Any, ...]:
    codes = w.view(torch.uint8).clone().view(w.dtype)
    done = fp8core.normalize_e4m3fn_to_e4m3fnuz(codes, scale, input_scale, out=codes)
    return *done, codes, w


CASES = (
    Case("dequantize_out", _dequantize_out, lambda m: (*weight((1, -1), m, K), poisoned(m, K, dtype=torch.bfloat16))),
    Case("linear_out", _linear_out, lambda m: (wide(m, K), *weight((1, -1)), poisoned(m, N, dtype=torch.bfloat16))),
    Case(
        "scaled_mm_kn_out",
        lambda a, sa, b, sb, out: (fp8core.scaled_mm(a, b.T, sa, sb.T, out_dtype="float32", out=out), out)[1],
        lambda m: (*_both((1, -1), (1, -1))(m)[:4], poisoned(m, N, dtype=torch.float32)),
    ),
    Case("requantize_out", _requantize_out, lambda m: (weight((1, -1), m, K).data, torch.tensor([0.5, 0.25]))),
    Case("silu_static", lambda x: fp8core.silu_and_mul_quant(x, scale=0.02), _x),
    Case("quantize", lambda x: tuple(fp8core.quantize(x * 2)), _x),
    Case("quantize_mn", lambda x: fp8core.quantize(x, group_shape=GROUP_128, scale_layout="mn"), _x),
    Case("quantize_tensor", lambda x: fp8core.quantize(x, dtype=torch.float8_e5m2, group_shape=PER_TENSOR), _x),
    Case("quantize_bytes", lambda x: fp8core.quantize(x, group_shape=GROUP_128, scale_format="ue8m0_bytes"), _x),
    Case("quantize_bound", lambda x: fp8core.quantize(x, scale_ub=1.5), _x),
    Case(
        "quantize_bound_array",
        lambda x, ub: fp8core.quantize(x, scale_ub=ub),
        lambda m: (*_x(m), wide(1).abs().float()),
    ),
    Case("quantize_static", lambda x, s: fp8core.quantize(x, scale=s), lambda m: (*_x(m), torch.full((1,), 0.02))),
    Case("quantize_number", lambda x: fp8core.quantize(x, scale=0.02, group_shape=PER_TENSOR), _x),
    Case("quantize_padded", lambda x: fp8core.quantize(x, rows_padded=24), _x),
    *_into("quantize", fp8core.quantize, K),
    *_into("rms_norm", lambda x, **to: fp8core.rms_norm_quant(x, torch.ones(K, device=x.device), 1e-6, **to), K),
    *_into(
        "rms_norm_residual",
        lambda x, **to: fp8core.rms_norm_quant(x, torch.ones(K, device=x.device), 1e-6, residual=x * 2, **to),
        K,
    ),
    *_into("silu", fp8core.silu_and_mul_quant, K // 2),
    Case("quantize_3d", lambda x: fp8core.quantize(x.reshape(-1, 2, K // 2), group_shape=GROUP_128), _x),
    Case("dequantize", lambda x: fp8core.quantize(x).dequantize(torch.float16), _x),
    Case(
        "dequantize_block",
        lambda q, s: fp8core.dequantize(q, s, group_shape=BLOCK_128, dtype="bfloat16"),
        lambda m: tuple(weight(BLOCK_128, m, K)),
    ),
    Case(
        "per_tensor_dequantize",
        lambda q, s: fp8core.per_tensor_dequantize(q, s),
        lambda m: tuple(weight(PER_TENSOR, m, K)),
    ),
    Case("rms_norm", lambda x, w, r: fp8core.rms_norm_quant(x, w, 1e-5), _norm),
    Case("rms_norm_number", lambda x, w, r: fp8core.rms_norm_quant(x, w, 1e-5, scale=0.05), _norm),
    Case("rms_norm_residual", _norm_in_place, _norm),
    Case("rms_norm_residual_input", _norm_of_input, _norm),
    Case("silu", lambda x: fp8core.silu_and_mul_quant(x, group_shape=(1, 64), round_intermediate=True), _x),
    Case("linear_channel", lambda x, w, s, b: fp8core.linear(x, w, s, bias=b), _with_weight((1, -1))),
    Case(
        "linear_block",
        lambda x, w, s, b: fp8core.linear(x, w, s, group_shape=GROUP_128, out_dtype="float32"),
        _with_weight(BLOCK_128),
    ),
    Case(
        "linear_static",
        lambda x, w, s, b: fp8core.linear(x, w, s, input_scale=0.03, group_shape=PER_TENSOR, batch_invariant=True),
        _with_weight(PER_TENSOR),
    ),
    Case(
        "linear_3d",
        lambda x, w, s, b: fp8core.linear(x.reshape(1, -1, K), w, s, bias=b).relu(),
        _with_weight((1, -1)),
    ),
    Case(
        "linear_of_producer",
        _producer_and_linear,
        _with_weight((1, -1)),
    ),
    Case(
        "scaled_mm",
        lambda a, sa, b, sb, bias: fp8core.scaled_mm(a, b.T, sa, sb.T, bias=bias),
        _both((1, -1), (1, -1)),
    ),
    Case(
        "scaled_mm_block",
        lambda a, sa, b, sb, bias: fp8core.scaled_mm_nt(a, b, sa, sb, out_dtype="float32"),
        _both(GROUP_128, BLOCK_128),
    ),
    Case("scaled_mm_amax", _amax, _both((1, -1), (1, -1))),
    Case("scaled_mm_amax_out", _amax_and_out, _both((1, -1), (1, -1))),
    Case("scaled_mm_out", _mm_out, _both((1, -1), (1, -1))),
    Case(
        "grouped",
        lambda a, sa, b, sb, bias, offs: fp8core.grouped_scaled_mm_nt(a, b, sa, sb, offs=offs, bias=bias),
        _grouped((1, -1), (1, -1)),
    ),
    Case(
        "grouped_groups",
        lambda a, sa, b, sb, bias, offs: fp8core.grouped_scaled_mm_nt(a, b, sa, sb, offs=offs, out_dtype="float32"),
        _grouped(GROUP_128, GROUP_128, beyond=7),
    ),
    Case(
        "grouped_tensor",
        lambda a, sa, b, sb, bias, offs: fp8core.grouped_scaled_mm_nt(
            a, b, 0.5, sb[:, 0], offs=offs, use_fast_accum=False
        ),
        _grouped((1, -1), PER_TENSOR),
    ),
    Case("grouped_of_tokens", _grouped_of_tokens, lambda m: (wide(m, K), *stacked(BLOCK_128), ends(m, m))),
    Case("grouped_out", _grouped_out, _grouped((1, -1), (1, -1), beyond=-1)),
    Case("moe_permute", _permute, lambda m: (wide(m, K), _choices(m)[0])),
    Case("moe_permute_one_scale", _permute_one_scale, lambda m: (wide(m, K), _choices(m)[0])),
    Case(
        "moe_unpermute_out",
        _unpermute_out,
        lambda m: (
            wide(2 * m, K),
            torch.arange(2 * m, dtype=torch.int32).view(m, 2) - 1,
            poisoned(m, K, dtype=torch.float32),
        ),
    ),
    Case("mixture_of_experts", _mixture, lambda m: (wide(m, K), *stacked((1, -1)), *_choices(m))),
    Case("requantize", _requantize, lambda m: (weight((1, -1), m, K).data, torch.tensor([0.5, 0.25]))),
    Case(
        "convert_to_channelwise", lambda s: fp8core.convert_to_channelwise(s, [3, 0, 4]), lambda m: (wide(3).float(),)
    ),
    Case(
        "all_close_1d",
        lambda same, other: (fp8core.all_close_1d(same * 1), fp8core.all_close_1d(other), other * 2),
        lambda m: (torch.full((m,), 0.5), wide(m + 1, dtype=torch.float32)),
    ),
    Case(
        "normalize",
        lambda w, s: fp8core.normalize_e4m3fn_to_e4m3fnuz(w, s),
        lambda m: tuple(weight((1, -1), m, K)),
    ),
    *(
        Case(f"normalize_{name}", function, lambda m: tuple(weight((1, -1), m, K)))
        for name, function in (
            ("out", _normalize_out),
            ("input_out", lambda w, s: _normalize_out(w, s, s * 3)),
            ("inplace", _normalize_in_place),
            ("input_inplace", lambda w, s: _normalize_in_place(w, s, s * 3)),
        )
    ),
    Case(
        "normalize_back",
        lambda w, s: fp8core.normalize_e4m3fnuz_to_e4m3fn(*fp8core.normalize_e4m3fn_to_e4m3fnuz(w, s, s)),
        lambda m: tuple(weight((1, -1), m, K)),
    ),
)
