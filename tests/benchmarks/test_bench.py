"""The benchmarks' plumbing on results that are made up: plans, collection, goals. No time is asserted."""

import argparse
import ast
import json
import math
import shlex
import sys
import zipfile
from datetime import datetime
from types import SimpleNamespace

import pytest

from bench import __main__ as bench
from bench import fetch, log, results
from bench.report import claims, goals, rules
from fp8core.runtime import device
from fp8core.tuning import values
from support.bench_runs import ROOT, SAMPLE, product, python, quantized, timing, written


@pytest.fixture
def sample(tmp_path):
    return results.read(written(tmp_path / "sample.jsonl", SAMPLE))


def test_records_are_told_apart_and_the_later_one_counts(sample, tmp_path):
    assert [len(kind) for kind in sample[1:]] == [2, 4, 3, 1, 2, 9, 2, 2, 0, 4, 5, 1, 1, 2, 0, 0, 1, 2, 2, 0, 0, 1, 4]
    path = written(tmp_path / "twice.jsonl", [quantized("token", 1, 4096, t, 1.0) for t in (3.0, 2.0)])
    assert [results.us(r, "fp8core") for r in results.read(path).quantize] == [2.0]
    of_experts = {"bench": "grouped", "model": "m", "mode": "row", "tokens": 8, "n": 256, "k": 128}
    path = written(tmp_path / "skewed.jsonl", [{**of_experts, **skew} for skew in ({}, {"skew": 0.0}, {"skew": 0.4})])
    assert [r["skew"] for r in results.read(path).grouped] == [0.0, 0.4]


def test_commands_on_one_machine_make_one_page_and_two_machines_do_not(tmp_path):
    path = tmp_path / "two.jsonl"
    lines = [{"bench": "machine", "command": c, "device": "H200", "cpu": c} for c in ("first", "second")]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"bench": "machine", "command": "third"}]))
    machine = results.read(path).machine
    assert (machine["commands"], machine["cpu"], machine["device"]) == (["first", "second", "third"], "second", "H200")
    path.write_text("".join(json.dumps({**line, "device": line["cpu"]}) + "\n" for line in lines))
    with pytest.raises(ValueError, match="of one GPU, got first, second"):
        results.read(path)


def test_a_line_of_nobody_is_refused():
    with pytest.raises(ValueError, match=r"\['speed'\]"):
        results.kind_of({"speed": 1})


def test_goals_are_judged_by_the_numbers(sample):
    judged = goals.judge(sample)
    assert [goal for goal, _ in judged] == list(goals.GOALS)
    verdicts = {goal.what: [check.met for check in checks] for goal, checks in judged}
    assert verdicts["product, m ≤ 16, per tensor and row"] == [
        9.0 + m / 20 - (7.8 + m / 100) <= 1.7 for m in (1, 4, 8, 16)
    ]
    assert verdicts["product, m ≤ 64, fp8core kernel"] == [True] * 7
    assert verdicts["dynamic per tensor, more than the chip holds"] == [True]
    assert verdicts["quantization moving ≥ 100 MB: static, per token, 1x128, both scale layouts"] == [True, False]
    assert verdicts["the same, moving ≥ 100 MB"] == [False]
    assert verdicts["any quantization of one token"] == [True]
    assert verdicts["quantization of odd sizes (k = 5137, 1025, 576; m = 1, 3, 83, 4099)"] == [True, False, False]
    assert verdicts["product of odd n, odd k or odd addresses, m ≤ 64"] == [False, True]
    assert verdicts["product of odd n, odd k or odd addresses, m > 64"] == [True, False]
    assert verdicts["grouped product, per token x per channel"] == [True]
    assert verdicts["grouped product, 1x128 x 128x128"] == [False]
    assert verdicts["routing of experts, `moe_permute`"] == [True]
    assert verdicts["routing of experts, `moe_unpermute`"] == [False]
    assert verdicts["linear in a graph, m ≤ 16, beside its product"] == [True]
    assert verdicts["the same, m = 17 to 64"] == [False]
    assert verdicts["decoder layer in a graph, m ≤ 16, plain calls"] == [73.0 <= 55.0, 58.0 <= 55.0]
    assert verdicts["decoder layer in a graph, m = 64, plain calls"] == []
    assert verdicts["the same, shards of Llama-70B/8"] == [True, False]
    assert verdicts["decoder layer in a graph, results allocated by the library"] == [True, True, True, True]
    assert verdicts["host time, scaled_mm, fp8core kernel"] == [True]
    assert verdicts["host time, scaled_mm, cuBLASLt"] == []
    assert verdicts["host engine, bfloat16 and float32"] == [True]


