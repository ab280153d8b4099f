"""The rows of the product: which is chosen, what the others say, and what the composed ones launch."""

import numpy as np
import pytest

from blaslt_tools import ADA, AMPERE, BLACKWELL, H200, MI300, MI350, Stub, build, forget, pretend, problem
from emulation import CUDA, HIP_64
from emulation.fixtures import emulation_session, emulator  # noqa: F401
from fp8core import jit
from fp8core.errors import UnsupportedProblemError
from fp8core.kernels import ragged_mm
from fp8core.kernels.arrange import NOTHING, Arrangement, arrangement, plan_arrange
from fp8core.kernels.hopper import HOPPER_ROWS
from fp8core.kernels.library_mm import plan_arranged, plan_direct, plan_rescaled
from fp8core.kernels.ragged_mm import plan_finished, plan_padded
from fp8core.kernels.scaled_mm import SCALED_MM
from fp8core.problem import HOST

NOWHERE = 7
"""An ordinal that no machine of these tests has."""


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blaslt")
    return {platform: Stub(build(folder, platform)) for platform in ("cuda", "hip")}


@pytest.fixture
def stub(built, monkeypatch):
    pretend(monkeypatch, built["cuda"], (H200,))
    yield built["cuda"]
    forget()


@pytest.fixture
def hip_stub(built, monkeypatch):
    pretend(monkeypatch, built["hip"], (MI300,))
    yield built["hip"]
    forget()


@pytest.fixture
def kernels(monkeypatch):
    """Record the launches of the package's own kernels: entry, grid, arguments."""
    launched = []

    def prepare(target, source, entry, constants, signature, **_):
        return lambda stream, grid, *arguments: launched.append((entry, stream, arguments))

    monkeypatch.setattr(jit, "prepare", prepare)
    return launched


def verdicts(p):
    return {v.kernel: v for v in SCALED_MM.explain(p).verdicts}


def preferred(p):
    """Return the first able row behind the hand-written ones, which tests/test_decode.py is about."""
    own = {kernel.name for kernel in HOPPER_ROWS}
    return next(v.kernel for v in SCALED_MM.explain(p).verdicts if v.status != "not able" and v.kernel not in own)


def refusal(p, row):
    verdict = verdicts(p)[row]
    assert verdict.status == "not able", verdict
    return verdict.reason


CHOICES = [
    (problem(), "cublaslt"),
    (problem("row"), "cublaslt"),
    (problem("row", bias="bfloat16"), "cublaslt"),
    (problem("row", bias="float32"), "cublaslt_rescale"),
    (problem("mixed"), "cublaslt_arranged"),
    (problem("row", scale_a_strides=(3, 0)), "cublaslt_arranged"),
    (problem("row", m=1, scale_a_strides=(3, 0)), "cublaslt"),
    (problem("group x block"), "cublaslt"),
    (problem("group x block", scale_a_strides=(32, 1)), "cublaslt_arranged"),
    (problem("group x block", k=4224, lda=4224, ldb=4224, scale_b_strides=(33, 1)), "cublaslt_arranged"),
    (problem("group x block", m=67, scale_a_strides=(1, 67)), "cublaslt_padded"),
    (problem("group x block", m=67, scale_a_strides=(1, 67), ldo=272), "cublaslt_finished"),
    (problem("group x block", m=257, scale_a_strides=(1, 257)), "cublaslt_finished"),
    (problem("group x block", m=3, scale_a_strides=(1, 3)), "dequantize"),
    (problem("group x group"), "cublaslt"),
    (problem("group x group", scale_b_strides=(32, 1)), "cublaslt_arranged"),
    (problem(out="float8_e4m3fn", out_scale=True), "cublaslt_arranged"),
    (problem("row", out="float8_e4m3fn", out_scale=True, amax=True), "cublaslt_rescale"),
    (problem(amax=True), "cublaslt_rescale"),
    (problem(b="float8_e5m2"), "cublaslt"),
    (problem(vectors_alignment=4), "cublaslt_arranged"),
    (problem("row", bias="bfloat16", vectors_alignment=2), "cublaslt_arranged"),
    (problem("group x block", vectors_alignment=4), "cublaslt_arranged"),
    (problem(out="float8_e4m3fn", out_scale=True, amax=True, vectors_alignment=4), "cublaslt_rescale"),
    (problem(batch_invariant=True), "dequantize"),
    (problem(alignment=8), "dequantize"),
    (problem(k=4104), "dequantize"),
    (problem(k=0), "dequantize"),
    (problem(n=250), "dequantize"),
    (problem(target=HOST), "host"),
]


