"""Two checkouts compared: the processes, the calls and the records, on the host engine. No time is asserted."""

import json

import pytest

from bench import results
from support.bench_runs import ROOT, python

pytest.importorskip("torch", reason="the calls are made on torch tensors")

from bench import against


def test_every_call_is_made_in_both_checkouts(tmp_path):
    out = tmp_path / "out.jsonl"
    run = python("-m", "bench.against", ROOT, "--short", "--dry-run", "--json", out)
    assert run.returncode == 0, run.stdout + run.stderr
    found = results.read(out).against
    assert {record["kind"] for record in found} == {"gpu", "host"}
    names = " ".join(record["case"] for record in found)
    for function in (
        *("quantize", "dequantize", "rms_norm_quant", "silu_and_mul_quant", "scaled_mm", "scaled_mm_nt", "linear"),
        *("Fp8Linear", "requantize_with_max_scale", "normalize_e4m3fn_to_e4m3fnuz", "per_tensor_dequantize"),
        *("normalize_e4m3fnuz_to_e4m3fn", "convert_to_channelwise", "all_close_1d"),
    ):
        assert function in names
    assert not any("us" in record or "wrong" in record for record in found)


def other_checkout(folder, text):
    package = folder / "fp8core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(text)
    return folder


def test_a_call_that_the_other_lacks_is_reported(tmp_path):
    """The other checkout has the group shapes and nothing else: each of its calls fails, and is named."""
    names = "BLOCK_128 = GROUP_128 = PER_CHANNEL = PER_TENSOR = PER_TOKEN = (1, 128)"
    other, out = other_checkout(tmp_path / "other", names), tmp_path / "out.jsonl"
    run = python("-m", "bench.against", other, "--kinds", "host", "--dry-run", "--json", out)
    assert run.returncode == 1
    found = results.read(out).against
    assert found
    assert all(list(record["wrong"]) == ["before"] for record in found)
    assert "AttributeError" in found[0]["wrong"]["before"]


def test_a_checkout_that_does_not_start_is_an_error(tmp_path):
    paths = {"before": other_checkout(tmp_path, "raise SystemExit(7)")}
    with pytest.raises(RuntimeError, match="its process ended with status 7"), against.started(paths):
        pass


def test_fp8core_comes_from_the_checkout_that_was_named(tmp_path):
    (tmp_path / "fp8core").mkdir()
    run = python(ROOT / "bench" / "served.py", tmp_path)
    assert run.returncode != 0
    assert f"fp8core needs to come from {tmp_path.resolve()}" in run.stderr


def test_both_are_timed_in_turns(monkeypatch):
    """The ratio is that of what the processes answer, a call of what they ran at once."""

    class Side:
        def __init__(self, ms, calls):
            self.of_round, self.calls, self.asked = ms, calls, []

        def send(self, **request):
            self.asked.append(request["do"])

        def receive(self):
            return {"calls": self.calls} if self.asked[-1] == "prepare" else {}

        def ms(self, rounds):
            return self.of_round

    sides = {"before": Side(6.4, 64), "now": Side(3.2, 64)}
    record = json.loads(json.dumps(against.measure(sides, "gpu", "quantize", 0, short=False, dry=False)))
    assert record["us"]["before"] == {"median": 100.0, "low": 100.0, "high": 100.0}
    assert (record["us"]["now"]["median"], record["ratio"]) == (50.0, 0.5)
    assert [side.asked for side in sides.values()] == [["prepare", "drop"]] * 2
    assert against.cells(record)[1:4] == ["100.00", "50.00", "0.500"]
