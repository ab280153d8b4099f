"""The text of the fused producers on the CPU: the unfused sequence, within what the order of a sum may change."""

import itertools

import numpy as np
import pytest

from fp8core.kernels.fused import NORM_QUANTIZE, SILU_QUANTIZE, rms_norm
from fp8core.problem import GROUP_128, PER_TENSOR, PER_TOKEN, GroupShape, NormQuantize, SiluQuantize
from fp8core.runtime import limits
from support import reference
from support.emulation import CUDA, HIP_32, HIP_64
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.running import FLOATS, alignment, empty, matrix, plans, teasing

FN, FNUZ = "float8_e4m3fn", "float8_e4m3fnuz"
EPSILON = 1e-6
SIX = CUDA._replace(multiprocessors=6)
"""Three long rows are shared by clusters."""


def step(codes: np.ndarray, dtype: str) -> np.ndarray:
    """Return the place of each code among the numbers of its format: neighbours differ by one."""
    order = np.argsort(np.nan_to_num(reference.decode(np.arange(256, dtype=np.uint8), dtype)), kind="stable")
    place = np.empty(256, np.int64)
    place[order] = np.arange(256)
    zeros = [code for code in (0x00, 0x80) if reference.value_of(code, dtype) == 0]
    place[zeros] = place[zeros[0]]
    return place[codes]


def near(kernel, results, values, dtype, rounded):
    """Assert that codes are the oracle's of ``values``, but for a few that lie on a tie; scales within 8 ulp."""
    codes, scale, given = results.data.values, results.seen, results.given
    group_shape, scale_format = results.group_shape, results.scale_format
    want = reference.quantize(values.astype(np.float32), dtype, group_shape, given, results.bound, scale_format)
    if given is None and scale_format == "float32":
        error = np.abs(scale / want.scale - 1)
        assert np.nanmax(error) <= (2.0**-7 if rounded else 8 * 2.0**-23), f"{kernel}: scales"
    elif given is None:
        steps = np.abs(
            scale.view(f"u{scale.itemsize}").astype(np.int64) - want.scale.view(f"u{scale.itemsize}").astype(np.int64)
        )
        assert (steps != 0).mean() <= 0.02, f"{kernel}: scales"
    away = np.abs(step(codes, dtype) - step(want.codes, dtype))
    same_scale = np.ones_like(away, bool)
    if given is None and scale_format != "float32":
        same_scale = reference.spread((scale == want.scale).astype(np.float32), group_shape, codes.shape) == 1
    assert away[same_scale].max() <= (2 if rounded else 1), f"{kernel}: codes"
    assert (away[same_scale] != 0).mean() <= (0.04 if rounded else 0.01), f"{kernel}: codes"


MODES = [
    (CUDA, "bfloat16", FN, PER_TOKEN, False, "float32", "k", False, 9, 136),
    (CUDA, "bfloat16", FN, PER_TENSOR, True, "float32", "k", True, 9, 136),
    (CUDA, "bfloat16", FN, PER_TENSOR, True, "float32", "k", False, 2000, 64),
    (CUDA, "float16", FN, GROUP_128, False, "float32", "mn", False, 9, 384),
    (CUDA, "float32", FN, GROUP_128, False, "ue8m0", "k", False, 9, 300),
    (CUDA, "bfloat16", FN, GROUP_128, False, "ue8m0_bytes", "mn", False, 9, 256),
    (
        CUDA,
        "bfloat16",
        FN,
        GROUP_128,
        False,
        "float32",
        "k",
        False,
        2,
        4104,
    ),  # two vectors a thread; the last group has one
    (CUDA, "bfloat16", "float8_e5m2", PER_TOKEN, False, "float32", "k", True, 5, 1000),
    (CUDA, "float32", FN, PER_TOKEN, False, "float32", "k", False, 3, 13000),
    (CUDA, "bfloat16", FN, PER_TOKEN, False, "float32", "k", False, 2, 6144),  # clusters, of whole parts of a row
    (CUDA, "float16", FN, PER_TOKEN, False, "ue8m0", "k", False, 1, 8200),  # and of others
    (CUDA, "bfloat16", FN, PER_TENSOR, True, "float32", "k", True, 2, 6152),
    (CUDA, "bfloat16", FN, GROUP_128, False, "float32", "mn", False, 2, 6144),
    (CUDA, "bfloat16", FN, PER_TOKEN, False, "float32", "k", False, 17, 1024),  # whole parts, of many rows
    (CUDA, "float32", FN, PER_TOKEN, False, "float32", "k", False, 2, 16389),  # read again for each pass
    (HIP_64, "float32", FNUZ, GROUP_128, False, "float32", "k", False, 2, 16388),
    (HIP_64, "bfloat16", FNUZ, GROUP_128, False, "float32", "k", False, 2, 4104),  # a second lane has the last scale
    (HIP_64, "float16", FNUZ, GroupShape(1, 32), False, "float32", "k", False, 9, 1024),
    (HIP_64, "bfloat16", FNUZ, PER_TOKEN, False, "float32", "k", False, 9, 136),
    (HIP_64, "bfloat16", FNUZ, GROUP_128, False, "float32", "k", False, 9, 384),
    (HIP_64, "bfloat16", FNUZ, PER_TOKEN, True, "float32", "k", False, 9, 136),
    (HIP_32, "float16", FN, GROUP_128, True, "float32", "k", False, 9, 384),
]
modes = pytest.mark.parametrize(
    ("target", "x", "data", "group_shape", "static", "scale_format", "layout", "rounded", "rows", "cols"),
    MODES,
    ids=lambda v: (
        str(v).removeprefix("float8_").split(" (")[0] if not isinstance(v, GroupShape) else f"{v.rows}x{v.cols}"
    ),
)