@pytest.mark.parametrize(("p", "row"), CHOICES)
def test_preferred_row_where_the_library_offers(stub, p, row):
    assert preferred(p) == row, SCALED_MM.explain(p)


HIP_CHOICES = [
    (problem(target=MI300), "hipblaslt"),
    (problem("row", target=MI300), "hipblaslt"),
    (problem("mixed", target=MI300), "hipblaslt_arranged"),
    (problem("row", target=MI300, out="float16"), "hipblaslt_rescale"),
    (problem("row", target=MI300, bias="float32"), "hipblaslt_rescale"),
    (problem(target=MI300, out="float8_e4m3fnuz", out_scale=True), "hipblaslt_arranged"),
]


@pytest.mark.parametrize(("p", "row"), HIP_CHOICES)
def test_preferred_row_on_amd(hip_stub, p, row):
    assert preferred(p) == row, SCALED_MM.explain(p)


def test_row_falls_back_where_the_library_offers_nothing(stub):
    stub.offers(0)
    assert preferred(problem("row")) == "dequantize"
    said = "offers no algorithm for m=64 n=256 k=4096 to bfloat16 with scales OUTER_VEC and OUTER_VEC"
    assert refusal(problem("row"), "cublaslt") == f"cuBLASLt ({stub.path}) {said}"
    said = "offers no algorithm for m=64 n=256 k=4096 to float32 with scales SCALAR and SCALAR"
    assert refusal(problem("row"), "cublaslt_rescale") == f"cuBLASLt ({stub.path}) {said}"


