"""The receipt of the GPU suite and the order of tests, shown on made-up suites: no GPU takes part."""

import argparse
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

import conftest
from support import receipt

HERE = receipt.ROOT
CONFTEST = """
import pytest
from conftest_of_fp8core import order, pytest_addoption, pytest_report_header, pytest_collection_modifyitems
import conftest_of_fp8core as real
from support import receipt

real.gpus = lambda: {gpus}
receipt.gpu_name = lambda: "a GPU"
receipt.driver = lambda: "580.1"

def pytest_configure(config):
    for mark in real.NEEDED:
        config.addinivalue_line("markers", mark)
    config.pluginmanager.register(receipt.Receipt(config, config.rootpath), "receipt")
"""
SUITE = """
import pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("i", range(5))
def test_passes(i):
    pass

@pytest.mark.parametrize("i", range(2))
def test_is_skipped(i):
    pytest.skip("there is no JAX")

@pytest.mark.multigpu
def test_of_two():
    pass
"""
BAD = """
import pytest
pytestmark = pytest.mark.gpu

@pytest.fixture
def broken():
    raise OSError("broken")

def test_fails():
    assert False

def test_errs(broken):
    pass
"""


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "fp8core").mkdir()
    (tmp_path / "fp8core" / "a.py").write_text("A = 1\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST.format(gpus=1))
    (tmp_path / "conftest_of_fp8core.py").write_text((HERE / "tests" / "conftest.py").read_text())
    (tmp_path / "tests" / "test_suite.py").write_text(textwrap.dedent(SUITE))
    return tmp_path


def run(suite, *arguments, **environment):
    """Run pytest there, and return what it printed and the receipts that it wrote by their paths."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("FP8CORE_RECEIPT", "PYTEST_"))}
    paths = {
        "PYTHONPATH": os.pathsep.join(map(str, (suite, HERE, HERE / "tests"))),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=suite, env={**clean, **paths, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1, 2), done.stdout + done.stderr
    return done.stdout, {str(p.relative_to(suite)): json.loads(p.read_text()) for p in suite.rglob("*.json")}


def test_a_whole_run_is_written_down(suite):
    _, written = run(suite, "-m", "gpu")
    assert list(written) == ["docs/results/gpu-suite.json"]
    (got,) = written.values()
    assert receipt.malformed(got) is None
    assert (got["passed"], got["failed"], got["errors"]) == (5, 0, 0)
    assert got["skipped"] == [{"reason": "there is no JAX", "count": 2}], "what needs two GPUs is no part of the suite"
    assert (got["gpu"], got["driver"], got["order"], got["argv"][-2:]) == ("a GPU", "580.1", "file", ["-m", "gpu"])
    assert len(got["slowest"]) == 7
    assert got["versions"]["numpy"]
    assert got["sources"] == receipt.digest(suite)
    assert "partial" not in got
    assert receipt.said("gpu", suite / "docs/results/gpu-suite.json", got["sources"]) == (
        f"gpu suite: 5 passed, 0 failed, 0 errors, 2 skipped in {got['seconds']} s on a GPU (driver 580.1) at {got['date']}, this tree",
        True,
    )


def test_failures_and_errors_are_told_apart(suite):
    (suite / "tests" / "test_bad.py").write_text(textwrap.dedent(BAD))
    _, written = run(suite, "-m", "gpu")
    (got,) = written.values()
    assert (got["passed"], got["failed"], got["errors"]) == (5, 1, 1)
    assert got["slowest"]
    path = suite / "docs/results/gpu-suite.json"
    assert receipt.said("gpu", path, got["sources"])[1] is False
    assert receipt.said("gpu", path, "another")[1] is True, "of another tree failures are no news"


def test_tests_of_two_gpus_have_their_own(suite):
    (suite / "tests" / "conftest.py").write_text(CONFTEST.format(gpus=2))
    _, written = run(suite, "-m", "multigpu")
    assert {name: got["passed"] for name, got in written.items()} == {"docs/results/multi-gpu-suite.json": 1}


@pytest.mark.parametrize(("markexpr", "compiles"), [("gpu", True), ("multigpu", False)])
def test_the_list_of_kernels_is_of_the_gpu_suite_alone(monkeypatch, markexpr, compiles):
    registered = {}
    manager = SimpleNamespace(register=lambda plugin, name: registered.update({name: plugin}))
    monkeypatch.setattr(conftest, "gpus", lambda: 2)
    conftest.pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr=markexpr), pluginmanager=manager))
    assert registered["receipt"].suite == receipt.SUITES[markexpr]
    assert ("warm" in registered) is compiles


@pytest.mark.parametrize("arguments", [("-m", "gpu", "tests/test_suite.py"), ("-m", "gpu", "-x")], ids=str)
def test_a_part_of_a_suite_leaves_the_receipt_alone(suite, arguments):
    (suite / "tests" / "test_bad.py").write_text(textwrap.dedent(BAD))
    assert run(suite, *arguments)[1] == {}


def test_a_part_is_written_where_it_is_asked_for(suite):
    chosen = {"FP8CORE_RECEIPT": str(suite / "part.json"), "FP8CORE_RECEIPT_DIR": str(suite / "out")}
    _, written = run(suite, "-m", "gpu", "-k", "passes", **chosen)
    assert list(written) == ["part.json"]
    assert (written["part.json"]["partial"], written["part.json"]["passed"]) == (True, 5)


ALL = {"markexpr": "gpu", "keyword": "", "deselect": None, "ignore": None, "ignore_glob": None, "lf": False}


@pytest.mark.parametrize(
    ("options", "finished", "whole"),
    [
        ({}, 3, True),
        ({"markexpr": " multigpu "}, 3, True),
        ({"markexpr": "gpu and not slow"}, 3, False),
        ({"markexpr": ""}, 3, False),
        ({"keyword": "passes"}, 3, False),
        ({"deselect": ["tests/test_suite.py::test_passes[1]"]}, 3, False),
        ({"ignore": ["tests/gemm"]}, 3, False),
        ({"ignore_glob": ["*gemm*"]}, 3, False),
        ({"lf": True}, 3, False),
        ({}, 2, False),
    ],
    ids=str,
)
def test_what_is_the_whole_suite(suite, monkeypatch, options, finished, whole):
    config = SimpleNamespace(
        option=SimpleNamespace(**ALL | options), args_source=pytest.Config.ArgsSource.TESTPATHS, rootpath=suite
    )
    plugin = receipt.Receipt(config, suite)
    plugin.finished = finished
    session = SimpleNamespace(testscollected=3)
    assert plugin.complete(session) is whole
    monkeypatch.delenv("FP8CORE_RECEIPT", raising=False)
    monkeypatch.setenv("FP8CORE_RECEIPT_DIR", "chosen")
    name = {"gpu": "gpu-suite.json", "models": "models-suite.json", "multigpu": "multi-gpu-suite.json"}.get(
        config.option.markexpr.strip()
    )
    assert plugin.destination(whole) == (Path("chosen", name) if whole else None)
    config.args_source = pytest.Config.ArgsSource.ARGS
    assert not plugin.complete(session)


def test_sources_that_change_during_the_run_are_no_tree_that_ran(suite):
    (suite / "tests" / "test_writes.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test(request):\n    (request.config.rootpath / 'fp8core/a.py').write_text('A = 2')\n"
    )
    assert run(suite, "-m", "gpu")[1] == {}


def test_a_random_order_is_told_and_can_be_had_again(suite):
    first, written = run(suite, "-m", "gpu", "-v", "--order=random:7")
    (got,) = written.values()
    assert (got["order"], got["seed"]) == ("random", 7)
    assert "order: random:7" in first
    tests = [
        [line.split()[0] for line in said.splitlines() if "::test_" in line]
        for said in (first, run(suite, "-m", "gpu", "-v", "--order=random:7")[0])
    ]
    assert tests[0] == tests[1] != sorted(tests[0])


def test_an_order_without_a_seed_gets_one():
    seeds = {conftest.order("random") for _ in range(3)}
    assert len(seeds) == 3
    assert all(re.fullmatch(r"random:\d+", seed) for seed in seeds)
    assert [conftest.order(text) for text in ("file", "random:7")] == ["file", "random:7"]
    with pytest.raises(argparse.ArgumentTypeError, match="got 'backward'"):
        conftest.order("backward")


def test_workers_take_from_each_other_s_queues():
    pytest.importorskip("xdist", reason="pytest-xdist is not installed (extra test)")

    def scheduler(dist):
        options = {"dist": dist, "tx": ["2*popen"]}
        return conftest.pytest_xdist_make_scheduler(SimpleNamespace(getoption=options.get, getvalue=options.get), None)

    assert type(scheduler("load")).__name__ == "WorkStealingScheduling"
    assert scheduler("loadfile") is None  # which was asked for
