"""Runs of benchmarks as pages and pictures: which records count, what the page says, and that its commands run."""

import re
import shlex
from importlib import import_module

import pytest

from bench import plot, results, roofline
from bench.report import page, rules
from support.bench_runs import ROOT, SAMPLE, python, quantized, timing, written

H200 = {"bench": "machine", "format": 2, "device": "NVIDIA H200", "date": "2026-11-21", "command": "python -m bench"}
ENDED = {"bench": "subject", "subject": "quantize", "status": 0}


@pytest.fixture
def sample(tmp_path):
    runs = results.runs(written(tmp_path / "sample.jsonl", SAMPLE))
    return rules.Shown(results.collect(runs), runs, dict.fromkeys(rules.rules_of(roofline.H200), 7))


@pytest.fixture
def make_performance(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return import_module("make_performance")


def test_performance_pages_are_those_of_the_results():
    run = python("docs/make_performance.py", "--check")
    assert run.returncode == 0, run.stderr + "run python docs/make_performance.py"


def test_the_runs_in_the_repository_are_told_apart_by_their_names():
    paths = sorted((ROOT / "docs" / "results").glob("*.jsonl"))
    assert paths
    for path in paths:
        for run in results.runs(path):
            assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+\.jsonl", run.file)
            assert run.file.startswith(run.machine["date"])
            assert not re.search(r"/(work|tmp|home|root)/", run.machine["command"])


def run_of(tmp_path, name, time, **machine):
    lines = [{**H200, **machine}, quantized("token", 1, 4096, time, 1.0), ENDED]
    return results.runs(written(tmp_path / name, lines))


def counted(shown):
    return {rule.name: count for rule, count in shown.left_out.items() if count}


def times(shown):
    return [results.us(r, "fp8core") for r in shown.found.quantize]


def test_of_a_subject_the_latest_run_counts(tmp_path):
    late = run_of(tmp_path, "a.jsonl", 3.0, date="2026-11-22", started="2026-11-22T10:00:00Z")
    early = run_of(tmp_path, "b.jsonl", 2.0, date="2026-11-22", started="2026-11-22T09:00:00Z")
    shown = rules.select([*late, *early])
    assert times(shown) == [3.0]
    assert [run.file for run in shown.runs] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("rule", "machine"),
    [("other GPUs", {"device": "NVIDIA L40S"}), ("short runs", {"short": True})],
)
def test_a_rule_leaves_out_whole_runs(tmp_path, rule, machine):
    kept = run_of(tmp_path, "a.jsonl", 3.0)
    other = run_of(tmp_path, "b.jsonl", 2.0, **{"date": "2026-12-01", **machine})
    shown = rules.select([*kept, *other])
    assert times(shown) == [3.0]
    assert counted(shown) == {rule: 2}


@pytest.mark.parametrize("ended", [[{**ENDED, "status": 1}], []])
def test_a_subject_that_did_not_end_well_is_left_out(tmp_path, ended):
    lines = [{**H200, "date": "2026-12-01"}, quantized("token", 1, 4096, 2.0, 1.0), *ended]
    broken = results.runs(written(tmp_path / "b.jsonl", lines))
    shown = rules.select([*run_of(tmp_path, "a.jsonl", 3.0), *broken])
    assert times(shown) == [3.0]
    assert counted(shown) == {"unfinished subjects": 1 + len(ended)}


@pytest.mark.parametrize(("form", "kept"), [({}, 0), ({"format": 2}, 1)])
def test_tensors_timed_as_rows_are_left_out_of_runs_of_format_1(tmp_path, form, kept):
    machine = {key: value for key, value in H200.items() if key != "format"} | form
    us = {"floor_us": 1.0, "neighbour_floor_us": 1.0, "us": timing(fp8core=1.0, neighbour=1.0)}
    odd = [
        {"bench": "odd", "mode": mode, "x": "float32", "rows": 8, "cols": 5137, **us} for mode in ("tensor", "token")
    ]
    lines = [machine, *odd, {"bench": "subject", "subject": "odd", "status": 0}]
    shown = rules.select(results.runs(written(tmp_path / "a.jsonl", lines)))
    assert [r["mode"] for r in shown.found.odd] == ["tensor"] * kept + ["token"]
    assert counted(shown) == ({} if kept else {"tensors timed as rows": 1})


