"""The quantization kernels' text on the CPU, bit for bit against the naive oracle."""

from unittest import mock

import numpy as np
import pytest

from fp8core.kernels.quantize import QUANTIZE, configs
from fp8core.problem import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, GroupShape, Quantize
from fp8core.runtime import jit, limits
from fp8core.target import Target
from support import reference
from support.emulation import CUDA, CUDA_80, HIP_32, HIP_64, EmulationError
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.quantizations import Case, run
from support.emulation.running import alignment, empty, matrix, plans, same_bytes

FN, FNUZ, E5M2, E5M2FNUZ = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"
PER_COLUMN = GroupShape(-1, 1)
HIP_90A = HIP_64._replace(arch=0x90A)


CASES = [
    Case(CUDA, "bfloat16", FN, PER_TENSOR, 19, 136),
    Case(CUDA, "float32", FN, PER_TENSOR, 3, 7),
    Case(CUDA, "float16", E5M2, PER_TENSOR, 33, 200, gap=8),
    Case(HIP_64, "bfloat16", FNUZ, PER_TENSOR, 19, 136, padded=32),
    Case(HIP_32, "float32", FN, PER_TENSOR, 1, 1),
    Case(CUDA, "bfloat16", FN, PER_TENSOR, 19, 136, static=True),
    Case(CUDA, "float32", E5M2FNUZ, PER_TENSOR, 9, 33, static=True, offset=4),
    Case(HIP_64, "float16", FNUZ, PER_TENSOR, 19, 136, static=True, padded=24),
    Case(CUDA, "bfloat16", FN, PER_TOKEN, 19, 136),
    Case(CUDA, "bfloat16", FN, PER_TOKEN, 300, 64),
    Case(CUDA, "float32", FN, PER_TOKEN, 11, 1031),
    Case(CUDA_80, "float16", FN, PER_TOKEN, 11, 2056, gap=16, padded=16),
    Case(CUDA, "bfloat16", FN, PER_TOKEN, 9, 4096, upper=(3.0, 2.5)),
    Case(CUDA, "bfloat16", FN, PER_TOKEN, 9, 40, upper=(2.0, float("inf"))),
    Case(CUDA, "bfloat16", FN, PER_TOKEN, 9, 264, offset=2),
    Case(HIP_64, "bfloat16", FNUZ, PER_TOKEN, 19, 136),
    Case(HIP_64, "bfloat16", FN, PER_TOKEN, 19, 2056),
    Case(HIP_90A, "float32", FN, PER_TOKEN, 9, 5),
    Case(HIP_32, "float16", E5M2, PER_TOKEN, 19, 136),
    Case(CUDA, "bfloat16", FN, PER_TOKEN, 9, 136, static=True),
    Case(CUDA, "bfloat16", FN, PER_TOKEN, 9, 136, scale_format="ue8m0"),
    Case(CUDA, "bfloat16", FN, GROUP_128, 9, 384),
    Case(CUDA, "bfloat16", FN, GROUP_128, 9, 384, scale_layout="mn", padded=12),
    Case(CUDA, "float32", FN, GROUP_128, 9, 200, scale_format="ue8m0"),
    Case(CUDA, "bfloat16", FN, GROUP_128, 300, 256, scale_format="ue8m0_bytes", scale_layout="mn"),
    Case(HIP_64, "bfloat16", FNUZ, GROUP_128, 9, 384, scale_layout="mn"),
    Case(HIP_64, "float16", E5M2FNUZ, GROUP_128, 9, 130, gap=6),
    Case(HIP_32, "bfloat16", FN, GROUP_128, 9, 384),
    Case(CUDA, "bfloat16", FN, GROUP_128, 9, 384, static=True),
    Case(CUDA, "bfloat16", FN, BLOCK_128, 200, 300),
    Case(CUDA, "bfloat16", FN, BLOCK_128, 9, 264, padded=13),
    Case(HIP_64, "float32", FNUZ, BLOCK_128, 130, 129),
    Case(HIP_32, "bfloat16", FN, BLOCK_128, 40, 256, scale_format="ue8m0"),
    Case(CUDA, "float16", FN, PER_COLUMN, 40, 70),
    Case(HIP_64, "bfloat16", FNUZ, PER_COLUMN, 9, 136),
    Case(CUDA, "bfloat16", FN, PER_COLUMN, 9, 136, static=True),
    Case(CUDA, "bfloat16", FN, GroupShape(3, 40), 10, 90),
    Case(HIP_32, "float32", FN, GroupShape(4, -1), 10, 90),
    Case(CUDA, "float32", FN, GroupShape(1, 1), 4, 9),
    Case(CUDA, "bfloat16", FN, GroupShape(1, 16384), 2, 16391, static=True),
    Case(CUDA, "bfloat16", FN, GroupShape(1, 512), 9, 1031),
    Case(CUDA, "float32", FN, GroupShape(1, 4096), 9, 1001),
    Case(CUDA, "bfloat16", FN, BLOCK_128, 200, 300, gap=4, more=8),
    Case(CUDA, "float32", FN, GroupShape(3, 40), 40, 131, gap=1, more=1),
    Case(HIP_64, "bfloat16", FNUZ, PER_TENSOR, 33, 200, gap=8, more=16),
    Case(CUDA, "bfloat16", FN, PER_TOKEN, 11, 1031, more=3),
]


