"""What the rows that prepare a library's product launch beside it, and the kernel that arranges scales."""

from unittest import mock

import numpy as np
import pytest

from fp8core.kernels.encodings import scratch_part
from fp8core.kernels.gemm.blaslt import split_m
from fp8core.kernels.gemm.blaslt.epilogue import plan_end, plan_epilogue
from fp8core.kernels.gemm.blaslt.mapping import accumulation, product
from fp8core.kernels.gemm.blaslt.moves import NOTHING, Relayout, plan_moves, relayout_of
from fp8core.kernels.gemm.blaslt.pad_m import plan_pad_m
from fp8core.kernels.gemm.blaslt.relayout import plan_relayout
from fp8core.kernels.gemm.blaslt.rows import plan_direct
from fp8core.kernels.gemm.blaslt.split_m import plan_split_m
from fp8core.runtime import jit
from support.blaslt_fixtures import built, stub  # noqa: F401
from support.blaslt_tools import problem
from support.emulation import CUDA, HIP_64
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.recorder import Recorder
from support.targets import H200


@pytest.fixture
def kernels(monkeypatch):
    """Record the launches of the package's own kernels: entry, grid, arguments."""
    launched = []

    def prepare(target, source, entry, constants, signature, **_):
        return Recorder(entry, launched)

    monkeypatch.setattr(jit, "prepare", prepare)
    return launched


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


@pytest.mark.parametrize("plan", [plan_direct, plan_relayout, plan_epilogue])
@pytest.mark.parametrize("number", [0, 1])
def test_the_library_is_called_with_the_algorithm_of_the_number(stub, kernels, plan, number):
    stub.offers(2)
    call(plan(problem("row"), number))
    assert fields(stub.lines("Matmul")[-1])["algorithm"] == str(number + 1)


def test_arranged_expands_a_scalar_and_takes_the_other_as_it_is(stub, kernels):
    launch = plan_relayout(problem("mixed"))
    call(launch)
    ((entry, stream, arguments),) = kernels
    assert (entry, stream) == ("relayout", STREAM)
    assert arguments[:7] == (SCALE_A, SCRATCH + 1024, 0, 0, 1, 64, 64)
    assert arguments[9:14] == NOTHING
    assert arguments[16:18] == (0, 0)
    said = fields(stub.lines("Matmul")[-1])
    assert (said["scale_B"], said["scale_A"]) == (str(SCRATCH + 1024), str(SCALE_B))
    assert launch.scratch_bytes == 1024 + 256


def test_arranged_transposes_groups_and_pads_blocks(stub, kernels):
    p = problem("group x block", k=4224, lda=4224, ldb=4224, scale_a_strides=(33, 1), scale_b_strides=(33, 1))
    launch = plan_relayout(p)
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
    launch = plan_relayout(problem(out="float8_e4m3fn", out_scale=True, amax=True))
    call(launch, out_scale=OUT_SCALE, amax=AMAX)
    ((_, _, arguments),) = kernels
    assert arguments[-2:] == (OUT_SCALE, SCRATCH + 1024)
    said = fields(stub.lines("Matmul")[-1])
    assert (said["scale_A"], said["scale_B"]) == (str(SCALE_B), str(SCALE_A))
    assert (said["scale_D"], said["amax"]) == (str(SCRATCH + 1024), str(AMAX))
    assert launch.scratch_bytes == 1024 + 256


def test_arranged_moves_vectors_to_aligned_addresses(stub, kernels):
    launch = plan_relayout(problem(bias="bfloat16", vectors_alignment=2))
    call(launch, bias=BIAS)
    at_a, at_b, at_bias = (SCRATCH + 1024 + step for step in (0, 256, 512))
    ((_, _, arguments),) = kernels
    assert arguments[:7] == (SCALE_A, at_a, 0, 0, 1, 1, 1)
    assert arguments[7:14] == (SCALE_B, at_b, 0, 0, 1, 1, 1)
    assert arguments[14:17] == (BIAS, at_bias, 256)
    said = fields(stub.lines("Matmul")[-1])
    assert (said["scale_B"], said["scale_A"], said["bias"]) == (str(at_a), str(at_b), str(at_bias))
    assert launch.scratch_bytes == at_bias + 512 - SCRATCH


RAGGED_ROWS = [(67, (1, 67)), (67, (32, 1)), (5, (40, 1))]
GAPS = {"k": 4224, "scale_a_strides": (1, 67), "scale_b_strides": (33, 1)}
"""33 scales in a row of scale_b, of which the library takes a multiple of four."""