class Results:
    """Poisoned results of a producer, and the scale where it is given."""

    def __init__(self, memory, group_shape, static, scale_format, layout, rows, cols, gap, upper=(0.0, float("inf"))):
        on_device, in_arguments = upper
        self.group_shape, self.scale_format = group_shape, scale_format
        self.bound = min((b for b in upper if 0 < b < float("inf")), default=None)
        self.upper = memory.array(np.float32([on_device]))
        self.shape = group_shape.scale_shape(rows, cols)
        self.given = np.random.default_rng(9).uniform(0.01, 0.05, self.shape).astype(np.float32) if static else None
        self.data = empty(memory, (rows, cols), np.uint8, cols + gap)
        stored = self.shape[::-1] if layout == "mn" else self.shape
        self.scale = (
            memory.array(self.given)
            if static
            else memory.empty(stored, np.uint8 if scale_format == "ue8m0_bytes" else np.float32)
        )
        self.seen = self.scale.T if layout == "mn" else self.scale
        self.strides = [
            0 if extent == 1 else s // self.scale.itemsize
            for extent, s in zip(self.seen.shape, self.seen.strides, strict=True)
        ]
        self.arguments = (
            self.data.pointer,
            self.data.stride,
            self.scale.ctypes.data,
            *self.strides,
            rows,
            self.upper.ctypes.data if on_device else 0,
            in_arguments,
            1e-10,
        )


def round_to(values: np.ndarray, dtype: str, rounded: bool) -> np.ndarray:
    return values.astype(np.float32).astype(FLOATS[dtype]).astype(np.float64) if rounded else values