def test_each_gpu_has_its_own_page_with_floors_at_its_own_rate(tmp_path):
    runs = [
        *run_of(tmp_path, "a.jsonl", 3.0),
        *run_of(tmp_path, "b.jsonl", 4.0, device=roofline.H100),
        *run_of(tmp_path, "c.jsonl", 5.0, device="NVIDIA L40S"),
    ]
    shown = {one: rules.select(runs, one.gpu) for one in page.PAGES}
    assert {one.file: times(of) for one, of in shown.items()} == {"index.md": [3.0], "h100.md": [4.0]}
    for one, of in shown.items():
        assert f"\n| GPU | {one.gpu} |\n" in page.page(of, [], one)
        assert counted(of) == {"other GPUs": 4}
    bytes_ = {one.file: results.moved(of.found.quantize[0]) for one, of in shown.items()}
    assert bytes_["h100.md"] / bytes_["index.md"] == pytest.approx(3.0 / 4.3), "the same floor is fewer bytes"
    assert [shown[one].found.memory for one in page.PAGES] == ["4.3 TB/s", "3.0 TB/s"]


def test_the_floor_is_that_of_the_gpu_that_is_there(monkeypatch):
    for count, name, us in ((0, None, 1.0), (1, roofline.H200, 1.0), (1, roofline.H100, 4.3 / 3.0), (1, "other", 1.0)):
        monkeypatch.setattr(roofline.device, "count", lambda count=count: count)
        monkeypatch.setattr(roofline.device, "current", lambda: 0)
        monkeypatch.setattr(roofline.device, "name", lambda _, name=name: name)
        roofline.rates_here.cache_clear()
        assert roofline.Roofline(4_300_000).floor() == pytest.approx(us)
        assert roofline.Roofline(0, 1_550_000_000).floor() == pytest.approx(1.0)
    monkeypatch.undo()
    roofline.rates_here.cache_clear()


def test_names_of_format_1_are_read_as_those_of_today(tmp_path):
    lines = [
        {**H200, "format": 1, "peers": ["vllm_C.so"]},
        {"bench": "host", "mode": "quantize", "rate": 1.0},
        {"bench": "subject", "subject": "host", "status": 0},
        {"bench": "overhead", "framework": "fp8core", "step": "of it: looks of three", "us": 1.0},
        {"bench": "subject", "subject": "overhead", "status": 0},
        {"mode": "row", "m": 1, "n": 1, "k": 1, "us": timing(hopper_decode=1.0)},
    ]
    (run,) = results.runs(written(tmp_path / "a.jsonl", lines))
    found = results.collect([run])
    assert [part.subject for part in run.parts] == ["engine", "host", ""]
    assert found.machine["baselines"] == ["vllm_C.so"]
    assert [r["step"] for r in found.overhead] == ["of it: signature of three"]
    assert len(found.engine) == 1
    assert results.us(found.decode[0], "sm90_decode") == 1.0


def test_pictures_are_drawn_of_what_there_is(sample, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = plot.draw(sample.found, tmp_path / "images")
    names = ["decoder-layer", "quantize", "fused", "products-row", "products-block", "crossover"]
    assert [p.stem for p in drawn] == names
    assert names == plot.drawable(sample.found)
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in drawn)
    assert plot.draw(sample.found._replace(quantize=[], fused=[], decode=[], layer=[]), tmp_path) == []


