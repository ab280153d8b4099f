"""The decoder layers of the benchmarks, small and on the host engine: all variants compute the same."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from bench import decoder, layer, timing  # noqa: E402 - they need torch

MODELS = {"tokens": decoder.Model(256, 384, 256, 512), "blocks": decoder.Model(256, 384, 640, 512, blocks=True)}
"""Attention gives the second one more columns than its q, k and v have."""


def quantized(values, data, scale):
    """Write codes and scales per token, by PyTorch's arithmetic."""
    values = values.float()
    scale.copy_((values.abs().amax(1, keepdim=True) / 448).clamp_min(1 / (448 * 512)))
    data.copy_((values / scale).clamp(-448, 448).to(torch.float8_e4m3fn))


def quantized_by_groups(x, data, scale, group, eps, least, most, *options):
    assert (group, eps, least, most, options) == (128, 1e-10, -448.0, 448.0, (False,) * 3)
    assert x.is_contiguous()
    groups = x.float().reshape(len(x), -1, 128)
    scale.copy_(groups.abs().amax(2).clamp_min(eps) / 448)
    data.copy_((groups / scale.unsqueeze(2)).clamp(-448, 448).reshape(x.shape).to(torch.float8_e4m3fn))


def normed(values, weight):
    return values * torch.rsqrt(values.square().mean(1, keepdim=True) + decoder.EPSILON) * weight.float()


def added(x, residual):
    total = x.float() + residual.float()
    residual.copy_(total.bfloat16())
    return total


def norm(data, x, weight, scale, epsilon, bound, residual):
    assert (epsilon, bound) == (decoder.EPSILON, None)
    quantized(normed(added(x, residual), weight), data, scale)


def norm_in_place(x, residual, weight, epsilon):
    assert epsilon == decoder.EPSILON
    x.copy_(normed(added(x, residual), weight).bfloat16())


def multiply(out, a, b, scale_a, scale_b, bias):
    assert bias is None
    out.copy_((decoder.dequantized(a, scale_a) @ decoder.dequantized(b.T, scale_b.T).T).bfloat16())


def silu_and_mul(out, x):
    gate, up = x.float().chunk(2, 1)
    out.copy_((torch.nn.functional.silu(gate) * up).bfloat16())


OPS = SimpleNamespace(
    rms_norm_dynamic_per_token_quant=norm,
    fused_add_rms_norm=norm_in_place,
    dynamic_per_token_scaled_fp8_quant=lambda data, x, scale, bound: quantized(x, data, scale),
    per_token_group_fp8_quant=quantized_by_groups,
    cutlass_scaled_mm=multiply,
    silu_and_mul=silu_and_mul,
)


@pytest.fixture
def small(monkeypatch):
    """Return a list that gets the variants that are timed and their calls; nothing is timed."""
    monkeypatch.setattr(decoder, "DEVICE", "cpu")
    monkeypatch.setattr(layer, "MODELS", MODELS)
    asked = []

    def compare(calls, replays, least):
        asked.append({name: len(of_layers) for name, of_layers in calls.items()})
        return {}

    monkeypatch.setattr(layer.timing, "compare", compare)
    monkeypatch.setattr(layer.timing, "rest", lambda: None)
    return asked


def measured(model, m, ops):
    weights = [decoder.Weights(MODELS[model], wide=True) for _ in range(2)]
    return layer.measure(model, m, weights, SimpleNamespace(vllm=ops))


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_all_variants_compute_the_layer(small, model, m):
    record = measured(model, m, OPS)
    assert record["wrong"] == {}
    assert (record["model"], record["m"], record["floor_us"]) == (model, m, MODELS[model].floor(m))
    assert small == [dict.fromkeys(("preallocated", "plain", "vllm", "torch"), 2)]


def test_a_wrong_or_missing_kernel_is_named_and_not_timed(small):
    doubled = SimpleNamespace(**{**vars(OPS), "silu_and_mul": lambda out, x: silu_and_mul(out, 2 * x)})
    assert list(measured("tokens", 2, doubled)["wrong"]) == ["vllm"]
    lacks = SimpleNamespace(**{name: op for name, op in vars(OPS).items() if name != "silu_and_mul"})
    assert "silu_and_mul" in measured("tokens", 2, lacks)["wrong"]["vllm"]
    assert small[0].keys() == {"preallocated", "plain", "torch"}


@pytest.mark.parametrize("model", MODELS)
def test_the_calls_of_a_layer_are_all_of_it(small, monkeypatch, model):
    times = [1.0, 3.5, 4.0, 7.0, 9.0, 9.5, 12.0]
    ran = {}

    def compare(calls, least):
        for name, of_layers in calls.items():
            memory.reset()
            ran[name] = of_layers[0]()
        return dict(zip(calls, map(layer.timing.Timing._make, [(t, t, t) for t in times]), strict=True))

    weights, memory = [decoder.Weights(MODELS[model], wide=False)], decoder.Memory(MODELS[model], 3)
    monkeypatch.setattr(layer, "Memory", lambda *_: memory)
    monkeypatch.setattr(layer.timing, "compare", compare)
    assert layer.added(model, 3, weights) == [1.0, 2.5, 0.5, 3.0, 2.0, 0.5, 2.5]
    memory.reset()
    assert torch.equal(ran["7"], decoder.plain(weights[0], memory))
    assert ran["5"].shape == (3, 1024)
    assert sum(MODELS[model].call_floors(3)) == pytest.approx(MODELS[model].floor(3))


def test_layers_share_memory_and_leave_it_as_given():
    memory = decoder.Memory.__new__(decoder.Memory)
    memory.x, memory.given = torch.ones(2, 2), torch.zeros(2, 2)
    memory.residual, memory.given_residual = torch.ones(2, 2), torch.full((2, 2), 3.0)
    memory.reset()
    assert memory.x.tolist() == memory.given.tolist()
    assert memory.residual.tolist() == memory.given_residual.tolist()


def test_the_floor_counts_every_weight_once_and_every_launch():
    model = decoder.MODELS["Llama-8B"]
    assert model.weight_bytes == 6144 * 4096 + 4096 * 4096 + 2 * 14336 * 4096 + 4096 * 14336 == 218_103_808
    launches = model.rooflines(1)
    assert len(launches) == 8
    more = sum(launch.bytes for launch in launches) - model.weight_bytes
    # Besides the weights: norms' weights once, and of each row what the launches read and write.
    assert more == 2 * 2 * 4096 + sum(
        two.bytes - one.bytes for one, two in zip(launches, model.rooflines(2), strict=True)
    )
    assert model.floor(4096) > sum(launch.flops for launch in model.rooflines(4096)) / 1.55e15 * 1e6


@pytest.mark.parametrize(
    ("times", "found"),
    [([3.0], (3.0, None, None)), ([1.0, 2.0], (1.5, 1.25, 1.75)), ([4.0, 1.0, 2.0], (2.0, 1.5, 3.0))],
)
def test_the_quartiles_lie_within_the_times_and_one_time_has_none(times, found):
    assert tuple(timing.spread(times)) == found
    assert str(timing.spread(times)) == f"{found[0]:.2f}"
