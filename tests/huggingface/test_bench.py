"""The decoder of the benchmarks, small and on the CPU: what is recorded of each way, and that mistakes have no time."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import fp8core.torch  # noqa: E402 - after the skips
from bench import hf_decoder, hf_experts, results, timing, torch_chain  # noqa: E402
from bench.errors import relative  # noqa: E402
from bench.report import goals, tables  # noqa: E402


@pytest.fixture
def small(monkeypatch):
    for name, value in {"DEVICE": "cpu", "HIDDEN": 128, "MLP": 256, "HEADS": 4, "KEY_HEADS": 2}.items():
        monkeypatch.setattr(hf_decoder, name, value)
    compile_ = torch.compile
    asked = []

    def compiled(model, options=None, **others):
        asked.append(options)
        return compile_(model, backend="aot_eager", **others)

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(timing, "compare", lambda calls, least: {name: timing.Timing(2.0, 1.0, 3.0) for name in calls})
    monkeypatch.setattr(hf_decoder, "interleaved", lambda runs, *_: {name: [4.0, 5.0, 6.0] for name in runs})
    models = {name: hf_decoder.decoder(1) for name in ("bf16", "fp8core")}
    fp8core.torch.quantize_model_(models["fp8core"])
    return models, asked


@torch.no_grad()
def test_each_mode_has_a_record(small):
    models, asked = small
    records = list(hf_decoder.measure(3, models))
    assert [(record["mode"], record["m"]) for record in records] == [("graph", 3), ("options", 3), ("eager", 3)]
    assert [sorted(options or ()) for options in asked] == [[], [], *[sorted(fp8core.torch.compile_options())] * 2]
    for record in records:
        assert results.kind_of(record) == "hf_decoder"
        assert 0.001 < record["errors"]["fp8core"] < hf_decoder.FAR
        assert record["errors"]["bf16"] < 0.01
    assert [results.us(record, "fp8core") for record in records] == [2.0, 2.0, 5000.0]


def test_goals_are_judged_by_their_records(tmp_path):
    def record(mode, m, ratio):
        us = {name: timing.Timing(us, us, us)._asdict() for name, us in (("bf16", 100.0), ("fp8core", 100 * ratio))}
        return {"bench": "hf_decoder", "mode": mode, "m": m, "errors": {}, "us": us}

    path = tmp_path / "found.jsonl"
    kinds = ("graph", 1, 0.7), ("options", 1, 0.52), ("options", 16, 0.61), ("eager", 1, 0.99), ("eager", 16, 1.02)
    for one in kinds:
        results.append(path, record(*one))
    judged = [one for one in goals.judge(results.read(path)) if one.checks]
    assert [(one.goal.threshold, [check.case for check in one.checks]) for one in judged] == [
        (0.53, ["options, m=1"]),
        (0.6, ["options, m=16"]),
        (1.0, ["eager, m=1", "eager, m=16"]),
    ]
    assert [[check.met for check in one.checks] for one in judged] == [[True], [False], [True, False]]


@pytest.mark.parametrize("factor", [100, math.nan])
@torch.no_grad()
def test_what_is_wrong_has_no_time(small, monkeypatch, factor):
    models, _ = small
    monkeypatch.setattr(hf_decoder, "WAYS", ("graph", "eager"))  # with options a model is compiled, too
    models["fp8core"].layers[0].mlp.down_proj.weight_scale.mul_(factor)
    assert [record["us"] for record in hf_decoder.measure(1, models)] == [{}, {}]


@torch.no_grad()
def test_experts_have_a_record_for_each_way(monkeypatch, tmp_path):
    sizes = {"DEVICE": "cpu", "HIDDEN": 64, "INNER": 32, "EXPERTS": 8, "EACH": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(hf_experts, name, value)
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile_(model, backend="aot_eager", **options))
    monkeypatch.setattr(timing, "compare", lambda calls, least: {name: timing.Timing(2.0, 1.0, 3.0) for name in calls})
    monkeypatch.setattr(hf_decoder, "interleaved", lambda runs, *_: {name: [4.0, 5.0, 6.0] for name in runs})
    experts = hf_experts.modules()
    assert {name: type(module).__name__ for name, module in experts.items()} == {
        "bf16": "Qwen3MoeExperts", "loop": "Experts", "fp8core": "GroupedExperts"
    }  # fmt: skip
    results.append(tmp_path / "found.jsonl", *hf_experts.measure(5, experts))
    found = results.read(tmp_path / "found.jsonl")
    assert [(record["mode"], record["m"]) for record in found.hf_experts] == [
        ("eager", 5), ("graph", 5), ("compiled", 5)
    ]  # fmt: skip
    assert all(0.001 < record["errors"]["fp8core"] < hf_experts.FAR for record in found.hf_experts)
    assert [line.count("5,000.0") for line in tables.experts(found)[-4:-1]] == [3, 0, 0]
    experts["fp8core"].down.weight_scale.mul_(100)
    assert [record["us"] for record in hf_experts.measure(1, experts)] == [{}, {}, {}]


@torch.no_grad()
def test_the_chains_compute_the_same(monkeypatch):
    for name, value in {"DEVICE": "cpu", "WIDTH": 64, "LAYERS": 2}.items():
        monkeypatch.setattr(torch_chain, name, value)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours, theirs = (model(x).float() for model in torch_chain.chains().values())
    assert relative(theirs, ours) < 0.02