@pytest.mark.parametrize(("m", "strides"), RAGGED_ROWS)
def test_padded_multiplies_a_copy_into_a_copy(stub, kernels, m, strides):
    launch = plan_pad_m(problem("group x block", m=m, scale_a_strides=strides, bias="bfloat16"))
    call(launch, bias=BIAS)
    rows = -(-m // 4) * 4
    said = fields(stub.lines("Matmul")[-1])
    (_, _, before), (_, _, after) = kernels
    at_scale, at_a, at_out = before[1], int(said["B"]), int(said["D"])
    assert before[:7] == (SCALE_A, at_scale, strides[1], strides[0], 32, m, rows)
    assert before[14:17] == (A, at_a, m * 4096 // 2)
    assert after[14:17] == (at_out, OUT, m * 256)
    assert (said["A"], said["scale_B"], said["scale_A"], said["bias"]) == tuple(map(str, (B, at_scale, SCALE_B, BIAS)))
    assert SCRATCH + 1000 <= at_scale <= at_a - 32 * rows * 4
    assert at_a + rows * 4096 <= at_out == SCRATCH + launch.scratch_bytes - rows * 256 * 2
    assert any(line.endswith(f" 28 4096 {rows} 4096") for line in stub.lines("MatrixLayoutCreate"))


def test_padded_moves_scales_that_the_library_does_not_take_as_they_are(stub, kernels):
    launch = plan_pad_m(problem("group x block", m=67, **GAPS, lda=4224, ldb=4224))
    call(launch)
    at_a, at_b = SCRATCH + 1024, SCRATCH + 1024 + scratch_part(33 * 68 * 4)
    (_, _, before), _ = kernels
    assert before[:7] == (SCALE_A, at_a, 67, 1, 33, 67, 68)
    assert before[7:14] == (SCALE_B, at_b, 33, 1, 2, 33, 36)
    assert before[15] == at_b + 512
    said = fields(stub.lines("Matmul")[-1])
    assert (said["scale_B"], said["scale_A"], said["B"]) == (str(at_a), str(at_b), str(at_b + 512))


@pytest.mark.parametrize(("m", "strides"), RAGGED_ROWS)
def test_finished_leaves_the_last_rows_to_the_decode_kernel(stub, kernels, monkeypatch, m, strides):
    finished = []
    monkeypatch.setattr(split_m, "decode", lambda p: lambda *arguments: finished.append((p, arguments)))
    p = problem("group x block", m=m, scale_a_strides=strides, lda=4112, ldo=272, bias="bfloat16", prefetch_weight=True)
    launch = plan_split_m(p)
    call(launch, bias=BIAS)
    assert launch.prefetches_weight
    head = m - m % 4
    said = fields(stub.lines("Matmul")[-1])
    ((_, _, arguments),) = kernels
    assert arguments[:7] == (SCALE_A, arguments[1], strides[1], strides[0], 32, head, head)
    assert (said["A"], said["B"], said["D"], said["bias"]) == tuple(map(str, (B, A, OUT, BIAS)))
    assert said["scale_A"] == str(SCALE_B)
    ((rest, given),) = finished
    assert rest == p._replace(m=m % 4, vectors_alignment=4, scale_a_alignment=4)
    places = (A + head * 4112, B, SCALE_A + 4 * head * strides[0], SCALE_B, BIAS, OUT + head * 272 * 2)
    assert given == (STREAM, *places, 0, 0, 0)


def test_finished_moves_what_the_library_does_not_take_as_it_is(stub, kernels, monkeypatch):
    finished = []
    monkeypatch.setattr(split_m, "decode", lambda p: lambda *arguments: finished.append(arguments))
    rows = {"m": 67, "lda": 4224, "ldb": 4224, "ldo": 272}
    launch = plan_split_m(problem("group x block", **rows, **GAPS, out="float32", bias="bfloat16", vectors_alignment=2))
    call(launch, bias=BIAS)
    at_a, at_b = SCRATCH + 1024, SCRATCH + 1024 + 33 * 64 * 4
    at_bias = at_b + 512
    ((_, _, arguments),) = kernels
    assert arguments[:7] == (SCALE_A, at_a, 67, 1, 33, 64, 64)
    assert arguments[7:14] == (SCALE_B, at_b, 33, 1, 2, 33, 36)
    assert arguments[14:17] == (BIAS, at_bias, 256)
    said = fields(stub.lines("Matmul")[-1])
    assert (said["scale_B"], said["scale_A"], said["bias"]) == (str(at_a), str(at_b), str(at_bias))
    places = (A + 64 * 4224, B, SCALE_A + 4 * 64, SCALE_B, at_bias, OUT + 64 * 272 * 4)
    assert finished == [(STREAM, *places, 0, 0, 0)]
    assert launch.scratch_bytes == at_bias + 512 - SCRATCH


def test_a_bias_that_was_moved_is_not_read_early():
    p = problem("group x block", m=67, bias="bfloat16", vectors_alignment=2, prefetch_weight=True)
    assert not split_m.last_rows(p).prefetch_weight
    assert split_m.last_rows(p._replace(bias="")).prefetch_weight


def test_rescaled_multiplies_into_scratch_and_finishes_there(stub, kernels):
    p = problem("mixed", out="float8_e4m3fn", out_scale=True, amax=True, bias="float32", ldo=272)
    launch = plan_epilogue(p)
    call(launch, bias=BIAS, out_scale=OUT_SCALE, amax=AMAX)
    said = fields(stub.lines("Matmul")[-1])
    assert (said["D"], said["scale_A"], said["scale_B"], said["bias"]) == (str(SCRATCH + 1024), "0", "0", "0")
    assert launch.scratch_bytes == 1024 + 64 * 256 * 4
    cleared, (entry, stream, arguments) = kernels
    assert cleared == ("clear_amax", STREAM, (AMAX,))
    assert (entry, stream) == ("apply_epilogue", STREAM)
    wanted = (SCRATCH + 1024, SCALE_A, 0, SCALE_B, 1, BIAS, OUT, 272, OUT_SCALE, AMAX)
    assert arguments[: len(wanted)] == wanted


def test_the_product_before_an_epilogue_has_nothing_of_the_end():
    end = {"out_scale": True, "amax": True, "bias": "float32", "activation": "silu", "beta": 2.0, "ldo": 272}
    bare = accumulation(problem("mixed", out="float8_e4m3fn", **end))
    assert bare == product(problem(out="float32"))._replace(scales="unit")


@pytest.mark.parametrize(
    ("p", "told"),
    [
        (problem("row"), {"fast_accum": True, "gelu": False, "beta": 0.0, "alignment": 16}),
        (problem("row", use_fast_accum=False), {"fast_accum": False}),
        (problem("group x group"), {"fast_accum": False}),
        (problem("row", activation="gelu_tanh", beta=2.0), {"gelu": True, "beta": 2.0}),
        (problem("row", alignment=8), {"alignment": 8}),
    ],
)
def test_what_the_library_is_told_of_a_product(p, told):
    assert told.items() <= product(p)._asdict().items()


def test_nothing_is_cleared_without_an_amax(stub, kernels):
    call(plan_epilogue(problem("mixed")))
    assert [entry for entry, _, _ in kernels] == ["apply_epilogue"]


@pytest.mark.parametrize(("m", "n", "blocks"), [(3, 256, 3), (1 << 20, 256, 132 * 16), (3, 1 << 22, 4096)])
def test_an_epilogue_has_blocks_for_all_channels_and_rows_that_run_at_once(m, n, blocks):
    with mock.patch.object(jit, "prepare") as prepare:
        plan_end(problem(m=m, n=n, ldo=n))
    assert prepare.return_value.bind_args.call_args.args[0] == (blocks, 1, 1)


@pytest.mark.parametrize(("halves", "blocks"), [(0, 1), (1024, 1), (1025, 2), (1 << 30, 132 * 8)])
def test_one_launch_moves_everything_with_a_block_at_least_for_a_number_alone(halves, blocks):
    with mock.patch.object(jit, "prepare") as prepare:
        plan_moves(H200, (NOTHING, NOTHING), halves)
    assert prepare.return_value.bind_args.call_args.args[0] == (blocks, 1, 1)


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
    place = relayout_of(mode, strides, rows, k)
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
        arrange = plan_moves(target, (NOTHING, place), halves=37)
        halves, copy = memory.array(np.arange(37, dtype=np.uint16), offset=2), memory.empty((37,), np.uint16)
        arrange(
            0,
            (0, source.ctypes.data),
            (0, out.ctypes.data),
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
        arrange = plan_moves(target, (NOTHING, NOTHING), halves=count)
        arrange(0, (0, 0), (0, 0), (halves.ctypes.data, copy.ctypes.data), (0, 0))
        assert (copy == halves).all()


def test_both_places_are_arranged_by_one_launch(emulator):
    storage = np.arange(100, dtype=np.float32)
    places = (Relayout(0, 0, 1, 5, 8), Relayout(1, 10, 4, 6, 6))
    with emulator.watch() as memory:
        source = memory.array(storage)
        outs = [memory.empty((place.rows, place.ld), np.float32) for place in places]
        arrange = plan_moves(CUDA, places)
        arrange(0, (source.ctypes.data,) * 2, tuple(out.ctypes.data for out in outs), (0, 0), (0, 0))
        assert (outs[0] == [[0, 0, 0, 0, 0, 1, 1, 1]]).all()
        assert (outs[1] == storage[:60].reshape(6, 10)[:, :4].T).all()
    assert emulator.launches == ["relayout"]


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
    assert relayout_of(mode, strides, rows, k).done is done
