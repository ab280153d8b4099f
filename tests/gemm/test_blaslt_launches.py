"""fp8core.kernels.gemm.blaslt: what launches share and write again, threads, handles, and calls that fail."""

import re
import threading

import pytest

from fp8core.errors import BackendError
from fp8core.kernels.gemm.blaslt import matmul, query
from fp8core.kernels.gemm.blaslt.handles import Handles
from fp8core.kernels.gemm.blaslt.library import find
from fp8core.kernels.gemm.blaslt.mapping import product
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.runtime import device
from support.blaslt_fixtures import built, hip_stub, stub  # noqa: F401
from support.blaslt_launches import (
    ARGUMENTS,
    OUT,
    SCALE_A,
    SCALE_B,
    SCRATCH,
    STREAM,
    TARGETS,
    A,
    B,
    launched,
)
from support.blaslt_tools import forget, pretend, problem
from support.targets import H200
from support.threads import in_time


def test_only_changed_addresses_are_written_again(stub):
    launch, _ = launched(stub, product(problem()))
    before = len(stub.lines())
    launch(*ARGUMENTS[:5], 0, OUT + 16, 0, 0, SCRATCH)
    assert len(stub.lines()) == before + 1
    launch(STREAM, A, B, SCALE_A + 4, SCALE_B, 0, OUT, 0, 0, SCRATCH)
    assert stub.lines()[before + 1 : -1] == [f"MatmulDescSetAttribute d2 18 8 {SCALE_A + 4}"]
    assert f"scale_A={SCALE_B} scale_B={SCALE_A + 4}" in stub.lines()[-1]


def test_threads_never_share_a_descriptor(stub):
    launch, _ = launched(stub, product(problem()))

    def work(number):
        for call in range(20):
            at = (number * 1000 + call) * 16
            launch(STREAM, A + at, B, SCALE_A + at, SCALE_B, 0, OUT, 0, 0, SCRATCH)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = stub.lines("Matmul")[1:]
    assert len(calls) == 160
    assert not [line for line in calls if line.endswith("RACE")]
    for line in calls:
        found = re.search(r" B=(\d+) .* scale_B=(\d+) ", line)
        assert int(found[1]) - A == int(found[2]) - SCALE_A
    assert len(stub.lines("MatmulDescCreate")) <= 1 + 8


def test_descriptors_are_destroyed_with_their_plan(stub):
    launched(stub, product(problem()))
    assert len(stub.lines("MatmulDescCreate")) == 2
    for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
        assert len(stub.lines(f"{kind}Create")) == len(stub.lines(f"{kind}Destroy")), kind


def test_one_handle_a_device_made_where_the_device_is_current(stub, monkeypatch):
    entered = []
    state = {"current": 0}

    class On:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            entered.append(self.ordinal)
            self.before, state["current"] = state["current"], self.ordinal

        def __exit__(self, *_):
            state["current"] = self.before

    monkeypatch.setattr(device, "on", On)
    monkeypatch.setattr(device, "current", lambda: state["current"])
    launched(stub, product(problem()))
    launched(stub, product(problem(m=32)))
    assert entered == [0]
    _, line = launched(stub, product(problem(target=H200._replace(device=1))))
    assert entered == [0, 1, 1]
    assert "h2" in line
    assert len(stub.lines("Create")) == 2
    assert state["current"] == 0


FAILURES = [
    ("cuda", "Create", 1, "cublasLtCreate: CUBLAS_STATUS_NOT_INITIALIZED (1) for device 0"),
    ("cuda", "MatmulDescCreate", 3, "cublasLtMatmulDescCreate: CUBLAS_STATUS_ALLOC_FAILED (3) for Product("),
    (
        "cuda",
        "MatmulDescSetAttribute",
        7,
        "cublasLtMatmulDescSetAttribute: CUBLAS_STATUS_INVALID_VALUE (7) for TRANSA = 1",
    ),
    ("cuda", "MatrixLayoutCreate", 3, "cublasLtMatrixLayoutCreate: CUBLAS_STATUS_ALLOC_FAILED (3) for Product("),
    (
        "cuda",
        "MatmulPreferenceSetAttribute",
        7,
        "cublasLtMatmulPreferenceSetAttribute: CUBLAS_STATUS_INVALID_VALUE (7)",
    ),
    ("cuda", "MatmulAlgoGetHeuristic", 15, "cublasLtMatmulAlgoGetHeuristic: CUBLAS_STATUS_NOT_SUPPORTED (15)"),
    ("cuda", "MatmulAlgoGetHeuristic", 99, "cublasLtMatmulAlgoGetHeuristic: unknown status (99)"),
    ("hip", "MatmulAlgoGetHeuristic", 7, "hipblasLtMatmulAlgoGetHeuristic: HIPBLAS_STATUS_NOT_SUPPORTED (7)"),
    ("hip", "Create", 2, "hipblasLtCreate: HIPBLAS_STATUS_ALLOC_FAILED (2) for device 0"),
    ("hip", "Create", 8, "hipblasLtCreate: HIPBLAS_STATUS_ARCH_MISMATCH (8) for device 0"),
]