def test_records_have_the_day_of_their_own_run(tmp_path):
    """So that a picture says when its lines were measured, whatever was measured since."""
    early = run_of(tmp_path, "a.jsonl", 3.0, date="2026-11-21", started="2026-11-21T08:00:00Z")
    odd = next(r for r in SAMPLE if results.kind_of(r) == "odd")
    machine = {**H200, "date": "2026-11-22", "started": "2026-11-22T08:00:00Z"}
    late = results.runs(written(tmp_path / "b.jsonl", [machine, odd, ENDED | {"subject": "odd"}]))
    found = rules.select([*late, *early]).found
    assert results.dates(found.quantize) == "2026-11-21"
    assert results.dates(found.odd) == "2026-11-22"
    assert results.dates([*found.odd, *found.quantize]) == "2026-11-21 and 2026-11-22"


def test_the_page_says_what_was_measured_and_what_was_not(sample):
    text = page.page(sample, plot.drawable(sample.found), page.PAGES[0])
    for said in ("NVIDIA H200", "**not met**, 1 of 2", "| not measured |", "`python -m bench --note 'made up'`"):
        assert said in text
    assert "| per token | float32 | 8x1001 | 1.29 | 8x1000 | 1.00 | 1.29 |" in text
    assert "| Llama-8B | m = 16 | 50.00 | 72.00 | 73.00 | 86.00 | - | 1.460 |" in text
    assert "| quantize | GPU | 2.00 | 1.98 | 0.990 | 0.985 to 1.000 |" in text
    assert "| 1x128 8192x8192 | SGLang | codes differ by 3 |" in text
    assert "| requantize, 3 shards 64x64 | fp8core | differs |" in text
    assert "| host quantize | before | TypeError: no |" in text
    assert "- engine: skipped, made up" in text
    assert "| short runs | `--short` times a few cases of each subject, as a check | 7 |" in text
    assert set(re.findall(r"images/([\w-]+)\.png", text)) == set(plot.drawable(sample.found))


def test_each_table_and_goal_names_the_runs_that_it_shows(tmp_path):
    linear = {"bench": "linear", "m": 16, "n": 8, "k": 8, "floor_us": 8.0, "us": timing(fp8core=9.0, product=9.0)}
    early = [quantized("token", 1, 4096, 2.0, 1.0), next(r for r in SAMPLE if results.kind_of(r) == "odd")]
    subjects = [("08", early), ("09", [quantized("token", 1, 4096, 1.0, 1.0)]), ("10", [linear])]
    runs = []
    for hour, records in subjects:
        machine = {**H200, "started": f"2026-11-21T{hour}:00:00Z"}
        parts = [line for r in records for line in (r, ENDED | {"subject": results.kind_of(r)})]
        runs += results.runs(written(tmp_path / f"{hour}.jsonl", [machine, *parts]))
    text = page.page(rules.select(runs), [], page.PAGES[0])
    said = dict(re.findall(r"^## (.*)\n\n(Run .*)$", text, re.MULTILINE))
    assert said == {
        "Quantization": "Run [2](#runs), 2026-11-21 09:00:00 UTC.",
        "Quantization of odd sizes": "Run [1](#runs), 2026-11-21 08:00:00 UTC.",
    }
    goals = {line.split(" | ")[0]: line.split(" | ")[-1] for line in text.splitlines() if line.startswith("| ")}
    assert goals["| linear in a graph, m ≤ 16"] == "3 |"
    assert goals["| any quantization of one token"] == "2 |"
    assert "| 1 | [08.jsonl](../results/08.jsonl) | odd |" in text


@pytest.mark.parametrize(
    ("without", "picture", "said"),
    [
        ([], "decoder-layer", "takes 58 us at m = 1, with vLLM's kernels 86 us; the floor is 50 us"),
        (["layer"], "products-row", "Products of 1 and 16 rows, us above the floor (median)"),
        (["layer", "decode"], "quantize", "quantization is at 97–98 % of a copy's speed"),
    ],
)
def test_the_readme_has_one_picture_and_what_it_says(sample, make_performance, without, picture, said):
    found = sample.found._replace(**{key: [] for key in without})
    section = make_performance.section(found, plot.drawable(found))
    assert re.findall(r"docs/images/([\w-]+)\.png", section) == [picture]
    assert said in section
    assert len(section.splitlines()) <= 12