BOTH = "a and b are both e5m2, which no tensor core multiplies: one of them has to be e4m3"
AWAY = "its library cannot be asked: this machine has no device 7"
REFUSALS = [
    (problem(a="float8_e5m2", b="float8_e5m2"), "cublaslt", BOTH),
    (problem(a="float8_e5m2", b="float8_e5m2"), "cublaslt_rescale", BOTH),
    (problem(a="float8_e5m2", b="float8_e5m2"), "dequantize", BOTH),
    (problem(target=HOST, a="float8_e5m2", b="float8_e5m2"), "host", BOTH),
    (problem(target=MI350, a="float8_e5m2", b="float8_e5m2"), "hipblaslt", BOTH),
    (problem(target=MI300), "cublaslt", "needs cuda, got gfx942 (device 0)"),
    (problem(), "hipblaslt", "needs hip, got sm_90 (device 0)"),
    (problem(target=HOST), "dequantize", "needs cuda or hip, got host"),
    (problem(target=AMPERE), "cublaslt", "needs architecture 89 or later, got sm_80 (device 0)"),
    (
        problem(a="float8_e4m3fnuz"),
        "cublaslt",
        "needs float8_e4m3fn or float8_e5m2, got a float8_e4m3fnuz and b float8_e4m3fn",
    ),
    (
        problem(target=MI350, a="float8_e4m3fnuz"),
        "hipblaslt",
        (
            "gfx942 multiplies fnuz formats and later ones OCP's,"
            " got a float8_e4m3fnuz and b float8_e4m3fn on gfx950 (device 0)"
        ),
    ),
    (
        problem(target=MI300._replace(arch=0x90A)),
        "hipblaslt",
        "needs FP8 matrix instructions (gfx942, gfx950, gfx1200, gfx1201), got gfx90a (device 0)",
    ),
    (
        problem(batch_invariant=True),
        "cublaslt",
        "the library chooses its algorithm by m, so the sums of a row would depend on the batch",
    ),
    (problem(alignment=8), "cublaslt", "needs addresses and rows aligned to 16 bytes, got 8"),
    (problem(k=4104), "cublaslt", "needs k, lda and ldb that are multiples of 16, got k=4104 lda=4096 ldb=4096"),
    (
        problem(n=252),
        "cublaslt",
        "needs n that is a multiple of 8 and rows of out of a multiple of 16 bytes, got n=252 and ldo=256 of bfloat16",
    ),
    (problem(vectors_alignment=4), "cublaslt", "needs scales and bias at addresses divisible by 16, got 4"),
    (problem("mixed"), "cublaslt", "the library takes no mix of modes, got scale_a per tensor and scale_b per row"),
    (
        problem("row", target=ADA),
        "cublaslt",
        "the library has scales per row and row on sm_90 only, got sm_89 (device 0)",
    ),
    (
        problem("group x block", target=BLACKWELL),
        "cublaslt_arranged",
        "the library has scales per group and block on sm_90 only, got sm_100 (device 0)",
    ),
    (
        problem("group x block", scale_a_strides=(32, 1)),
        "cublaslt",
        (
            "needs vectors without gaps, 1x128 scales stored [k/128][rows], 128x128 scales in rows of a multiple of 4,"
            " got strides (32, 1) of scale_a and (32, 1) of scale_b"
        ),
    ),
    (
        problem("group x block", m=67),
        "cublaslt",
        "the library takes 1x128 scales of rows that are a multiple of 4, got m=67",
    ),
    (problem("group x block", m=3), "cublaslt_padded", "is for more rows than 4 and no multiple of it, got m=3"),
    (problem("group x block", m=64), "cublaslt_finished", "is for more rows than 4 and no multiple of it, got m=64"),
    (
        problem("group x block", m=257),
        "cublaslt_padded",
        "copies a and the result, which pays up to 256 rows, got m=257",
    ),
    (
        problem("group x block", m=67, lda=4112),
        "cublaslt_padded",
        "copies rows without gaps, got lda=4112 with k=4096 and ldo=256 with n=256",
    ),
    (
        problem("group x block", m=67, bias="bfloat16", vectors_alignment=2),
        "cublaslt_padded",
        "needs a bias at an address divisible by 16, got 2",
    ),
    (problem("row"), "cublaslt_finished", "is for scales that change along k, got scale_a per row"),
    (
        problem("row", out="float8_e4m3fn", out_scale=True),
        "cublaslt",
        "the library gives float8_e4m3fn with scales per tensor only, got scale_a per row and scale_b per row",
    ),
    (
        problem(out="float8_e4m3fn", out_scale=True),
        "cublaslt",
        "the library multiplies by an inverse scale of the result, which has to be made first",
    ),
    (problem(amax=True), "cublaslt", "the library gives amax with FP8 results only, got bfloat16"),
    (problem(bias="float32"), "cublaslt", "the library does not add a float32 bias to a bfloat16 result"),
    (
        problem("group x block"),
        "cublaslt_rescale",
        "applies scales after the sum over k, got scale_a per group and scale_b per block",
    ),
    (
        problem("row", target=MI300, out="float32"),
        "hipblaslt",
        "hipBLASLt gives bfloat16 with scales per row, got float32",
    ),
    (
        problem("group x block", scale_b="row"),
        "cublaslt",
        "the library has no mode for scale_a per group with scale_b per row",
    ),
    (problem(target=H200._replace(device=NOWHERE)), "cublaslt", AWAY),
    (problem("mixed", target=H200._replace(device=NOWHERE)), "cublaslt_arranged", AWAY),
    (problem("group x block", m=67, target=H200._replace(device=NOWHERE)), "cublaslt_finished", AWAY),
    (problem("mixed", target=H200._replace(device=NOWHERE)), "cublaslt_rescale", AWAY),
    (problem(target=MI350._replace(device=NOWHERE)), "hipblaslt", AWAY),
]


@pytest.mark.parametrize(("p", "row", "text"), REFUSALS)
def test_refusals_are_these_sentences(p, row, text):
    assert refusal(p, row) == text


@pytest.mark.parametrize("target", [H200, MI350, HOST])
def test_both_e5m2_is_refused_by_every_row(target):
    p = problem(target=target, a="float8_e5m2", b="float8_e5m2")
    assert SCALED_MM.explain(p).chosen is None
    with pytest.raises(UnsupportedProblemError, match=BOTH):
        SCALED_MM.plan(tuple(p))


def test_explanation_says_each_row_once():
    names = [kernel.name for kernel in SCALED_MM.kernels]
    assert len(set(names)) == len(names)
    text = str(SCALED_MM.explain(problem(target=H200._replace(device=NOWHERE))))
    assert text.splitlines()[0].startswith("ScaledMm(target=sm_90 (device 7), m=64, n=256, k=4096")
    assert f"not able: {AWAY}" in text
    assert "dequantize" in text