def check_norm(emulator, mode, with_residual, w, **bounds):
    """Launch a norm of ``mode`` with a weight of the dtype ``w``, and assert that it is the unfused sequence."""
    target, x, data, group_shape, static, scale_format, layout, rounded, rows, cols = mode
    given = teasing(rows, cols, x, 0, special=False)
    weight = np.random.default_rng(1).uniform(0.5, 1.5, cols).astype(FLOATS[w])
    other = teasing(rows, cols, x, 2, special=False)
    normed_from, updated = reference.add(given, other, rounded and static) if with_residual else (given, None)
    with emulator.watch() as memory:
        source, scaled_by = matrix(memory, given, cols + 8), memory.array(weight)
        residual = matrix(memory, other, cols + 16, writable=True) if with_residual else None
        results = Results(memory, group_shape, static, scale_format, layout, rows, cols, 16, **bounds)
        operands = [source, results.data, *([residual] if residual else [])]
        problem = NormQuantize(
            *(target, x, w, data, group_shape, static, scale_format, layout, with_residual, rounded, cols),
            min(alignment(*operands), 16 * given.itemsize // weight.itemsize),
        )
        for kernel, launch in plans(NORM_QUANTIZE, problem):
            held = (residual.pointer, residual.stride) if residual else (0, 0)
            launch(0, source.pointer, source.stride, *held, scaled_by.ctypes.data, EPSILON, *results.arguments)
            if residual:
                assert residual.values.tobytes() == updated.tobytes(), f"{kernel}: residual"
            normed = round_to(reference.rms_norm(normed_from, np.ones(cols), EPSILON), x, rounded)
            values = round_to(normed * weight.astype(np.float64), x, rounded)
            near(kernel, results, values, data, rounded)


@modes
@pytest.mark.parametrize("with_residual", [False, True])
def test_norm_then_quantize(
    emulator, target, x, data, group_shape, static, scale_format, layout, rounded, rows, cols, with_residual
):
    mode = target, x, data, group_shape, static, scale_format, layout, rounded, rows, cols
    check_norm(emulator, mode, with_residual, x)


@pytest.mark.parametrize(("x", "w"), tuple(itertools.permutations(FLOATS, 2)))
@pytest.mark.parametrize(("target", "data", "rows", "cols"), [(CUDA, FN, 2, 6144), (HIP_64, FNUZ, 9, 1000)], ids=str)
def test_a_weight_of_another_dtype(emulator, target, data, rows, cols, x, w):
    check_norm(emulator, (target, x, data, PER_TOKEN, False, "float32", "k", False, rows, cols), True, w)


def normed(memory, x, weight, residual, predicted, monkeypatch):
    """Return codes, scales and residual of a norm per token whose team foresees the largest value, or does not."""
    monkeypatch.setattr(rms_norm, "predicts_amax", lambda *_: predicted)
    rows, cols = x.shape
    source, added = matrix(memory, x), matrix(memory, residual, writable=True)
    results, scaled_by = Results(memory, PER_TOKEN, False, "float32", "k", rows, cols, 0), memory.array(weight)
    problem = NormQuantize(
        *(SIX, "bfloat16", "bfloat16", FN, PER_TOKEN, False, "float32", "k", True, False, cols),
        alignment(source, added, results.data),
    )
    ((_, launch),) = plans(NORM_QUANTIZE, problem)
    operands = source.pointer, source.stride, added.pointer, added.stride, scaled_by.ctypes.data
    launch(0, *operands, EPSILON, *results.arguments)
    return results.data.values.tobytes(), results.seen.tobytes(), added.values.tobytes()


@pytest.mark.parametrize(
    ("x_scale", "w_scale", "kind"),
    [
        (1, 1, "random"),
        (1, 1, "equal products"),
        (1, 1, "products that differ by an ulp"),
        (1, 1, "products whose values are in another order"),
        (2.0**-120, 1, "random"),
        (2.0**100, 1, "random"),
        (2.0**-100, 2.0**100, "random"),
        (1, 1, "zeros"),
        (1, 1, "NaN and infinities"),
    ],
)
@pytest.mark.parametrize(("rows", "cols"), [(40, 1000), (3, 6144)], ids=["block", "cluster"])
def test_a_largest_value_that_is_predicted_is_the_one_that_is_found(
    emulator, monkeypatch, x_scale, w_scale, kind, rows, cols
):
    random = np.random.default_rng(cols)
    x, residual = random.standard_normal((2, rows, cols)).astype(np.float32)
    weight = random.uniform(0.5, 1.5, cols).astype(np.float32)
    if kind == "equal products":
        residual[:] = 0.0
        for at, one in enumerate((225, 240, 216, 250, 200)):
            x[:, at::7], weight[at::7] = one, 54000 / one
    if kind == "products that differ by an ulp":
        x[:, ::7], residual[:, ::7], weight[::7] = 256.0, 2.0**-8, 128.0
        x[:, 3::7], residual[:, 3::7], weight[3::7] = 128.0, 2.0**-9, 256.0
        x[:, 5::7], residual[:, 5::7], weight[5::7] = 128.0, 2.0**-7, 256.0
    if kind == "products whose values are in another order":
        ones, wide = np.arange(128, 256) / 128, FLOATS["bfloat16"]
        h = (131 / ones).astype(wide).astype(np.float32)
        rest = (131 / ones - h).astype(wide).astype(np.float32)
        product, largest = (h + rest) * ones.astype(np.float32), np.float32(131 + 2.0**-16)
        near = np.flatnonzero((product < largest) & (product > largest * (1 - 2.0**-22)))
        near = np.array([np.flatnonzero(product == largest)[0], *near])
        at = np.arange(len(near)) * (cols // len(near))
        x *= np.linspace(0, 15, rows)[:, None]  # so that the factor differs
        x[:, at], residual[:, at], weight[at] = h[near], rest[near], ones[near]
    if kind == "zeros":
        x[:], residual[:] = 0.0, 0.0
    if kind == "NaN and infinities":
        x[0, 3], x[1, 4], residual[2, 5], weight[6] = np.nan, np.inf, -np.inf, np.nan
    wide = FLOATS["bfloat16"]
    given = (x * np.float32(x_scale)).astype(wide), (weight * np.float32(w_scale)).astype(wide)
    added = (residual * np.float32(x_scale)).astype(wide)
    with emulator.watch() as memory:
        found, predicted = (normed(memory, *given, added, way, monkeypatch) for way in (False, True))
    assert predicted == found
    if kind == "NaN and infinities":  # all values of these rows are NaN, or zeros beside NaN, so that their amax is 0
        assert (np.frombuffer(found[1], np.float32)[:3] == np.float32(1 / (448 * 512))).all()


@pytest.mark.parametrize(("target", "slack"), [(CUDA, 0), (HIP_64, 2)], ids=str)
def test_rounded_activations_of_float16_are_those_of_the_formula(emulator, target, slack):
    """Ups put the products all over the codes, so that the last place of an activation decides some."""
    gate, activated = reference.gates_near_ties(slack)
    up = (np.linspace(1, 2, 256)[None] * np.exp2(-np.floor(np.log2(np.abs(activated.astype(float)))))[:, None]).clip(
        0, 32768
    )
    x = np.concatenate([np.broadcast_to(gate[:, None], up.shape), up.astype(np.float16)], axis=1)
    product = (activated.astype(np.float32)[:, None] * x[:, 256:].astype(np.float32)).astype(np.float16)
    with emulator.watch() as memory:
        source, results = matrix(memory, x), Results(memory, PER_TENSOR, True, "float32", "k", len(gate), 256, 16)
        problem = SiluQuantize(target, "float16", FN, PER_TENSOR, True, "float32", "k", True, 256, 16)
        for kernel, launch in plans(SILU_QUANTIZE, problem):
            launch(0, source.pointer, source.stride, *results.arguments)
            want = reference.quantize(product, FN, PER_TENSOR, results.given).codes
            assert results.data.values.tobytes() == want.tobytes(), kernel


def check_silu(emulator, mode, **bounds):
    """Launch SiLU times up of ``mode``, and assert that it is the unfused sequence."""
    target, x, data, group_shape, static, scale_format, layout, rounded, rows, cols = mode
    given = teasing(rows, 2 * cols, x, 0, special=False)
    gate, up = given[:, :cols], given[:, cols:]
    activated = round_to(reference.silu(gate), x, rounded)
    with np.errstate(over="ignore"):
        values = round_to(activated * up.astype(np.float64), x, rounded)
    with emulator.watch() as memory:
        source = matrix(memory, given, 2 * cols + 8)
        results = Results(memory, group_shape, static, scale_format, layout, rows, cols, 16, **bounds)
        aligned = alignment(source, results.data)
        while cols * source.buffer.itemsize % aligned:
            aligned //= 2
        problem = SiluQuantize(target, x, data, group_shape, static, scale_format, layout, rounded, cols, aligned)
        for kernel, launch in plans(SILU_QUANTIZE, problem):
            launch(0, source.pointer, source.stride, *results.arguments)
            near(kernel, results, values, data, rounded)


@modes
def test_silu_and_mul_then_quantize(
    emulator, target, x, data, group_shape, static, scale_format, layout, rounded, rows, cols
):
    check_silu(emulator, (target, x, data, group_shape, static, scale_format, layout, rounded, rows, cols))


@pytest.mark.parametrize("group_shape", [PER_TOKEN, GROUP_128], ids=str)
def test_rows_beyond_the_blocks_along_y_go_on_along_z(emulator, monkeypatch, group_shape):
    monkeypatch.setattr(limits, "BLOCKS_ALONG_YZ", 2)
    check_silu(emulator, (CUDA, "bfloat16", FN, group_shape, False, "float32", "k", False, 9, 1160))


@pytest.mark.parametrize("upper", [(0.0, 0.5), (0.25, float("inf")), (0.5, 0.25)])
@pytest.mark.parametrize(("target", "data", "rows", "cols"), [(CUDA, FN, 2, 6144), (HIP_64, FNUZ, 9, 1000)], ids=str)
def test_a_bound_of_amax_cuts_the_scale(emulator, target, data, rows, cols, upper):
    mode = (target, "bfloat16", data, PER_TOKEN, False, "float32", "k", False, rows, cols)
    check_norm(emulator, mode, True, "bfloat16", upper=upper)
    check_silu(emulator, mode, upper=upper)