@pytest.mark.parametrize(("platform", "function", "status", "text"), FAILURES)
def test_failed_call_is_named_with_its_status(built, monkeypatch, platform, function, status, text):
    pretend(monkeypatch, built[platform], (TARGETS[platform],))
    built[platform].fail(function, status)
    made = product(problem(target=TARGETS[platform]))
    if "ALLOC_FAILED" in text:
        with pytest.raises(BackendError, match=re.escape(text)):
            query.refusal(made)
    else:
        assert query.refusal(made).startswith(text)
    with pytest.raises(BackendError, match=re.escape(text)):
        matmul.plan(made)
    forget()


@pytest.mark.parametrize("function", ["MatmulDescCreate", "MatmulAlgoCheck"])
def test_too_little_memory_for_a_query_is_no_answer_to_keep(stub, function):
    p = problem("row")
    stub.vectors(8)  # so that offers for a scale each are checked
    stub.fail(function, 3)
    for question in (SCALED_MM.choice, SCALED_MM.explain):
        with pytest.raises(BackendError, match="CUBLAS_STATUS_ALLOC_FAILED"):
            question(p._replace(m=2048))
    stub.fail("", 0)
    verdicts = {v.kernel: v.status for v in SCALED_MM.explain(p._replace(m=2048)).verdicts}
    assert verdicts["cublaslt"] != "unable"


def test_other_kernels_run_the_products_of_a_library_that_cannot_be_initialized(stub):
    stub.fail("Create", 1)
    told = SCALED_MM.explain(problem("row")._replace(m=2048))
    assert told.chosen == SCALED_MM.choice(problem("row")._replace(m=2048)).kernel == "sm90_tiled"
    assert "NOT_INITIALIZED" in next(v.reason for v in told.verdicts if v.kernel == "cublaslt")
    forget()


def test_failed_launch_names_the_problem_and_leaves_the_plan_usable(stub):
    launch, _ = launched(stub, product(problem(m=48)))
    stub.fail("Matmul", 13)
    with pytest.raises(
        BackendError, match=r"cublasLtMatmul: CUBLAS_STATUS_EXECUTION_FAILED \(13\) for Product\(.*m=48"
    ):
        launch(*ARGUMENTS[:5], 0, OUT, 0, 0, SCRATCH)
    stub.fail("", 0)
    launch(*ARGUMENTS[:5], 0, OUT, 0, 0, SCRATCH)
    assert len(stub.lines("MatmulDescCreate")) == 2


def test_a_destructor_amid_the_making_of_a_handle_may_ask_for_another(stub, monkeypatch):
    """A collection of garbage may begin anywhere, and end in a call of the library."""
    found, made, ours = [], Handles._made, find("cuda").handles

    def amid(self, ordinal):
        if ordinal == 0:
            found.append(self.of_device(1))
        return made(self, ordinal)

    monkeypatch.setattr(Handles, "_made", amid)
    in_time(lambda: found.append(ours.of_device(0)))
    assert found == [ours.of_device(1), ours.of_device(0)]
    assert found[0] != found[1]


def test_thread_without_a_context_gets_one(stub, monkeypatch):
    launch, _ = launched(stub, product(problem()))
    bound = []

    def again(status, ordinal, function, *arguments):
        bound.append((status, ordinal))
        stub.fail("", 0)
        return function(*arguments)

    monkeypatch.setattr(device, "retry_with_context", again)
    stub.fail("Matmul", 13)
    launch(*ARGUMENTS[:5], 0, OUT, 0, 0, SCRATCH)
    assert bound == [(13, 0)]
