"""fp8core.kernels.gemm.blaslt: every call of a product, against a recording library with the real ABI."""

import pytest

from fp8core.kernels.gemm.blaslt import query
from fp8core.kernels.gemm.blaslt.mapping import accumulation, product
from support.blaslt_fixtures import built, hip_stub, stub  # noqa: F401
from support.blaslt_launches import (
    AMAX,
    BIAS,
    OUT,
    OUT_SCALE,
    SCALE_A,
    SCALE_B,
    SCRATCH,
    STREAM,
    TARGETS,
    A,
    B,
    launched,
)
from support.blaslt_tools import FIRST_RUN, pretend, problem
from support.targets import MI300

# Attributes of the descriptor that the product is launched with: {number: (bytes, value)}, from the vendors' headers.
CUDA_COMMON = {3: (4, 1), 4: (4, 0), 17: (8, SCALE_B), 18: (8, SCALE_A)}
CUDA = {
    "tensor": (problem(), CUDA_COMMON | {7: (4, 1), 25: (1, 1)}),
    "tensor, exact": (problem(use_fast_accum=False), CUDA_COMMON | {7: (4, 1), 25: (1, 0)}),
    "tensor, bias": (problem(bias="bfloat16"), CUDA_COMMON | {7: (4, 4), 25: (1, 1), 26: (4, 14), 8: (8, BIAS)}),
    "tensor, half": (
        problem(out="float16", bias="float16"),
        CUDA_COMMON | {7: (4, 4), 25: (1, 1), 26: (4, 2), 8: (8, BIAS)},
    ),
    "codes": (
        problem(out="float8_e4m3fn", out_scale=True, amax=True),
        CUDA_COMMON | {7: (4, 1), 25: (1, 1), 20: (8, OUT_SCALE), 21: (8, AMAX)},
    ),
    "row": (problem("row"), CUDA_COMMON | {7: (4, 1), 25: (1, 1), 31: (4, 3), 32: (4, 3)}),
    "row, bias": (
        problem("row", bias="bfloat16"),
        CUDA_COMMON | {7: (4, 4), 25: (1, 1), 26: (4, 14), 8: (8, BIAS), 31: (4, 3), 32: (4, 3)},
    ),
    "group x block": (
        problem("group x block"),
        CUDA_COMMON | {7: (4, 1), 25: (1, 0), 31: (4, 5), 32: (4, 4)},
    ),
    "group x group": (
        problem("group x group"),
        CUDA_COMMON | {7: (4, 1), 25: (1, 0), 31: (4, 4), 32: (4, 4)},
    ),
}
HIP_COMMON = {0: (4, 112), 1: (4, 111), 5: (8, SCALE_B), 6: (8, SCALE_A)}
HIP = {
    "tensor": (problem(target=MI300), HIP_COMMON | {2: (4, 1)}),
    "tensor, bias": (problem(target=MI300, bias="bfloat16"), HIP_COMMON | {2: (4, 4), 4: (4, 14), 3: (8, BIAS)}),
    "codes": (
        problem(target=MI300, out="float8_e4m3fnuz", out_scale=True, amax=True),
        HIP_COMMON | {2: (4, 1), 8: (8, OUT_SCALE), 14: (8, AMAX)},
    ),
    "row": (problem("row", target=MI300), HIP_COMMON | {2: (4, 1), 31: (4, 3), 32: (4, 3)}),
}


def given(p):
    return {
        "bias": BIAS if p.bias else 0,
        "out_scale": OUT_SCALE if p.out_scale else 0,
        "amax": AMAX if p.amax else 0,
    }


@pytest.mark.parametrize("case", CUDA)
def test_descriptor_of_cublaslt(stub, case):
    p, want = CUDA[case]
    launched(stub, product(p), **given(p))
    assert stub.attributes(len(stub.lines("MatmulDescCreate"))) == want  # those before were for the heuristic


@pytest.mark.parametrize("case", HIP)
def test_descriptor_of_hipblaslt(hip_stub, case):
    p, want = HIP[case]
    launched(hip_stub, product(p), **given(p))
    assert hip_stub.attributes(2) == want


@pytest.mark.parametrize("case", CUDA)
def test_heuristic_sees_which_addresses_there_will_be(stub, case):
    p, want = CUDA[case]
    assert query.refusal(product(p)) is None
    seen = stub.attributes(1)
    assert seen.keys() == want.keys()
    assert all(value for number, (width, value) in seen.items() if width == 8)