def name_of(target: Target) -> str:
    return str(target).split()[0]


def name(case: Case) -> str:
    shape = f"{case.group_shape.rows}x{case.group_shape.cols}"
    extras = [str(v) for v in case[6:] if v and v not in ("float32", "k", (0.0, float("inf")))]
    return f"{str(case.target).split()[0]}-{case.x}-{case.data[7:]}-{shape}-{case.rows}x{case.cols}" + "".join(
        f"-{e}" for e in extras
    )


@pytest.fixture(params=["few", "shared", "many"])
def shapes(request, monkeypatch):
    """The shapes of tiles: for few rows, and for so many as would take too long here.

    "some" has kernels of its own where rows begin anywhere, and "shared" where they do not.
    """
    if request.param != "few":
        monkeypatch.setattr(configs, "FEW_ROWS", 0)
    if request.param in ("some", "many"):
        monkeypatch.setattr(configs, "SHARED_ROWS", 0)
    if request.param == "many":
        monkeypatch.setattr(configs, "FEW", 0)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_quantize_is_the_oracle_bit_for_bit(emulator, case, shapes):
    run(emulator, case)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("size", [2.0**-108, 2.0**-64, 2.0**64, 2.0**124])
@pytest.mark.parametrize("group_shape", [GROUP_128, BLOCK_128], ids=str)
def test_quotients_of_any_size_are_exact(emulator, group_shape, size, flush):
    """The remainder of a quotient is 2**-24 of it: where that is subnormal, the quick way to it is a wrong one."""
    emulator.flush_subnormals = flush
    for gap in (0, 3):
        run(emulator, Case(CUDA, "float32", FN, group_shape, 9, 384, gap=gap), special=False, eps=2.0**-114, size=size)


@pytest.mark.parametrize("target", [CUDA, HIP_64], ids=name_of)
def test_a_resident_grid_meets_again_and_again(emulator, target):
    """Matrices that three blocks hold or have to read again, with gaps and without, launch after launch."""
    small = target._replace(multiprocessors=3, shared_bytes=40_000 if target is CUDA else 65_536)
    case = Case(small, "bfloat16", FN, PER_TENSOR, 740, 512)
    for seed, (rows, gap) in enumerate([(740, 0), (280, 0), (740, 8), (740, 0), (280, 8)]):
        run(emulator, case._replace(rows=rows, gap=gap), seed, special=seed < 2)
    assert emulator.launches.count("quantize_tensorwise") == 5


@pytest.mark.parametrize(("rows", "cols", "x", "blocks"), [
    (2, 16384, "bfloat16", 1), (2, 16389, "bfloat16", 4), (17, 16389, "float32", 8), (17, 16392, "bfloat16", 2), (1, 32773, "bfloat16", 8),
    (2, 65533, "float16", 8),
])  # fmt: skip
def test_a_long_token_belongs_to_one_cluster(emulator, rows, cols, x, blocks):
    with mock.patch.object(jit, "prepare", wraps=emulator.prepare) as prepare:
        run(emulator, Case(CUDA, x, FN, PER_TOKEN, rows, cols, upper=(0.0, 2.5), gap=-cols % 8), rows)
    tokens = [call.kwargs for call in prepare.call_args_list if call.args[1] == "quantize/rowwise"]
    assert [launch["cluster"] for launch in tokens] == [blocks]


@pytest.mark.parametrize(("rows", "blocks"), [(3, 1), (7, 8), (14, 8), (30, 8), (60, 8), (120, 8)])
@pytest.mark.parametrize("x", ["bfloat16", "float32"])
def test_a_small_matrix_belongs_to_one_cluster(emulator, x, rows, blocks):
    case = Case(CUDA, x, FN, PER_TENSOR, rows, 1031)
    with mock.patch.object(jit, "prepare", wraps=emulator.prepare) as prepare:
        run(emulator, case, rows)
        run(emulator, case._replace(gap=9, padded=rows + 3), rows)
    tensor = [call.kwargs for call in prepare.call_args_list if call.args[1] == "quantize/tensorwise"]
    assert [launch["cluster"] for launch in tensor] == [blocks, blocks]


