"""The decoder layer of the benchmarks, small and on the host engine: all variants compute the same."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from bench import layer  # noqa: E402 - it needs torch

HIDDEN, QKV, MLP = 256, 384, 512


def quantized(values, data, scale):
    """Write codes and scales per token, by PyTorch's arithmetic."""
    values = values.float()
    scale.copy_((values.abs().amax(1, keepdim=True) / 448).clamp_min(1 / (448 * 512)))
    data.copy_((values / scale).clamp(-448, 448).to(torch.float8_e4m3fn))


def normed(values, weight):
    return values * torch.rsqrt(values.square().mean(1, keepdim=True) + layer.EPSILON) * weight.float()


def norm(data, x, weight, scale, epsilon, bound, residual):
    assert (epsilon, bound) == (layer.EPSILON, None)
    if residual is None:
        return quantized(normed(x.float(), weight), data, scale)
    total = x.float() + residual.float()
    residual.copy_(total.bfloat16())
    return quantized(normed(total, weight), data, scale)


def multiply(out, a, b, scale_a, scale_b, bias):
    assert bias is None
    out.copy_(((a.float() * scale_a) @ (b.float() * scale_b)).bfloat16())


def silu_and_mul(out, x):
    gate, up = x.float().chunk(2, 1)
    out.copy_((torch.nn.functional.silu(gate) * up).bfloat16())


OPS = SimpleNamespace(
    rms_norm_dynamic_per_token_quant=norm,
    dynamic_per_token_scaled_fp8_quant=lambda data, x, scale, bound: quantized(x, data, scale),
    cutlass_scaled_mm=multiply,
    silu_and_mul=silu_and_mul,
)


@pytest.fixture
def small(monkeypatch):
    sizes = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * MLP, HIDDEN), "down": (HIDDEN, MLP)}
    for name, value in {"DEVICE": "cpu", "HIDDEN": HIDDEN, "QKV": QKV, "MLP": MLP, "SIZES": sizes}.items():
        monkeypatch.setattr(layer, name, value)
    asked = []

    def compare(calls):
        asked.append({name: len(of_layers) for name, of_layers in calls.items()})
        return {}

    monkeypatch.setattr(layer.timing, "compare", compare)
    return asked


@pytest.mark.parametrize("m", [1, 3])
def test_all_variants_compute_the_layer(small, m):
    record = layer.measure(m, SimpleNamespace(vllm=OPS))
    assert record["wrong"] == {}
    assert small == [dict.fromkeys(("preallocated", "plain", "vllm"), layer.COPIES)]


def test_a_wrong_or_missing_kernel_is_named_and_not_timed(small):
    doubled = SimpleNamespace(**{**vars(OPS), "silu_and_mul": lambda out, x: silu_and_mul(out, 2 * x)})
    assert list(layer.measure(2, SimpleNamespace(vllm=doubled))["wrong"]) == ["vllm"]
    lacks = SimpleNamespace(**{name: op for name, op in vars(OPS).items() if name != "silu_and_mul"})
    assert "silu_and_mul" in layer.measure(2, SimpleNamespace(vllm=lacks))["wrong"]["vllm"]
    assert small[0].keys() == {"preallocated", "plain"}


def test_the_floor_counts_every_weight_once():
    weights = 6144 * 4096 + 4096 * 4096 + 2 * 14336 * 4096 + 4096 * 14336
    more = layer.roofline(1).bytes - weights
    assert weights == 218_103_808
    assert 0 < more == layer.roofline(2).bytes - layer.roofline(1).bytes + 4 * 4096
