"""The benchmarks' plumbing on results that are made up: plans, collection, goals, pictures, the page. No time is asserted."""

import ast
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import claims, goals, plot, results
from fp8core.runtime import device

ROOT = Path(__file__).resolve().parents[2]


def timing(**us):
    return {name: {"median": t, "low": 0.99 * t, "high": 1.01 * t} for name, t in us.items()}


def quantized(mode, rows, cols, mine, copy):
    us = timing(fp8core=mine, copy=copy, vllm=2 * copy)
    return {"mode": mode, "rows": rows, "cols": cols, "floor_us": 3 * rows * cols / 4.3e6, "us": us, "wrong": {}}


def product(mode, m, mine, library):
    us = timing(cublaslt=library, vllm=11.0) | (timing(sm90_decode=mine) if mine else {})
    return {"mode": mode, "m": m, "n": 4096, "k": 8192, "floor_us": 7.8 + m / 100, "us": us, "wrong": {}}


def odd(cols, mine, neighbour):
    us = timing(fp8core=mine, neighbour=neighbour)
    floors = {"floor_us": float(cols), "neighbour_floor_us": 1000.0}
    where = {"mode": "token", "x": "float32", "rows": 8, "cols": cols, "neighbour": "8x1000"}
    return {"bench": "odd", **where, **floors, "us": us}


SAMPLE = [
    {"bench": "machine", "device": "NVIDIA H200", "date": "2026-11-21", "command": "python -m bench --out made_up.jsonl"},
    quantized("token", 1, 4096, 1.0, 1.1),
    quantized("token", 8192, 8192, 49.0, 48.5),
    quantized("tensor", 8192, 8192, 74.0, 48.5),
    {**quantized("1x128", 8192, 8192, 50.0, 48.5), "wrong": {"sgl": "codes differ by 3"}},
    odd(1001, 1.29, 1.0),
    odd(2001, 2.7, 1.0),
    odd(501, 1.31, 1.0),
    {**quantized("token", 8192, 8192, 55.0, 49.0), "kind": "norm"},
    {**product("row", 256, None, 15.0), "bench": "invariance", "us": timing(free=15.0, invariant=39.5),
     "kernels": {"free": "cublaslt", "invariant": "sm90_decode"}},
    {**product("block", 16, None, 15.0), "bench": "invariance", "us": timing(free=9.0),
     "kernels": {"free": "sm90_decode", "invariant": "sm90_decode"}, "wrong": {"invariant": "other bits"}},
    {"case": "normalize fn to fnuz", "rows": 64, "cols": 64, "floor_us": 0.1, "us": timing(fp8core=1.0, copy=1.0)},
    {"case": "requantize, 3 shards", "rows": 64, "cols": 64, "floor_us": 0.1, "wrong": "differs"},
    *(product("row", m, 9.0 + m / 20 if m <= 64 else None, 15.0) for m in (1, 4, 8, 16, 32, 64, 128, 512)),
    product("block", 1, 9.0, 16.0),
    *({"bench": "calls", "framework": f, "step": s, "us": t} for f, s, t in
      (("fp8core", "scaled_mm m=16", 6.0), ("torch", "_scaled_mm m=16", 12.0))),
    {"bench": "overhead", "framework": "torch", "step": "view", "us": 0.5},
    {"bench": "host", "mode": "quantize bfloat16, per token", "copy_s": 1e-3, "s": 2e-3, "rate": 350.0, "unit": "M elements/s"},
    {"bench": "subject", "subject": "quantize", "status": 0, "seconds": 9.0},
    {"bench": "subject", "subject": "host", "skipped": "made up"},
]  # fmt: skip


@pytest.fixture
def sample(tmp_path):
    path = tmp_path / "sample.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in SAMPLE))
    return results.read(path)