@pytest.mark.parametrize(("cols", "blocks"), [(4095, 1), (4096, 1), (4097, 8), (8191, 8), (8193, 8), (16391, 8)])
@pytest.mark.parametrize("x", ["bfloat16", "float32"])
def test_what_follows_the_last_vector_belongs_to_a_thread_that_has_none(emulator, x, cols, blocks):
    """Just below, at and above what the threads of a launch keep."""
    with mock.patch.object(jit, "prepare", wraps=emulator.prepare) as prepare:
        run(emulator, Case(CUDA, x, FN, PER_TENSOR, 1, cols), cols)
    tensor = [call.kwargs for call in prepare.call_args_list if call.args[1] == "quantize/tensorwise"]
    assert [launch["cluster"] for launch in tensor] == [blocks]


@pytest.mark.parametrize(("cols", "blocks"), [(1024, 1), (1032, 2), (2051, 2), (8192, 2), (8200, 4), (16384, 4)])
def test_a_token_of_a_few_dozen_belongs_to_a_cluster(emulator, cols, blocks):
    case = Case(CUDA, "bfloat16", FN, PER_TOKEN, 17, cols, gap=-cols % 8, padded=19, upper=(2.5, 3.0))
    with mock.patch.object(jit, "prepare", wraps=emulator.prepare) as prepare:
        run(emulator, case)
    tiles_ = [call.kwargs for call in prepare.call_args_list if call.args[1] == "quantize/rowwise"]
    assert [launch["cluster"] for launch in tiles_] == [blocks]


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[8], CASES[21]], ids=name)
def test_the_flushing_of_subnormals_changes_nothing(emulator, case, flush):
    emulator.flush_subnormals = flush
    run(emulator, case, special=False)
    run(emulator, case._replace(x="float32"), special=False)


@pytest.mark.parametrize("target", [HIP_64, HIP_32], ids=name_of)
@pytest.mark.parametrize(("given", "meant"), [(2.0**-127, 0.0), (2.0**127, np.inf), (-(2.0**127), -np.inf)])
def test_given_scales_and_reciprocals_below_the_normal_numbers_are_zero_on_amd(emulator, target, given, meant):
    x = np.array([[1.0, -1.0, 0.0, -0.0, np.inf, -np.inf, 3e38]], np.float32)
    want = reference.quantize(x, FN, PER_TENSOR, np.full((1, 1), meant, np.float32))
    with emulator.watch() as memory:
        source, data, scale = matrix(memory, x), empty(memory, x.shape, np.uint8), memory.array(np.float32([given]))
        problem = Quantize(target, "float32", FN, PER_TENSOR, True, "float32", "k", x.size, alignment(source, data))
        for kernel, launch in plans(QUANTIZE, problem):
            where = source.pointer, x.size, data.pointer, x.size, scale.ctypes.data, 0, 0
            launch(0, *where, 1, 1, 0, float("inf"), 1e-10)
            same_bytes(data.values, want.codes, kernel)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("case", [CASES[0], CASES[8], CASES[15], CASES[21], CASES[29]], ids=name)