# ---- what composed rows launch

STREAM, A, B, SCALE_A, SCALE_B, BIAS, OUT, OUT_SCALE, AMAX = range(1000, 10000, 1000)
SCRATCH = 1 << 20


def call(launch, bias=0, out_scale=0, amax=0):
    launch(STREAM, A, B, SCALE_A, SCALE_B, bias, OUT, out_scale, amax, SCRATCH)


def fields(line):
    return dict(part.split("=", 1) for part in line.split() if "=" in part)


def test_direct_is_the_library_alone(stub, kernels):
    launch = plan_direct(problem("row"))
    call(launch)
    assert kernels == []
    assert launch.scratch_bytes == 1000


def test_arranged_expands_a_scalar_and_takes_the_other_as_it_is(stub, kernels):
    launch = plan_arranged(problem("mixed"))
    call(launch)
    ((entry, stream, arguments),) = kernels
    assert (entry, stream) == ("arrange_scales", STREAM)
    assert arguments[:7] == (SCALE_A, SCRATCH + 1024, 0, 0, 1, 64, 64)
    assert arguments[9:14] == arguments[16:21] == NOTHING
    assert arguments[23:25] == (0, 0)
    said = fields(stub.lines("Matmul")[-1])
    assert (said["scale_B"], said["scale_A"]) == (str(SCRATCH + 1024), str(SCALE_B))
    assert launch.scratch_bytes == 1024 + 256


def test_arranged_transposes_groups_and_pads_blocks(stub, kernels):
    p = problem("group x block", k=4224, lda=4224, ldb=4224, scale_a_strides=(33, 1), scale_b_strides=(33, 1))
    launch = plan_arranged(p)
    call(launch)
    at_a, at_b = SCRATCH + 1024, SCRATCH + 1024 + 33 * 64 * 4
    ((_, _, arguments),) = kernels
    assert arguments[:7] == (SCALE_A, at_a, 1, 33, 33, 64, 64)
    assert at_b == arguments[8]
    assert arguments[7:14] == (SCALE_B, at_b, 33, 1, 2, 33, 36)
    said = fields(stub.lines("Matmul")[-1])
    assert (said["scale_B"], said["scale_A"]) == (str(at_a), str(at_b))
    assert launch.scratch_bytes == at_b - SCRATCH + 512


def test_arranged_inverts_the_scale_of_the_result(stub, kernels):
    launch = plan_arranged(problem(out="float8_e4m3fn", out_scale=True, amax=True))
    call(launch, out_scale=OUT_SCALE, amax=AMAX)
    ((_, _, arguments),) = kernels
    assert arguments[-2:] == (OUT_SCALE, SCRATCH + 1024)
    said = fields(stub.lines("Matmul")[-1])
    assert (said["scale_A"], said["scale_B"]) == (str(SCALE_B), str(SCALE_A))
    assert (said["scale_D"], said["amax"]) == (str(SCRATCH + 1024), str(AMAX))
    assert launch.scratch_bytes == 1024 + 256


def test_arranged_moves_vectors_to_aligned_addresses(stub, kernels):
    launch = plan_arranged(problem(bias="bfloat16", vectors_alignment=2))
    call(launch, bias=BIAS)
    at_a, at_b, at_bias = (SCRATCH + 1024 + step for step in (0, 256, 512))
    ((_, _, arguments),) = kernels
    assert arguments[:7] == (SCALE_A, at_a, 0, 0, 1, 1, 1)
    assert arguments[7:14] == (SCALE_B, at_b, 0, 0, 1, 1, 1)
    assert arguments[21:24] == (BIAS, at_bias, 256)
    said = fields(stub.lines("Matmul")[-1])
    assert (said["scale_B"], said["scale_A"], said["bias"]) == (str(at_a), str(at_b), str(at_bias))
    assert launch.scratch_bytes == at_bias + 512 - SCRATCH


RAGGED_ROWS = [(67, (1, 67)), (67, (32, 1)), (5, (40, 1))]


