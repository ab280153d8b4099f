"""What compiles ahead of a GPU suite, with a compiler that only counts: no GPU takes part."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from fp8core.errors import BackendError
from fp8core.runtime import compiler, device, jit, kernel_cache, sources
from support import receipt, warm
from support.targets import H200

NAME = sources.names("cuda")[0]
LINE = f"{NAME} entry ONLY_HERE=1 SIZE=-1"


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """The texts that were compiled."""
    texts = []

    def compile_text(text, options, name="fp8core"):
        texts.append((text, options))
        if "-DREFUSED=1" in options:
            raise BackendError("refused")
        return b"machine code"

    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(device, "platform", lambda: "cuda")
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(device, "target", lambda ordinal: H200)
    monkeypatch.setattr(compiler, "version", lambda: "a compiler 1.0")
    monkeypatch.setattr(compiler, "compile_text", compile_text)
    return texts


def test_a_line_is_the_kernel_that_a_launcher_loads(compiled):
    """Name for name and byte for byte: else every kernel would be compiled twice."""
    assert warm.compiled_ahead(H200, LINE)
    request = jit.compile_request(H200, NAME, "entry", {"ONLY_HERE": 1, "SIZE": -1})
    assert compiled == [(request.text, request.options)]
    assert warm.line_of(NAME, "entry", {"ONLY_HERE": 1, "SIZE": -1}) == LINE
    name = compiler.file_name(H200, request.text, request.options)
    assert kernel_cache.fetch(name, bytes) == (b"machine code", True)
    assert warm.compiled_ahead(H200, LINE)
    assert len(compiled) == 1


def test_lines_that_are_stale_are_counted_and_no_more(compiled):
    lines = [LINE, LINE, "gone gone A=1", f"{NAME} entry REFUSED=1", NAME, "", f"{NAME} x broken"]
    assert warm.ahead(H200, lines, ThreadPoolExecutor) == (1, 5)


def test_a_process_of_its_own_finds_what_it_compiles():
    with warm.processes() as pool:
        assert pool.submit(warm.compiled_ahead, H200, "gone gone A=1").result() is False


def test_without_a_list_the_known_problems_are_planned_elsewhere():
    lines = warm.planned_elsewhere(H200)
    assert len(lines) == len(set(lines)) > 150
    assert {line.split()[0] for line in lines} <= set(sources.names("cuda"))
    assert jit.prepare.__module__ == "fp8core.runtime.jit"


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_whole_run_asked_for_is_written_beside_the_receipt(compiled, tmp_path, monkeypatch, whole):
    said = []
    reporter = SimpleNamespace(write_line=said.append)
    config = SimpleNamespace(pluginmanager=SimpleNamespace(getplugin=lambda name: reporter))
    written = SimpleNamespace(
        root=tmp_path,
        asked_whole=lambda: True,
        complete=lambda session: whole,
        destination=lambda complete: tmp_path / "out" / "gpu-suite.json" if complete else None,
    )
    (tmp_path / receipt.RESULTS).mkdir(parents=True)
    (tmp_path / receipt.RESULTS / warm.LIST).write_text(f"{LINE}\n")
    monkeypatch.setenv("FP8CORE_RECEIPT_DIR", str(tmp_path / "journal"))
    real = jit.compile_request
    plugin = warm.Warm(config, written, ThreadPoolExecutor)
    try:
        plugin.pytest_runtestloop(SimpleNamespace(items=["a test"]))
        assert len(compiled) == 1
        assert "compiled ahead: 1 kernels" in said[0]
        for size in (2, 1, 2):
            jit.compile_request(H200, NAME, "entry", {"SIZE": size})
    finally:
        plugin.pytest_sessionfinish(SimpleNamespace())
    assert jit.compile_request is real
    assert (tmp_path / "journal" / warm.LIST).read_text().splitlines() == [
        f"{NAME} entry SIZE=2",
        f"{NAME} entry SIZE=1",
    ]
    path = tmp_path / "out" / warm.LIST
    assert path.exists() is whole
    assert not whole or path.read_text() == f"{NAME} entry SIZE=1\n{NAME} entry SIZE=2\n"


def test_workers_report_what_their_tests_asked_for(compiled, tmp_path):
    """So a run with ``-n`` writes the list of all of them."""
    reports = []
    for size in (2, 1):
        config = SimpleNamespace(workeroutput={})
        worker = warm.Asked(config)
        worker.pytest_runtestloop(SimpleNamespace())
        try:
            jit.compile_request(H200, NAME, "entry", {"SIZE": size})
        finally:
            worker.pytest_sessionfinish(SimpleNamespace())
        reports.append(config)
    written = SimpleNamespace(complete=lambda session: True, destination=lambda complete: tmp_path / "gpu-suite.json")
    plugin = warm.Warm(SimpleNamespace(), written, ThreadPoolExecutor)
    for report in (*reports, SimpleNamespace()):  # a worker that crashed has no report
        plugin.pytest_testnodedown(report)
    plugin.pytest_sessionfinish(SimpleNamespace())
    assert (tmp_path / warm.LIST).read_text() == f"{NAME} entry SIZE=1\n{NAME} entry SIZE=2\n"