@pytest.fixture
def make_performance(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("make_performance")


def python(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)


def test_performance_pages_are_those_of_the_results():
    run = python("docs/make_performance.py", "--check")
    assert run.returncode == 0, run.stderr + "run python docs/make_performance.py"


def test_the_results_in_the_repository_are_of_a_gpu():
    for path in (ROOT / "docs" / "results").glob("*.jsonl"):
        found = results.read(path)
        assert found.machine["device"]
        assert found.quantize
        assert found.decode


def test_records_are_told_apart_and_the_later_one_counts(sample, tmp_path):
    assert [len(kind) for kind in sample[1:]] == [2, 4, 3, 1, 2, 9, 0, 2, 0, 2, 1, 1]
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(json.dumps(quantized("token", 1, 4096, t, 1.0)) + "\n" for t in (3.0, 2.0)))
    assert [results.us(r, "fp8core") for r in results.read(path).quantize] == [2.0]


def test_commands_on_one_machine_make_one_page_and_two_machines_do_not(tmp_path):
    path = tmp_path / "two.jsonl"
    lines = [{"bench": "machine", "command": c, "device": "H200", "cpu": c} for c in ("first", "second")]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"bench": "machine", "command": "third"}]))
    machine = results.read(path).machine
    assert (machine["commands"], machine["cpu"], machine["device"]) == (["first", "second", "third"], "second", "H200")
    path.write_text("".join(json.dumps({**line, "device": line["cpu"]}) + "\n" for line in lines))
    with pytest.raises(ValueError, match="different GPUs"):
        results.read(path)


def test_a_line_of_nobody_is_refused():
    with pytest.raises(ValueError, match=r"\['speed'\]"):
        results.kind_of({"speed": 1})


def test_goals_are_judged_by_the_numbers(sample):
    verdicts = {g.what: [c.met for c in g.checks] for g in goals.goals(sample)}
    assert verdicts["product, m ≤ 16, per tensor and row"] == [
        9.0 + m / 20 - (7.8 + m / 100) <= 1.7 for m in (1, 4, 8, 16)
    ]
    assert verdicts["product, m ≤ 64, fp8core kernel"] == [True] * 7
    assert verdicts["dynamic per tensor, more than the chip holds"] == [True]
    assert verdicts["quantization moving ≥ 100 MB: static, per token, 1x128, both scale layouts"] == [True, False]
    assert verdicts["the same, moving ≥ 100 MB"] == [False]
    assert verdicts["any quantization of one token"] == [True]
    assert verdicts["quantization of odd sizes (k = 5137, 1025, 576; m = 1, 3, 83, 4099)"] == [True, False, False]
    assert verdicts["host time, scaled_mm, fp8core kernel"] == [True]
    assert verdicts["host time, scaled_mm, cuBLASLt"] == []
    assert verdicts["host engine, bfloat16 and float32"] == [True]


def test_claims_never_round_up(sample):
    assert "at 97–98 % of a copy" in claims.quantize(sample)
    assert "65 %" in claims.quantize(sample)
    assert (
        claims.quantize(sample._replace(quantize=sample.quantize[:1])) == "Quantization beside a copy of as many bytes"
    )


def test_the_cost_of_batch_invariance_is_a_range(sample):
    records = [{**r, "m": 64} if r["m"] == 256 else r for r in sample.invariance]
    assert claims.invariance(sample.invariance + records) == (
        "Up to 64 rows that costs +24.5 to +24.5 us; more rows take 2.6 to 2.6 times as long"
    )
    assert claims.invariance(sample.invariance[1:]) == ""


def test_pictures_are_drawn_of_what_there_is(sample, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = plot.draw(sample, tmp_path / "images")
    assert [p.stem for p in drawn] == ["quantize", "fused", "products-row", "products-block", "crossover"]
    assert [p.stem for p in drawn] == plot.drawable(sample)
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in drawn)
    assert plot.draw(sample._replace(quantize=[], fused=[], decode=[]), tmp_path) == []