def test_every_call_in_its_order_cublaslt(stub):
    p = problem(m=48, n=264, k=4112, lda=4128, ldb=4144, ldo=272, alignment=16)
    launched(stub, product(p))
    assert [line for line in stub.lines() if "Destroy" not in line] == [
        "Create h1",
        "MatrixLayoutCreate l1 28 4112 264 4144",
        "MatrixLayoutCreate l2 28 4112 48 4128",
        "MatrixLayoutCreate l3 14 264 48 272",
        "MatmulDescCreate d1 68 0",
        "MatmulDescSetAttribute d1 3 4 1",
        "MatmulDescSetAttribute d1 4 4 0",
        "MatmulDescSetAttribute d1 25 1 1",
        "MatmulDescSetAttribute d1 7 4 1",
        "MatmulDescSetAttribute d1 18 8 4096",
        "MatmulDescSetAttribute d1 17 8 4096",
        "MatmulPreferenceCreate p1",
        "MatmulPreferenceSetAttribute p1 1 8 33554432",
        "MatmulPreferenceSetAttribute p1 5 4 16",
        "MatmulPreferenceSetAttribute p1 6 4 16",
        "MatmulPreferenceSetAttribute p1 7 4 16",
        "MatmulPreferenceSetAttribute p1 8 4 16",
        "MatmulAlgoGetHeuristic h1 d1 l1 l2 l3 l3 p1 8",
        "MatmulPreferenceCreate p2",
        "MatmulPreferenceSetAttribute p2 1 8 0",
        "MatmulPreferenceSetAttribute p2 5 4 16",
        "MatmulPreferenceSetAttribute p2 6 4 16",
        "MatmulPreferenceSetAttribute p2 7 4 16",
        "MatmulPreferenceSetAttribute p2 8 4 16",
        "MatmulAlgoGetHeuristic h1 d1 l1 l2 l3 l3 p2 8",
        "MatrixLayoutCreate l4 28 4112 264 4144",
        "MatrixLayoutCreate l5 28 4112 48 4128",
        "MatrixLayoutCreate l6 14 264 48 272",
        "MatmulDescCreate d2 68 0",
        "MatmulDescSetAttribute d2 3 4 1",
        "MatmulDescSetAttribute d2 4 4 0",
        "MatmulDescSetAttribute d2 25 1 1",
        "MatmulDescSetAttribute d2 7 4 1",
        "MatmulDescSetAttribute d2 18 8 4000",
        "MatmulDescSetAttribute d2 17 8 5000",
        " ".join(
            (
                f"Matmul h1 d2 alpha=1 A={B} l4 B={A} l5 beta=0 C=0 l6 D={OUT} l6",
                f"algorithm=1 workspace={SCRATCH}+1000 stream={STREAM}",
                f"scale_A={SCALE_B} scale_B={SCALE_A} bias=0 scale_D=0 amax=0",
            )
        ),
    ]


def test_every_call_in_its_order_hipblaslt(hip_stub):
    launched(hip_stub, product(problem(target=MI300)))
    said = [line for line in hip_stub.lines() if "Destroy" not in line]
    assert said[:11] == [
        "Create h1",
        "MatrixLayoutCreate l1 1000 4096 256 4096",
        "MatrixLayoutCreate l2 1000 4096 64 4096",
        "MatrixLayoutCreate l3 14 256 64 256",
        "MatmulDescCreate d1 2 0",
        "MatmulDescSetAttribute d1 0 4 112",
        "MatmulDescSetAttribute d1 1 4 111",
        "MatmulDescSetAttribute d1 2 4 1",
        "MatmulDescSetAttribute d1 6 8 4096",
        "MatmulDescSetAttribute d1 5 8 4096",
        "MatmulPreferenceCreate p1",
    ]
    assert said[11:13] == [
        "MatmulPreferenceSetAttribute p1 1 8 79691776",
        "MatmulAlgoGetHeuristic h1 d1 l1 l2 l3 l3 p1 8",
    ]
    first, *others = [line for line in said if line.startswith(("Create h", "Matmul h"))][1:]
    assert first == "Create h2", "a spare handle, for a stream that is captured"
    assert others[0].startswith(f"Matmul h1 d2 alpha=1 A={FIRST_RUN} l4 B={FIRST_RUN} l5 beta=0")
    assert others[1] == "Create h3", "a new spare one: the stream has taken the first"
    assert others[2].startswith(f"Matmul h2 d2 alpha=1 A={B} l4 B={A} l5 beta=0 C={OUT} l6 D={OUT} l6 algorithm=1 work")
    assert others[2] == said[-1]


def test_codes_have_a_wide_c(stub):
    _, line = launched(stub, product(problem(out="float8_e4m3fn", out_scale=True)), out_scale=OUT_SCALE)
    assert "MatrixLayoutCreate l8 14 256 64 256" in stub.lines()
    assert "MatrixLayoutCreate l7 28 256 64 256" in stub.lines()
    assert f"C=0 l8 D={OUT} l7" in line


def test_accumulation_has_no_scales_and_gives_fp32(stub):
    p = problem("row", bias="float32", out="float8_e4m3fn", out_scale=True, amax=True, ldo=272)
    _, line = launched(stub, accumulation(p), scaled=False)
    assert "scale_A=0 scale_B=0 bias=0 scale_D=0 amax=0" in line
    assert stub.attributes(2) == {3: (4, 1), 4: (4, 0), 7: (4, 1), 25: (1, 1)}
    assert "MatrixLayoutCreate l3 0 256 64 256" in stub.lines()


def test_offers_are_read_where_they_stand(stub, hip_stub, monkeypatch):
    for platform, recorder, size in (("cuda", stub, 64), ("hip", hip_stub, 24)):
        pretend(monkeypatch, recorder, (TARGETS[platform],))
        recorder.offers(3)
        got = query.algorithms(product(problem(target=TARGETS[platform])))
        assert [one[:3] for one in got] == [(bytes([i]) * size, 1000 * i, 0.5 * i) for i in (1, 2, 3)]


def test_choice_is_an_offer_with_its_workspace(stub):
    launch, line = launched(stub, product(problem()), choice=1)
    assert "algorithm=2 workspace=10000+2000" in line
    assert launch.scratch_bytes == 2000
