"""What a tuning is for: the devices that are like the timed one, with the library and the kernels that were timed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import fp8core
from fp8core.errors import TuningError
from fp8core.kernels.gemm.blaslt import library
from fp8core.kernels.gemm.generic import HOST
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.runtime import device, sources
from fp8core.tuning import Tuning, load_tunings, machine, measuring, save_tunings, timed, values
from support.blaslt_fixtures import built  # noqa: F401
from support.targets import H200
from support.tuning_stub import FAR, PROBLEM, saying, stub  # noqa: F401

SECOND_GPU = H200._replace(device=1)


@pytest.mark.parametrize("other", ["name", "multiprocessors"])
def test_a_tuning_is_for_no_other_gpu_of_the_machine(stub, monkeypatch, other):
    """A GPU that is divided has the name of a whole one with some drivers, and fewer multiprocessors."""
    if other == "name":
        monkeypatch.setattr(device, "name", ("NVIDIA H200", "NVIDIA H100").__getitem__)
    else:
        monkeypatch.setattr(device, "target", (H200, SECOND_GPU._replace(multiprocessors=60)).__getitem__)
    found = timed(PROBLEM, saying(9.0, 5.0))
    assert {problem.target for problem in found.problems()} == {H200}
    found.apply()
    assert {problem.target for problem in SCALED_MM._tuned} == {H200}


def test_a_file_has_one_line_for_all_devices_of_a_kind(stub, tmp_path):
    """Each would otherwise choose for all, and the last line would count."""
    of_each = [timed(PROBLEM._replace(target=at), saying(us)) for us, at in enumerate((H200, SECOND_GPU), 1)]
    path = save_tunings(tmp_path / "x", of_each)
    assert path.read_text().splitlines() == [of_each[1].to_json()]


def test_a_library_that_reports_no_version_is_version_0(stub, monkeypatch):
    """A line without a number could not be read back."""
    found = timed(PROBLEM, saying(9.0))
    with monkeypatch.context() as other:
        other.setattr(library, "find", lambda platform: SimpleNamespace(version=None))
        found = replace(found, machine=machine.__wrapped__(H200))
    assert found.machine.library == 0
    assert Tuning.from_json(found.to_json()) == found


def test_times_are_those_of_kernels_and_of_the_modules_that_prepare_them(monkeypatch):
    before, seen, digest_of = values.digest(), [], sources.digest_of
    with monkeypatch.context() as other:
        other.setattr(sources, "digest", lambda: "other device sources")
        assert values.digest.__wrapped__() != before
    with monkeypatch.context() as other:
        other.setattr(sources, "digest_of", lambda top, files: seen.extend(files) or digest_of(top, files[1:]))
        assert values.digest.__wrapped__() != before
    names = {path.as_posix().partition("/fp8core/kernels/")[2] for path in seen}
    assert names >= {"encodings.py", "gemm/table.py", "gemm/sm90/decode.py", "gemm/blaslt/query.py"}


def test_what_was_not_timed_fully_gains_nothing(stub):
    found = timed(PROBLEM, saying())
    assert (found.chosen[:3], found.timed, found.gain) == (("cublaslt", 0, FAR), (), 0.0)
    assert Tuning.from_json(found.to_json()) == found


@pytest.mark.parametrize("fastest", [1, 2], ids=["algorithm", "kernel"])
def test_what_is_gained_over_a_default_that_could_not_run_is_not_that_over_the_next_candidate(stub, fastest):
    times = [FAR, 9.0, 9.0]
    times[fastest] = 5.0
    found = timed(PROBLEM, saying(*times))
    assert (found.default[:3], found.chosen.us, found.gain) == (("cublaslt", 0, FAR), 5.0, FAR)
    assert Tuning.from_json(found.to_json()) == found


@pytest.mark.parametrize("given", [(7, 8), {"x": 7, "weight": 8}], ids=["by place", "by name"])
def test_a_call_is_timed_for_what_it_asks_and_runs_the_fastest_from_then_on(stub, monkeypatch, given):
    monkeypatch.setattr(measuring, "explain", lambda *_, **__: SimpleNamespace(problem=PROBLEM))
    monkeypatch.setattr(measuring.timing, "times", saying(9.0, 5.0))
    asked = []
    monkeypatch.setattr(measuring, "refuse_captures", lambda operands: asked.extend(operands))
    args, kwargs = (given, {}) if isinstance(given, tuple) else ((), given)
    found = fp8core.tune(fp8core.linear, *args, **kwargs)
    assert asked == [7, 8]
    assert not found._problem.prefetch_weight
    assert SCALED_MM.choice(PROBLEM) == ("cublaslt", 1)
    layer = object.__new__(fp8core.Fp8Linear)
    assert fp8core.tune(layer, *args, **kwargs)._problem == PROBLEM._replace(prefetch_weight=True)


def test_a_product_that_no_kernel_can_run_is_refused(stub, monkeypatch):
    monkeypatch.setattr(SCALED_MM, "kernels", (HOST,))
    with pytest.raises(fp8core.UnsupportedProblemError, match="no kernel can run ScaledMm"):
        timed(PROBLEM, saying(1.0))


def test_a_capture_of_the_current_stream_is_refused_without_operands(stub, monkeypatch):
    monkeypatch.setattr(device, "capturing", lambda stream: True)
    current = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=7)))
    monkeypatch.setattr(device, "cupy", lambda: current)
    with pytest.raises(TuningError, match="not being captured into a graph, got CuPy's current stream"):
        measuring.refuse_captures()


def test_calls_that_were_planned_are_dropped_when_a_file_is_loaded(stub, monkeypatch, tmp_path):
    dropped = []
    path = save_tunings(tmp_path / "x", [timed(PROBLEM, saying(9.0, 5.0))])
    monkeypatch.setattr(values.LINEAR, "forget", lambda: dropped.append("layers"))
    monkeypatch.setattr(values, "forget", lambda: dropped.append("calls"))
    assert len(load_tunings(path)) == 1
    assert dropped == ["layers", "calls"]