def test_the_page_says_what_was_measured_and_what_was_not(sample, make_performance):
    text = make_performance.page(sample, plot.drawable(sample))
    for said in ("NVIDIA H200", "**not met**, 1 of 2", "| not measured |", "python -m bench --out made_up.jsonl"):
        assert said in text
    assert "| per token | float32 | 8x1001 | 1.29 | 8x1000 | 1.00 | 1.29 |" in text
    assert "- SGLang, 1x128 8192x8192: codes differ by 3" in text
    assert "- fp8core, requantize, 3 shards 64x64: differs" in text
    assert "- host: skipped, made up" in text
    assert set(re.findall(r"images/([\w-]+)\.png", text)) == set(plot.drawable(sample))
    section = make_performance.section(sample, plot.drawable(sample))
    assert "docs/images/quantize.png" in section
    assert "(per token x per channel)" in section


def test_the_page_states_what_batch_invariance_costs(sample, make_performance):
    text = make_performance.page(sample, [])
    assert "## Batch invariance" in text
    assert "\nmore rows take 2.6 to 2.6 times as long.\n" in text
    assert "| cuBLASLt | fp8core kernel | 256x4096x8192 | 10.36 | 15.00 | 39.50 | 24.50 |" in text
    assert "| fp8core kernel | fp8core kernel | 16x4096x8192 | 7.96 | 9.00 | wrong | - |" in text
    assert "- invariant, block 16x4096x8192: other bits" in text
    assert "Batch invariance" not in make_performance.page(sample._replace(invariance=[]), [])


def test_subjects_are_given_only_flags_that_they_have():
    for name, subject in bench.SUBJECTS.items():
        text = (ROOT / (subject.module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        known = {c.args[0].value for c in calls if getattr(c.func, "attr", "") == "add_argument"}
        given = {word for word in (*subject.arguments, *subject.short) if word.startswith("--")} | {"--json"}
        given |= {flag for flag in ("--peers", "--compile", "--deep-gemm") if getattr(subject, FIELDS[flag])}
        assert given <= known, name


FIELDS = {"--peers": "peers", "--compile": "compiles", "--deep-gemm": "deep_gemm"}


@pytest.mark.skipif(device.count() > 0, reason="it would run")
def test_what_cannot_run_here_is_skipped_with_the_reason(tmp_path):
    out = tmp_path / "new" / "out.jsonl"
    run = python("-m", "bench", "quantize", "decode", "--short", "--out", out)
    assert run.returncode == 0, run.stderr
    assert "quantize: skipped, needs a GPU" in run.stdout
    found = results.read(out)
    assert found.machine["cpu"]
    assert [(r["subject"], "GPU" in r["skipped"]) for r in found.subject] == [("quantize", True), ("decode", True)]


def test_the_plan_names_commands_and_unknown_subjects_are_refused(tmp_path):
    run = python("-m", "bench", "host", "--short", "--plan", "--out", tmp_path / "out.jsonl")
    assert run.returncode == 0, run.stderr
    assert "-m bench.host --rows 256 --cols 1024 --json" in run.stdout
    assert not (tmp_path / "out.jsonl").exists()
    assert "no such subject: guess" in python("-m", "bench", "guess").stderr


def test_lines_of_subjects_are_collected_and_a_failure_is_told(tmp_path, monkeypatch, capsys):
    out, line = tmp_path / "out.jsonl", json.dumps(SAMPLE[-3])
    lines = {
        "host": [sys.executable, "-c", f"open({str(out)!r}, 'a').write({line + chr(10)!r})"],
        "overhead": [sys.executable, "-c", "raise SystemExit(3)"],
    }
    assert not bench.run(list(lines), out, lines)
    found = results.read(out)
    assert len(found.host) == 1
    assert [(r["subject"], r["status"]) for r in found.subject] == [("host", 0), ("overhead", 3)]
    assert "overhead: FAILED with status 3" in capsys.readouterr().out
