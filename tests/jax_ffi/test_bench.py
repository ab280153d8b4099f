"""The benchmark of decoder layers under jax.jit, small and on the CPU: FP8 and bfloat16 compute the same."""

import json

import pytest

jax = pytest.importorskip("jax")

from bench import jax_layer, results  # noqa: E402
from bench.report import goals  # noqa: E402


@pytest.fixture
def small(monkeypatch):
    sizes = {"qkv": (192, 128), "o": (128, 128), "gate_up": (512, 128), "down": (128, 256)}
    for name, value in {"HIDDEN": 128, "SIZES": sizes, "LAYERS": 2, "ROUNDS": 1, "CHAIN": 6, "SMALL": 128}.items():
        monkeypatch.setattr(jax_layer, name, value)
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def test_records_of_the_layer_meet_their_goals_checks(small, tmp_path):
    records = [jax_layer.layer(3, 1), jax_layer.calls_of(1)]
    assert 0 < records[0]["error"] < jax_layer.FAR
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n", "utf-8")
    found = results.read(path)
    judged = {judged.goal.what: judged.checks for judged in goals.judge(found)}
    assert [check.case for check in judged["decoder layer under jax.jit"]] == ["m=3"]
    assert [
        len(judged[what]) for what in ("an eager call on JAX arrays", "a layer of one token in a program of JAX")
    ] == [2, 1]


def test_results_that_are_apart_are_not_timed(small, monkeypatch):
    monkeypatch.setattr(jax_layer, "in_fp8", lambda x, layers: x)
    with pytest.raises(SystemExit, match="apart"):
        jax_layer.layer(3, 1)