def test_commands_of_the_page_run_as_they_are_printed(sample, tmp_path):
    """What installs and downloads is only read; the benchmarks' commands get --plan, and a folder of that name."""
    text = page.page(sample, [], page.PAGES[0])
    block = re.search(r"```console\n(.*?)```", text.split("## How to measure it again")[1], re.DOTALL)
    commands = [shlex.split(line.removeprefix("$ ")) for line in block[1].splitlines()]
    (tmp_path / "BASELINES").mkdir()
    ran = []
    for words in commands:
        if words[:3] == [".venv/bin/python", "-m", "bench"]:
            ran.append(python(*words[1:], "--plan", cwd=tmp_path))
        elif words[:2] == [".venv/bin/python", "-m"]:
            ran.append(python(*words[1:3], "--help", cwd=tmp_path))
        elif words[0] == ".venv/bin/python":
            assert (ROOT / words[1]).exists()
    assert len(ran) == 2
    for run in ran:
        assert run.returncode == 0, run.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"BASELINES", "sample.jsonl"}


def test_what_a_bare_run_writes_is_what_the_page_reads(make_performance):
    from bench.__main__ import RUNS, new_file

    assert make_performance.RUNS == RUNS
    assert new_file(RUNS).match("*.jsonl")


def test_the_page_states_what_batch_invariance_costs(sample):
    text = page.page(sample, [], page.PAGES[0])
    assert "## Batch invariance" in text
    assert "\nmore rows take 2.6 to 2.6 times as long.\n" in text
    assert "| cuBLASLt | fp8core kernel | 256x4096x8192 | 10.36 | 15.00 | 39.50 | 24.50 |" in text
    assert "| fp8core kernel | fp8core kernel | 16x4096x8192 | 7.96 | 9.00 | wrong | - |" in text
    assert "| block 16x4096x8192 | invariant | other bits |" in text
    without = sample._replace(found=sample.found._replace(invariance=[]))
    assert "Batch invariance" not in page.page(without, [], page.PAGES[0])


def test_the_page_has_what_ends_products(sample):
    text = page.page(sample, [], page.PAGES[0])
    assert "| per token x per channel | 512x4096x8192 | `cublaslt` | 48.00 * | - | 59.00 | 60.00 |" in text
    assert "| per token x per channel | 512x4096x8192 | `sm90_tiled` | - | 64.00 * | - | - |" in text
    assert "| row 512x4096x8192 | sm90_tiled plain | far from torch's |" in text


FIGURE = re.compile(r"\d ?(?:us|µs|μs|[GT]B/s|TFLOP(?:/s|S)?)\b|\d ?(?:x|times) (?:faster|slower|as fast|as long)")
NOT_MEASURED_HERE = ("docs/performance/", "docs/dev/experiments/", "docs/decisions/", "docs/results/")
"""The generated pages and their method, dated notebooks and decisions, raw results."""


def test_a_figure_is_known_by_its_unit():
    for text in ("takes 6.1 us", "4.3 TB/s", "2 times as fast", "3x faster", "0.4 µs"):
        assert FIGURE.search(text)
    for text in ("bus 3 users", "1x128 blocks", "in 2 minutes", "64 MB", "three times"):
        assert not FIGURE.search(text)


def test_no_other_page_states_a_time():
    """What no command reproduces goes stale: times are in the generated pages, to which the others link."""
    stated = []
    for file in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        name, text = file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
        if not name.startswith(NOT_MEASURED_HERE):
            text = re.sub(r"<!-- performance -->.*?<!-- /performance -->", "", text, flags=re.DOTALL)
            stated += [f"{name}: {line.strip()}" for line in text.splitlines() if FIGURE.search(line)]
    assert stated == []