def test_a_matrix_without_rows_or_of_zeros(emulator, case, rows):
    zeros = np.zeros((rows, 128), np.float32)
    want = reference.quantize(zeros, case.data, case.group_shape)
    with emulator.watch() as memory:
        source, data = matrix(memory, zeros), empty(memory, (rows, 128), np.uint8)
        shape = case.group_shape.scale_shape(rows, 128)
        scale = memory.empty(shape, np.float32)
        strides = [0 if extent == 1 else s // 4 for extent, s in zip(shape, scale.strides, strict=True)]
        problem = Quantize(case.target, "float32", case.data, case.group_shape, False, "float32", "k", 128, 16)
        for kernel, launch in plans(QUANTIZE, problem):
            launch(
                0,
                source.pointer,
                128,
                data.pointer,
                128,
                scale.ctypes.data,
                *strides,
                rows,
                rows,
                0,
                float("inf"),
                1e-10,
            )
            same_bytes(data.values, want.codes, f"{kernel}: data")
            same_bytes(scale, want.scale, f"{kernel}: scale")


@pytest.mark.parametrize("target", [CUDA, HIP_64, HIP_64._replace(arch=0x950), HIP_90A], ids=str)
@pytest.mark.parametrize("data", [FN, FNUZ, E5M2, E5M2FNUZ])
def test_every_half_precision_number_becomes_its_nearest_code(emulator, target, data):
    """All 65,536 patterns at scale 1: the conversions, by integers and as the AMD instructions are documented."""
    every = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(256, 256)
    want = reference.quantize(every, data, PER_TENSOR, np.ones((1, 1), np.float32))
    with emulator.watch() as memory:
        source, out = matrix(memory, every), empty(memory, every.shape, np.uint8)
        scale = memory.array(np.ones(1, np.float32))
        problem = Quantize(target, "float16", data, PER_TENSOR, True, "float32", "k", 256, 16)
        for kernel, launch in plans(QUANTIZE, problem):
            launch(0, source.pointer, 256, out.pointer, 256, scale.ctypes.data, 0, 0, 256, 256, 0, float("inf"), 1e-10)
            same_bytes(out.values, want.codes, kernel)


def test_a_kernel_that_lost_its_barriers_is_reported(emulator, monkeypatch):
    request = jit.compile_request

    def without_barriers(*arguments):
        asked = request(*arguments)
        return asked._replace(text=asked.text.replace(" block_barrier();", " ;"))

    monkeypatch.setattr(jit, "compile_request", without_barriers)
    with pytest.raises(EmulationError, match=r"race on shared|nobody wrote"):
        run(emulator, Case(CUDA, "bfloat16", FN, PER_TOKEN, 9, 4096))


@pytest.mark.parametrize(
    ("target", "x", "shapes"),
    [
        (CUDA, "bfloat16", "few"),
        (CUDA, "bfloat16", "many"),
        (CUDA, "float32", "some"),
        (HIP_64, "float32", "few"),
        (HIP_64, "float32", "many"),
        (HIP_64, "bfloat16", "some"),
    ],
    ids=lambda x: name_of(x) if isinstance(x, Target) else x,
    indirect=["shapes"],
)
@pytest.mark.parametrize(
    ("group_shape", "static"),
    [(PER_TENSOR, True), (PER_TOKEN, False), (GROUP_128, False), (GROUP_128, True), (BLOCK_128, False)],
    ids=str,
)
def test_rows_that_begin_anywhere(emulator, target, x, group_shape, static, shapes):
    """Rows as far apart as those of the codes, with and without gaps, and rows that lie otherwise.

    Each input is read on each platform, and in each shape of tiles, but not each on each in each.
    """
    step = 2 if x == "bfloat16" else 4
    lies = ((11, 333, 0, 0), (9, 260, 5, 0), (10, 129, 4, step), (3, 5, 2, 3 * step), (5, 1100, 3, step))
    for rows, cols, gap, offset in lies:
        run(emulator, Case(target, x, FN, group_shape, rows, cols, static, gap=gap, offset=offset, padded=rows + 1))
    run(emulator, Case(target, x, FN, group_shape, 2, 4600, static, gap=1))


@pytest.mark.parametrize("target", [CUDA, HIP_64], ids=name_of)
@pytest.mark.parametrize("gap", [4, 1])
@pytest.mark.parametrize(
    ("group_shape", "static", "rows", "cols"),
    [
        (PER_TOKEN, False, 9, 1100),
        (PER_TOKEN, True, 41, 1100),
        (GROUP_128, False, 41, 1100),
        (GROUP_128, True, 41, 1100),
        (BLOCK_128, False, 900, 44),
        (PER_COLUMN, False, 9, 300),
    ],
    ids=str,
)
def test_a_grid_s_axes_are_short(emulator, monkeypatch, target, gap, group_shape, static, rows, cols):
    """Rows beyond the blocks along y go on along z, and columns beyond them to the same blocks."""
    monkeypatch.setattr(limits, "BLOCKS_ALONG_YZ", 2)
    run(emulator, Case(target, "bfloat16", FN, group_shape, rows, cols, static, gap=gap, padded=rows + 1))


@pytest.mark.parametrize(
    ("x", "cols"), [("float16", 8), ("float32", 16), ("bfloat16", 32), ("float16", 64), ("float32", 256)]
)
def test_groups_of_every_team_begin_anywhere(emulator, x, cols):
    for rows, elements, gap, offset in ((9, 261, 0, 0), (3, 3 * cols - 1, 2, 4), (5, cols + 1, 1, 12)):
        case = Case(CUDA, x, E5M2, GroupShape(1, cols), rows, elements, gap=gap, offset=offset, padded=rows + 2)
        run(emulator, case._replace(scale_format="ue8m0" if rows == 5 else "float32"))