@pytest.mark.parametrize(("m", "strides"), RAGGED_ROWS)
def test_padded_multiplies_a_copy_into_a_copy(stub, kernels, m, strides):
    launch = plan_padded(problem("group x block", m=m, scale_a_strides=strides, bias="bfloat16"))
    call(launch, bias=BIAS)
    rows = -(-m // 4) * 4
    said = fields(stub.lines("Matmul")[-1])
    (_, _, before), (_, _, after) = kernels
    at_scale, at_a, at_out = before[1], int(said["B"]), int(said["D"])
    assert before[:7] == (SCALE_A, at_scale, strides[1], strides[0], 32, m, rows)
    assert before[21:24] == (A, at_a, m * 4096 // 2)
    assert after[21:24] == (at_out, OUT, m * 256)
    assert (said["A"], said["scale_B"], said["scale_A"], said["bias"]) == tuple(map(str, (B, at_scale, SCALE_B, BIAS)))
    assert SCRATCH + 1000 <= at_scale <= at_a - 32 * rows * 4
    assert at_a + rows * 4096 <= at_out == SCRATCH + launch.scratch_bytes - rows * 256 * 2
    assert any(line.endswith(f" 28 4096 {rows} 4096") for line in stub.lines("MatrixLayoutCreate"))


@pytest.mark.parametrize(("m", "strides"), RAGGED_ROWS)
def test_finished_leaves_the_last_rows_to_the_decode_kernel(stub, kernels, monkeypatch, m, strides):
    finished = []
    monkeypatch.setattr(ragged_mm, "plan_decode", lambda p: lambda *arguments: finished.append((p, arguments)))
    p = problem("group x block", m=m, scale_a_strides=strides, lda=4112, ldo=272, bias="bfloat16", stable_weight=True)
    call(plan_finished(p), bias=BIAS)
    head = m - m % 4
    said = fields(stub.lines("Matmul")[-1])
    ((_, _, arguments),) = kernels
    assert arguments[:7] == (SCALE_A, arguments[1], strides[1], strides[0], 32, head, head)
    assert (said["A"], said["B"], said["D"], said["bias"]) == tuple(map(str, (B, A, OUT, BIAS)))
    ((rest, given),) = finished
    assert rest == p._replace(m=m % 4, vectors_alignment=4)
    places = (A + head * 4112, B, SCALE_A + 4 * head * strides[0], SCALE_B, BIAS, OUT + head * 272 * 2)
    assert given == (STREAM, *places, 0, 0, 0)


def test_a_bias_that_was_moved_is_not_read_early():
    p = problem("group x block", m=67, bias="bfloat16", vectors_alignment=2, stable_weight=True)
    assert not ragged_mm.last_rows(p).stable_weight
    assert ragged_mm.last_rows(p._replace(bias="")).stable_weight


def test_rescaled_multiplies_into_scratch_and_finishes_there(stub, kernels):
    p = problem("mixed", out="float8_e4m3fn", out_scale=True, amax=True, bias="float32", ldo=272)
    launch = plan_rescaled(p)
    call(launch, bias=BIAS, out_scale=OUT_SCALE, amax=AMAX)
    said = fields(stub.lines("Matmul")[-1])
    assert (said["D"], said["scale_A"], said["scale_B"], said["bias"]) == (str(SCRATCH + 1024), "0", "0", "0")
    assert launch.scratch_bytes == 1024 + 64 * 256 * 4
    entry, stream, arguments = kernels[-1]
    assert (entry, stream) == ("rescale", STREAM)
    wanted = (SCRATCH + 1024, SCALE_A, 0, SCALE_B, 1, BIAS, OUT, 272, OUT_SCALE, AMAX)
    assert arguments[: len(wanted)] == wanted


# ---- the kernel that arranges

ARRANGED = [
    ("OUTER_VEC", (0, 0), (1, 1), 70, 256),
    ("OUTER_VEC", (3, 0), (70, 1), 70, 256),
    ("VEC128", (5, 1), (70, 5), 70, 640),
    ("VEC128", (7, 1), (70, 5), 70, 600),
    ("VEC128", (0, 0), (1, 1), 9, 128),
    ("BLK128x128", (5, 1), (3, 5), 300, 640),
    ("BLK128x128", (1, 3), (3, 5), 300, 640),
]


@pytest.mark.parametrize("target", [CUDA, HIP_64], ids=["cuda", "hip"])
@pytest.mark.parametrize(("mode", "strides", "shape", "rows", "k"), ARRANGED)
def test_arrange_scales_is_a_padded_strided_copy(emulator, target, mode, strides, shape, rows, k):
    blocks = -(-k // 128)
    place = arrangement(mode, strides, rows, k)
    storage = np.random.default_rng(1).standard_normal(1000, np.float32)
    matrix = np.lib.stride_tricks.as_strided(storage, shape, tuple(4 * s for s in strides))
    if mode == "OUTER_VEC":
        want = np.broadcast_to(matrix[:, :1], (rows, 1)).T
    elif mode == "VEC128":
        want = np.broadcast_to(matrix, (rows, blocks)).T
    else:
        want = np.pad(matrix, ((0, 0), (0, -blocks % 4)), constant_values=1)
    assert (place.rows, place.ld) == want.shape
    with emulator.watch() as memory:
        source, number = memory.array(storage), memory.array(np.float32([3.0]))
        out, reciprocal = memory.empty(want.shape, np.float32), memory.empty((1,), np.float32)
        arrange = plan_arrange(target, (NOTHING, place, NOTHING), halves=37)
        halves, copy = memory.array(np.arange(37, dtype=np.uint16), offset=2), memory.empty((37,), np.uint16)
        arrange(
            0,
            (0, source.ctypes.data, 0),
            (0, out.ctypes.data, 0),
            (halves.ctypes.data, copy.ctypes.data),
            (number.ctypes.data, reciprocal.ctypes.data),
        )
        assert (out == want).all()
        assert (copy == halves).all()
        assert reciprocal[0] == np.float32(1) / np.float32(3)


@pytest.mark.parametrize("target", [CUDA, HIP_64], ids=["cuda", "hip"])
@pytest.mark.parametrize(("count", "offset"), [(8, 0), (800, 0), (803, 0), (800, 2), (7, 0)])
def test_halves_are_copied_wherever_they_lie(emulator, target, count, offset):
    with emulator.watch() as memory:
        halves = memory.array(np.arange(count, dtype=np.uint16), offset=offset)
        copy = memory.empty((count,), np.uint16)
        arrange = plan_arrange(target, (NOTHING, NOTHING, NOTHING), halves=count)
        arrange(0, (0, 0, 0), (0, 0, 0), (halves.ctypes.data, copy.ctypes.data), (0, 0))
        assert (copy == halves).all()


def test_three_places_are_arranged_by_one_launch(emulator):
    storage = np.arange(100, dtype=np.float32)
    places = (Arrangement(0, 0, 1, 5, 8), Arrangement(1, 10, 4, 6, 6), Arrangement(0, 2, 1, 7, 7))
    with emulator.watch() as memory:
        source = memory.array(storage)
        outs = [memory.empty((place.rows, place.ld), np.float32) for place in places]
        arrange = plan_arrange(CUDA, places)
        arrange(0, (source.ctypes.data,) * 3, tuple(out.ctypes.data for out in outs), (0, 0), (0, 0))
        assert (outs[0] == [[0, 0, 0, 0, 0, 1, 1, 1]]).all()
        assert (outs[1] == storage[:60].reshape(6, 10)[:, :4].T).all()
        assert (outs[2] == storage[:14:2]).all()
    assert emulator.launches == ["arrange_scales"]


@pytest.mark.parametrize(
    ("mode", "strides", "rows", "k", "done"),
    [
        ("OUTER_VEC", (1, 0), 70, 256, True),
        ("OUTER_VEC", (9, 0), 1, 256, True),
        ("OUTER_VEC", (2, 0), 70, 256, False),
        ("VEC128", (1, 70), 70, 256, True),
        ("VEC128", (1, 0), 70, 128, True),
        ("VEC128", (1, 72), 70, 256, False),
        ("BLK128x128", (4, 1), 300, 512, True),
        ("BLK128x128", (5, 1), 300, 640, False),
        ("BLK128x128", (8, 1), 300, 640, False),
        ("SCALAR", (0, 0), 70, 256, True),
        ("SCALAR", (0, 0), 1, 16, True),
    ],
)
def test_scales_that_lie_as_wanted_are_left(mode, strides, rows, k, done):
    assert arrangement(mode, strides, rows, k).done is done