def test_a_goal_about_m_80_compares_with_the_record_of_m_80(sample):
    of_layer = {goal.what: checks for goal, checks in goals.judge(sample)}["host time, Fp8Linear, cuBLASLt"]
    assert [(check.text, check.met) for check in of_layer] == [("0.81 x", False)]
    assert "quantize + scaled_mm m=80: 10.00 us" in of_layer[0].case


@pytest.mark.parametrize("goal", goals.GOALS, ids=lambda goal: goal.what)
def test_a_goal_states_its_bound_and_where_it_comes_from(goal):
    assert f"{goal.threshold:g}" in goal.bound
    assert goal.source


@pytest.mark.parametrize("what", [goal.what for goal in goals.GOALS if "product" in goal.what or "copy" in goal.words])
def test_verdicts_follow_the_threshold(sample, what):
    """A bound that nothing can keep, and one that everything keeps, give other verdicts."""
    goal = next(goal for goal in goals.GOALS if goal.what == what)
    faster = goal.words.startswith("≤")
    strict, loose = (list(goal.checks(sample, bound)) for bound in ((1e-9, 1e9) if faster else (1e9, 1e-9)))
    assert not any(check.met for check in strict)
    assert all(check.met for check in loose)


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


def test_subjects_are_given_only_flags_that_they_have():
    for name, subject in bench.SUBJECTS.items():
        text = (ROOT / (subject.module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        known = {c.args[0].value for c in calls if getattr(c.func, "attr", "") == "add_argument"}
        known |= {"--json", "--go-on"} if "log.options(parser)" in text else set()
        given = {word for word in (*subject.arguments, *subject.short) if word.startswith("--")} | {"--json"}
        given |= {flag for flag, field in FIELDS.items() if getattr(subject, field)}
        assert given <= known, name


FIELDS = {"--baselines": "baselines", "--compile": "compiles", "--deep-gemm": "deep_gemm", "--go-on": "goes_on"}


@pytest.mark.skipif(device.count() > 0, reason="it would run")
def test_what_cannot_run_here_is_skipped_with_the_reason(tmp_path):
    out = tmp_path / "new" / "out.jsonl"
    run = python("-m", "bench", "quantize", "decode", "--short", "--out", out)
    assert run.returncode == 0, run.stderr
    assert "quantize: skipped, needs a GPU" in run.stdout
    found = results.read(out)
    assert found.machine["cpu"]
    assert [(r["subject"], "GPU" in r["skipped"]) for r in found.subject] == [("quantize", True), ("decode", True)]


def test_a_run_of_nothing_begins_no_file_among_the_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "RUNS", tmp_path)
    monkeypatch.setattr(bench, "missing", lambda framework: f"needs {framework}")
    monkeypatch.setattr(sys, "argv", ["bench", "ending", "jax_layer"])
    with pytest.raises(SystemExit) as left:
        bench.main()
    assert left.value.code == 2
    assert capsys.readouterr() == ("", "ending: skipped, needs torch\njax_layer: skipped, needs jax\n")
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_gpu_needs_a_file_of_its_own(tmp_path, monkeypatch, capsys):
    """The pages are made of all files in docs/results, which have a GPU."""
    monkeypatch.setattr(bench, "RUNS", tmp_path)
    monkeypatch.setattr(bench.device, "count", lambda: 0)
    monkeypatch.setattr(bench.device, "why_none", lambda: "there is none")
    monkeypatch.setattr(bench, "run", lambda *_: True)
    monkeypatch.setattr(sys, "argv", ["bench", "engine"])
    with pytest.raises(SystemExit) as left:
        bench.main()
    assert left.value.code == 2
    assert "--out is needed without a GPU (there is none)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["bench", "engine", "--out", str(tmp_path / "out.jsonl")])
    assert bench.main() == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_the_plan_names_commands_and_what_cannot_be_meant_is_refused(tmp_path):
    run = python("-m", "bench", "engine", "--short", "--plan", "--out", tmp_path / "out.jsonl")
    assert run.returncode == 0, run.stderr
    assert "-m bench.engine --rows 256 --cols 1024 --json" in run.stdout
    assert not (tmp_path / "out.jsonl").exists()
    for words, error in (
        (["guess"], "no such subject: guess"),
        (["--baselines", tmp_path / "no"], "--baselines needs a folder, got"),
        (["--against", tmp_path], "--against needs a checkout of fp8core, got"),
        (["decode", "--against", ROOT], "--against compares GPU and host times, or those of host alone, got decode"),
    ):
        assert error in python("-m", "bench", "--plan", *words).stderr


def test_a_run_gets_a_file_of_its_own(tmp_path, monkeypatch):
    now = SimpleNamespace(now=lambda zone: datetime(2026, 1, 31, 23, 59, 59, tzinfo=zone))  # no midnight comes between
    monkeypatch.setattr(bench, "datetime", now)
    first = bench.new_file(tmp_path)
    assert first.name.startswith("2026-01-31-")
    assert first.suffix == ".jsonl"
    first.touch()
    second = bench.new_file(tmp_path)
    assert second.stem == f"{first.stem}-2"


def test_the_recorded_command_can_be_pasted(tmp_path, monkeypatch):
    note = 'vLLM 0.26.0, it\'s "new"'
    (tmp_path / "vllm_C.so").touch()
    words = ["decode", "--short", "--baselines", str(tmp_path), "--note", note]
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(sys, "argv", ["bench", *words, "--out", str(out)])
    monkeypatch.setattr(bench, "run", lambda *_: True)
    assert bench.main() == 0
    machine = results.read(out).machine
    assert shlex.split(machine["command"]) == [
        *("python", "-m", "bench", "decode", "--baselines", "BASELINES", "--short", "--note", note)
    ]
    assert str(tmp_path) not in out.read_text()
    assert (machine["baselines"], machine["short"], machine["format"]) == (["vllm_C.so"], True, results.FORMAT)
    assert machine["digest"] == values.digest(), "by which the tree of a run is found"


def test_lines_of_subjects_are_collected_and_a_failure_is_told(tmp_path, capsys):
    out, line = tmp_path / "out.jsonl", json.dumps(next(r for r in SAMPLE if r.get("bench") == "engine"))
    lines = {
        "engine": [sys.executable, "-c", f"open({str(out)!r}, 'a').write({line + chr(10)!r})"],
        "host": [sys.executable, "-c", "raise SystemExit(3)"],
    }
    results.append(out, SAMPLE[0])
    assert not bench.run({name: bench.SUBJECTS[name] for name in lines}, out, lines, math.inf, math.inf)
    found = results.read(out)
    assert len(found.engine) == 1
    assert [(r["subject"], r["status"]) for r in found.subject] == [("engine", 0), ("host", 3)]
    assert "host: FAILED with status 3" in capsys.readouterr().out


def test_what_a_limit_stopped_goes_on(tmp_path, capsys):
    out, records = tmp_path / "out.jsonl", [product("row", m, 9.0, 15.0) for m in (1, 4, 8)]
    line = [sys.executable, "-c", "import signal; signal.pause()"]
    engine = bench.SUBJECTS["engine"]
    results.append(out, SAMPLE[0], *records[:2])  # of which the last two are the subject's
    assert not bench.run({"decode": engine}, out, {"decode": line}, math.inf, 0.1)
    assert not bench.run({"host": engine}, out, {"host": line}, 0.0, math.inf)
    said = capsys.readouterr().out
    assert "decode: STOPPED" in said
    assert "host: not started" in said
    assert (list(results.stopped(results.runs(out))), results.finished(results.runs(out))) == (["decode"], set())
    results.append(out, {**SAMPLE[0], "goes_on": True})
    cases = [{name: r[name] for name in ("mode", "m", "n", "k")} for r in records]
    for subject, left_out in (("decode", [True, True, False]), ("models", [False] * 3), (None, [False] * 3)):
        there = log.Log(argparse.Namespace(json=out, go_on=subject))
        assert [there.has(case) for case in cases] == left_out
    before = out.read_text()
    of_case = dict(zip((case["m"] for case in cases), records, strict=True))
    there = log.Log(argparse.Namespace(json=out, go_on="decode"))
    measured = there.measured(cases, dict, lambda case: of_case[case["m"]])
    assert out.read_text() == before, "a case is measured when it is asked for"
    assert list(measured) == [(cases[2], records[2])]
    results.append(out, {"bench": "subject", "subject": "decode", "status": 0})
    first, second = results.runs(out)
    assert not first.parts
    assert [r.get("m") for r in second.parts[0].records] == [1, 4, None, 8, None]
    assert results.finished([second]) == {"decode"}
    assert [r["m"] for r in rules.select([first, second]).found.decode] == [1, 4, 8]


def test_a_run_goes_on_with_its_own_file_and_leaves_out_what_is_there(tmp_path):
    out = tmp_path / "out.jsonl"
    assert "--go-on needs --out with the file of an earlier run" in python("-m", "bench", "--go-on", "--plan").stderr
    end = {"bench": "subject", "subject": "quantize", "status": 0}
    out.write_text("".join(json.dumps(line) + "\n" for line in ({"bench": "machine", "command": "c"}, end)))
    run = python("-m", "bench", "quantize", "engine", "--go-on", "--plan", "--out", out)
    assert [line.split(":")[0] for line in run.stdout.splitlines()] == ["engine"]


def test_baselines_are_taken_out_of_wheels(tmp_path, monkeypatch, capsys):
    asked = []

    def download(requirement, python, folder):
        asked.append((requirement, python))
        wheel = folder / f"{requirement}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for library in fetch.LIBRARIES:
                if library.requirement == requirement:
                    archive.writestr(library.ending, f"library of {requirement}")
            archive.writestr("vllm/third_party/deep_gemm/include/mma.cuh", "source")
            archive.writestr("vllm/third_party/other.py", "not asked for")
        return wheel

    monkeypatch.setattr(fetch, "download", download)
    monkeypatch.setattr(sys, "argv", ["fetch", str(tmp_path / "to"), "--python", "3.12"])
    assert fetch.main() == 0
    assert asked == [(library.requirement, "3.12") for library in fetch.LIBRARIES]
    found = {path.relative_to(tmp_path / "to").as_posix() for path in (tmp_path / "to").rglob("*") if path.is_file()}
    assert found == {"vllm_C.so", "sgl_ops.so", "site/deep_gemm/include/mma.cuh"}
    assert (tmp_path / "to" / "vllm_C.so").read_text() == f"library of {fetch.LIBRARIES[0].requirement}"


def test_a_wheel_without_the_library_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as archive:
        archive.writestr("other.so", "")
    with pytest.raises(ValueError, match=r"some.whl needs one file .*, got \[\]"):
        fetch.take(tmp_path / "some.whl", fetch.LIBRARIES[0], tmp_path)


@pytest.mark.parametrize(("paired", "met"), [(None, False), ({"median": 1.9, "low": 1.5, "high": 2.1}, True)])
def test_a_layer_is_judged_beside_its_product_turn_by_turn_if_that_was_kept(tmp_path, paired, met):
    record = {"bench": "linear", "m": 64, "n": 8, "k": 8, "floor_us": 8.0, "us": timing(fp8core=12.4, product=9.0)}
    found = results.read(written(tmp_path / "linear.jsonl", [{**record, "more_us": paired}]))
    of_layer = {goal.what: checks for goal, checks in goals.judge(found)}["the same, m = 17 to 64"]
    assert [check.met for check in of_layer] == [met]
