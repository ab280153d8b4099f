"""docs/performance/accuracy.md: it is current, and what it and docs/concepts/numerics.md say is what was measured."""

import sys
from importlib import import_module

import pytest

from support.bench_runs import ROOT, python


@pytest.fixture(scope="module")
def records():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        found = import_module("make_accuracy").measured()
    finally:
        sys.path.pop(0)
    assert found is not None
    return found.accuracy


def test_the_page_is_current():
    run = python("docs/make_accuracy.py", "--check")
    assert run.returncode == 0, run.stderr + "run python docs/make_accuracy.py"


def errors(records, least, most, *, fast, out="bfloat16", data=("random",), kernel=""):
    found = [
        r["error"]
        for r in records
        if (r["fast"], r["out"]) == (fast, out)
        and r["data"] in data
        and least <= r["k"] <= most
        and r["kernel"].startswith(kernel)
    ]
    assert found
    return found


def test_fast_accumulation_is_within_what_is_said_of_it(records):
    assert max(errors(records, 0, 8192, fast=True)) <= 3e-3
    assert max(errors(records, 0, 16384, fast=True)) <= 4e-3
    for kernel in ("cublaslt", "sm90_tiled"):
        row = [r for r in records if r["mode"] == "row" and r["kernel"] == kernel and r["m"] > 64]
        for k in (21504, 28672, 53248):
            assert max(errors(row, k, k, fast=True)) > 4e-3


def test_everything_else_is_exact(records):
    every = {r["data"] for r in records}
    assert len(every) == 4
    assert max(errors(records, 0, 53248, fast=False, data=every)) <= 2e-3
    assert max(errors(records, 0, 53248, fast=False, out="float32", data=every)) <= 5e-4
    assert max(errors(records, 0, 53248, fast=True, data=every, kernel="sm90_decode")) <= 2e-3
    blocks = [r for r in records if r["mode"] == "block"]
    assert max(errors(blocks, 0, 53248, fast=True, data=every)) <= 2e-3


def test_each_mode_has_been_run_by_each_kind_of_kernel(records):
    kernels = {mode: {r["kernel"] for r in records if r["mode"] == mode} for mode in ("tensor", "row", "block")}
    own = {"sm90_decode", "sm90_tiled", "generic_decode", "generic_mma"}
    assert kernels["tensor"] >= {"cublaslt", "cublaslt_relayout", "cublaslt_epilogue", *own}
    assert kernels["row"] >= {"cublaslt", "cublaslt_relayout", "cublaslt_epilogue", *own}
    assert kernels["block"] >= {"cublaslt_split_m", "cublaslt_pad_m", *own}
