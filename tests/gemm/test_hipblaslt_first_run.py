"""hipBLASLt loads the code of a kernel at its first launch: a product runs once when it is planned."""

import threading
from types import SimpleNamespace

import pytest

from fp8core.errors import BackendError
from fp8core.kernels.gemm.blaslt import first_run, library, matmul, query
from fp8core.kernels.gemm.blaslt.mapping import product
from support.blaslt_fixtures import built, hip_stub  # noqa: F401
from support.blaslt_tools import FIRST_RUN, problem
from support.hip_launches import ONE, OURS, TWO, launches, multiply
from support.targets import MI300


def test_a_product_runs_once_when_it_is_planned(hip_stub):
    """Its first launch in a capture would load code there, which ends the capture."""
    launch = matmul.plan(OURS)
    multiply(launch, ONE)
    other = matmul.plan(OURS, 1)
    hip_stub.capturing(1)
    hip_stub.captured.add(TWO)
    multiply(other, TWO)
    assert not [line for line in hip_stub.lines("Matmul") if "LOADED" in line]


def test_a_first_run_has_memory_for_every_operand(hip_stub):
    p = product(problem(target=MI300, out="float8_e5m2fnuz", bias="bfloat16", out_scale=True, amax=True))
    made = matmul.plan(p)
    assert hip_stub.cuda.allocated == [], "all of it is given back"
    inputs, result, scratch = first_run.sizes(p, made.scratch_bytes)
    assert inputs >= max(p.n * p.ldb, p.m * p.lda, 4 * p.n, 4 * p.m)
    assert (result, scratch) == (p.m * p.ldo, made.scratch_bytes)
    line = hip_stub.lines("Matmul")[-1]
    for name in ("A", "B", "scale_A", "scale_B", "bias", "scale_D", "amax"):
        assert f" {name}={FIRST_RUN}" in line
    assert f" D={FIRST_RUN + inputs}" in line
    assert f"workspace={FIRST_RUN + inputs + result}+" in line
    assert f"stream={FIRST_RUN}" in line


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_destructor_amid_a_first_run_may_multiply_otherwise(hip_stub, monkeypatch, when):
    """A collection of garbage may begin anywhere, and end in a call: by the device's handle, on a stream of its own."""
    other, streams, made = product(problem(target=MI300, m=32)), iter(range(FIRST_RUN, FIRST_RUN + 2)), []

    def stream(non_blocking):
        ptr = next(streams)
        return SimpleNamespace(ptr=ptr, synchronize=lambda: hip_stub.idle(ptr))

    def launched(launch):
        def run(*arguments):
            if when == "behind":
                launch(*arguments)
            if not made:
                made.append(None)
                made.append(matmul.plan(other))
            if when == "before":
                launch(*arguments)

        run.scratch_bytes = launch.scratch_bytes
        return run

    run = first_run.run
    monkeypatch.setattr(hip_stub.cuda, "Stream", stream)
    monkeypatch.setattr(first_run, "run", lambda product, launch, *rest: run(product, launched(launch), *rest))
    thread = threading.Thread(target=lambda: made.append(matmul.plan(OURS)), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert len(made) == 3
    assert len(hip_stub.lines("Matmul")) == 2
    assert not [line for line in hip_stub.lines("Matmul") if "SHARED" in line]
    assert library.find("hip").handles.use(0).under_way == []


@pytest.mark.parametrize("reason", ["no memory", "too large"])
def test_without_memory_there_is_no_first_run(hip_stub, monkeypatch, reason):
    if reason == "no memory":
        hip_stub.cuda.fails = True
    else:
        monkeypatch.setattr(first_run, "MOST_BYTES", 1000)
    launch = matmul.plan(OURS)
    assert hip_stub.lines("Matmul") == []
    multiply(launch, ONE)
    assert len(launches(hip_stub)) == 1


def test_an_offer_that_does_not_run_is_known_when_it_is_planned(hip_stub):
    query.algorithms(OURS)
    hip_stub.fail("Matmul", 5)
    with pytest.raises(BackendError, match="hipblasLtMatmul: HIPBLAS_STATUS_EXECUTION_FAILED"):
        matmul.plan(OURS)
    assert hip_stub.drained == ["drained"], "HIP's sticky error is for nobody else"
