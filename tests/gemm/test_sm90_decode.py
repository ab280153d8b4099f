"""The row "sm90_decode": its arithmetic anywhere, its products on an H100 or H200 against float64."""

import itertools
import math

import numpy as np
import pytest

from fp8core.kernels.gemm.blaslt.moves import NOTHING, plan_moves
from fp8core.kernels.gemm.sm90 import decode as sm90_decode
from fp8core.kernels.gemm.sm90 import decode_channels_config, decode_config, tensor_maps
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import ITEMSIZE, ScaledMm, Target
from fp8core.runtime import device, jit
from fp8core.table import Choice
from support.recorder import Recorder

H200 = Target("cuda", 90, 0, 132, 32, 227 << 10)
SHAPES = [
    (n, k)
    for n, k in (
        (64, 16),
        (100, 128),
        (2112, 7168),
        (1024, 4096),
        (4096, 4096),
        (6144, 4096),
        (4096, 14336),
        (8192, 8192),
        (28672, 4096),
        (7168, 16384),
        (7168, 256),
        (106496, 16384),
        (16384, 53248),
    )
]
CONFIGS = list(itertools.product(SHAPES, decode_config.WIDTHS, (0, 1, 128)))


def problem(m, n, k, **fields):
    basis = {
        "target": H200,
        "a": "float8_e4m3fn",
        "b": "float8_e4m3fn",
        "out": "bfloat16",
        "scale_a": "row",
        "scale_b": "row",
        "scale_a_strides": (1, 0),
        "scale_b_strides": (1, 0),
        "bias": "",
        "out_scale": False,
        "amax": False,
        "use_fast_accum": True,
        "batch_invariant": False,
        "lda": -(-k // 16) * 16,
        "ldb": -(-k // 16) * 16,
        "ldo": n,
        "alignment": 16,
        "prefetch_weight": True,
    }
    return ScaledMm(m=m, n=n, k=k, **{**basis, **fields})


@pytest.mark.parametrize("m", range(1, 65))
def test_the_narrow_side_holds_m_and_is_one_that_is_compiled(m):
    assert decode_config.width(m) in decode_config.WIDTHS
    assert m <= decode_config.width(m) < max(2 * m, 9)


@pytest.mark.parametrize(("shape", "side", "scale_rows"), CONFIGS)
def test_a_layout_covers_the_product_and_fits(shape, side, scale_rows):
    n, k = shape
    plan = decode_channels_config.cheapest(n, k, decode_channels_config.cost_model(side, scale_rows > 0), H200)
    tiles, chunks = -(-n // plan.tile), -(-k // decode_config.BLOCK_K)
    most = decode_config.CLUSTERS[plan.cluster] * plan.ctas_per_sm
    assert 1 <= plan.clusters <= min(-(-tiles // plan.multicast_tiles), most)
    assert plan.split_k <= chunks
    at_a_time = plan.clusters * plan.multicast_tiles
    covered = sorted(tile for first in range(at_a_time) for tile in range(first, tiles, at_a_time))
    assert covered == list(range(tiles))
    parts = [(chunks * r // plan.split_k, chunks * (r + 1) // plan.split_k) for r in range(plan.split_k)]
    assert parts[0][0] == 0
    assert parts[-1][1] == chunks
    assert all(one[1] == other[0] and one[0] < one[1] for one, other in itertools.pairwise(parts))
    assert 8 * plan.m_warpgroups % plan.split_k == 0
    assert side % (8 * plan.multicast_tiles) == 0
    depth = decode_config.stages(plan, side, scale_rows, H200)
    assert depth >= 2
    assert depth % plan.k_warpgroups == 0
    assert plan.a_stages % plan.k_warpgroups == 0
    asked = decode_config.dynamic_bytes(plan, side, scale_rows, depth, H200)
    assert decode_config.ring_bytes(plan, side, depth) <= asked
    block = asked + decode_config.fixed_bytes(plan, side, scale_rows, depth) + 1024
    assert plan.ctas_per_sm * block <= H200.shared_bytes + 1024
    assert plan.ctas_per_sm * depth * plan.tile * decode_config.BLOCK_K >= 80 << 10
    assert plan.prefetch_chunks < depth


@pytest.mark.parametrize(("shape", "side"), [*itertools.product(SHAPES, decode_config.WIDTHS)])
def test_small_weights_ask_for_little_before_the_predecessor_ends(shape, side):
    plan, bytes_ = (
        decode_channels_config.cheapest(*shape, decode_channels_config.cost_model(side, False), H200),
        shape[0] * shape[1],
    )
    if side <= 16:
        assert (plan.prefetch_chunks > 0) == (plan.ctas_per_sm > 1)
        assert plan.ctas_per_sm > 1 or bytes_ > 40e6
    else:
        assert (plan.prefetch_chunks > 0) == (bytes_ < 32e6)
        assert plan.multicast_tiles == 1 or bytes_ > 32e6
    assert plan.ctas_per_sm * plan.prefetch_chunks * plan.tile * decode_config.BLOCK_K <= 48 << 10


@pytest.mark.parametrize(("shape", "m"), [*itertools.product([*SHAPES, (3584, 4096)], (1, 16, 32, 64))])
def test_when_the_weight_is_read_changes_no_order_of_sums(shape, m):
    early, late = (sm90_decode.config_for(problem(m, *shape, prefetch_weight=stable)) for stable in (True, False))
    assert early._replace(ctas_per_sm=0, a_stages=0) == late._replace(ctas_per_sm=0, a_stages=0)
    assert late.ctas_per_sm <= early.ctas_per_sm
    assert late.clusters <= max(2, late.ctas_per_sm) * decode_config.CLUSTERS[late.split_k]
    assert decode_config.stages(late, decode_config.width(m), 0, H200) > late.prefetch_chunks


def test_smaller_devices_get_fewer_clusters():
    small = H200._replace(multiprocessors=114)
    assert all(decode_config.clusters_at_once(small)[blocks] * blocks <= 114 for blocks in decode_config.CLUSTERS)
    plan = decode_channels_config.cheapest(28672, 4096, decode_channels_config.cost_model(16, False), small)
    assert plan.clusters <= decode_config.clusters_at_once(small)[plan.split_k] * plan.ctas_per_sm


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"a": "float8_e4m3fnuz"}, "e4m3fn"),
        ({"scale_a": "group", "scale_b": "row"}, "1x128"),
        ({"alignment": 1, "codes_alignment": 8, "out_alignment": 16}, "a and b at addresses and in rows aligned to 16"),
        ({"alignment": 1, "codes_alignment": 16}, "divisible by the size of its elements, got bfloat16 aligned to 1"),
        ({"n": (1 << 31) - 5}, "needs m, n and k of at most 2147418112, got m=16 n=2147483643"),
        ({"k": 1 << 32}, "needs m, n and k of at most 2147418112"),
    ],
)
def test_it_says_what_it_cannot_do(fields, words):
    row = sm90_decode.SM90_DECODE
    assert row.refusal(problem(16, 4096, 4096)) is None
    assert words in row.refusal(problem(16, 4096, 4096)._replace(**fields))


@pytest.mark.parametrize(("n", "out"), [(4097, "bfloat16"), (4100, "float16"), (4097, "float32")])
@pytest.mark.parametrize("m", [1, 64])
def test_a_result_at_any_of_its_elements_is_its_own(m, n, out):
    made = problem(m, n, 4096, out=out, alignment=ITEMSIZE[out], codes_alignment=16, out_alignment=ITEMSIZE[out])
    assert SCALED_MM.choice(made) == Choice("sm90_decode")


@pytest.fixture
def asked(monkeypatch):
    """Return a list that gets the entry, the stream and the arguments of each launch."""
    found = []
    monkeypatch.setattr(jit, "prepare", lambda target, source, entry, *_, **__: Recorder(entry, found))
    monkeypatch.setattr(tensor_maps, "encode", lambda *geometry: repr(geometry).encode())
    return found


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("m", [16, 100])
def test_only_a_weight_that_may_be_is_prefetched(m, stable, asked):
    launch = sm90_decode.plan_decode(problem(m, 4096, 4096, prefetch_weight=stable))
    launch(7, *range(16, 160, 16))
    assert launch.prefetches_weight
    assert [arguments.prefetch_weight for _, _, arguments in asked] == [stable] * -(-m // 64)
    first = asked[0][2]
    assert (first.scale_a, first.scale_b, first.bias, first.out) == (48, 64, 80, 96)
    assert (first.weight_map[:3], first.a_map[:3]) == (b"(32", b"(16")


@pytest.mark.parametrize(("m", "invariant", "preferred"), [(64, False, True), (65, False, False), (1000, True, True)])
def test_it_runs_any_m_and_is_preferred_for_few_rows(m, invariant, preferred):
    row = sm90_decode.SM90_DECODE
    made = problem(m, 4096, 4096, batch_invariant=invariant)
    assert row.refusal(made) is None
    reservation = row.reservation(made)
    assert preferred == (reservation is None)
    assert preferred or f"preferred for m <= 64 or batch_invariant; got m={m}" in reservation


# ---- on the device

FORMATS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
MODES = [*itertools.product(("tensor", "row"), repeat=2), ("group", "block"), ("group", "group")]


def decode(codes, name):
    import ml_dtypes

    cp = device.cupy()
    return cp.asarray(np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float64))[codes]


def wide(storage, name):
    cp = device.cupy()
    if name == "bfloat16":
        return (storage.astype(cp.uint32) << 16).view(cp.float32).astype(cp.float64)
    return storage.view({"float16": cp.float16, "float32": cp.float32}[name]).astype(cp.float64)


def narrow(values, name):
    """Return fp32 numbers as the storage of a wide dtype, rounded by truncation: operands need no more."""
    cp = device.cupy()
    if name == "bfloat16":
        return (values.astype(cp.float32).view(cp.uint32) >> 16).astype(cp.uint16)
    return values.astype({"float16": cp.float16, "float32": cp.float32}[name])


class Case:
    """A product with fresh operands, and its result in float64."""

    kernel = sm90_decode.SM90_DECODE

    def __init__(
        self, m, n, k, modes=("row", "row"), *, a="e4m3", b="e4m3", out="bfloat16", bias="", gap=0, span=1.0,
        size=1.0, fast=True, invariant=False, seed=0, ldo=None, shift=0,
    ):  # fmt: skip
        cp = device.cupy()
        rng = cp.random.default_rng(seed)
        ld = -(-k // 16) * 16 + gap
        self.m, self.n, self.out_name, self.cp = m, n, out, cp
        limit = {"e4m3": 0x7E, "e5m2": 0x7B}

        def codes(rows, name):
            low = rng.integers(0, limit[name] - 40, (rows, ld), cp.int32)
            return (low | rng.integers(0, 2, (rows, ld), cp.int32) << 7).astype(cp.uint8)

        self.a, self.b = codes(m, a), codes(n, b)
        self.ldo, self.shift = ldo or n + (gap and 8), shift * ITEMSIZE[out]
        out_alignment = math.gcd(16, self.ldo * ITEMSIZE[out], self.shift)
        blocks = -(-k // 128)
        shapes = {"tensor": (1, 1), "row": (None, 1), "group": (None, blocks), "block": (-(-n // 128), blocks)}
        factors, self.scales, strides = [], [], []
        for rows, mode, usual in ((m, modes[0], span * size), (n, modes[1], 1 / span)):
            shape = tuple(rows if extent is None else extent for extent in shapes[mode])
            signs = cp.where(rng.random(shape) < 0.3, -1, 1)
            scale = ((rng.random(shape, dtype=cp.float32) + 0.5) * signs * usual).astype(cp.float32)
            scale = cp.asfortranarray(scale) if mode == "group" and seed % 2 else scale
            self.scales.append(scale)
            steps = zip(shape, scale.strides, strict=True)
            strides.append(tuple(0 if extent == 1 else step // 4 for extent, step in steps))
            repeats = (-(-rows // shape[0]) if mode != "block" else 128, -(-k // shape[1]) if shape[1] == 1 else 128)
            factors.append(cp.repeat(cp.repeat(scale.astype(cp.float64), repeats[0], 0), repeats[1], 1)[:rows, :k])
        self.bias = narrow((rng.random(n, dtype=cp.float32) - 0.5) * 100, bias) if bias else None
        x, w = decode(self.a, FORMATS[a])[:, :k] * factors[0], decode(self.b, FORMATS[b])[:, :k] * factors[1]
        self.want, self.terms = x @ w.T, abs(x) @ abs(w).T
        if self.bias is not None:
            self.want = self.want + wide(self.bias, bias)
        self.problem = problem(
            m, n, k, a=FORMATS[a], b=FORMATS[b], out=out, scale_a=modes[0], scale_b=modes[1],
            scale_a_strides=strides[0], scale_b_strides=strides[1], bias=bias, use_fast_accum=fast,
            batch_invariant=invariant, lda=ld, ldb=ld, ldo=self.ldo, target=device.target(0),
            alignment=out_alignment, codes_alignment=16, out_alignment=out_alignment,
        )  # fmt: skip

    def launch(self, plan):
        """Return what runs it, by a given layout if there is one."""
        assert self.kernel.refusal(self.problem) is None
        return sm90_decode.decode(self.problem, plan) if plan else self.kernel.plan(self.problem)

    def run(self, stream=None, plan=None):
        """Return the result's storage, poisoned before; by a given layout if there is one."""
        cp = self.cp
        row = self.ldo * ITEMSIZE[self.out_name]
        storage = cp.full(self.shift + self.m * row, 0xFF, cp.uint8)[self.shift :].reshape(self.m, row)
        at = cp.cuda.get_current_stream() if stream is None else stream
        bias = self.bias.data.ptr if self.bias is not None else 0
        scales = (scale.data.ptr for scale in self.scales)
        launch = self.launch(plan)
        launch(at.ptr, self.a.data.ptr, self.b.data.ptr, *scales, bias, storage.data.ptr, 0, 0, 0)
        return storage

    def check_a_written_weight(self):
        """Have kernels write the weight right before each launch."""
        self.problem = self.problem._replace(prefetch_weight=False)
        first, weight = self.run(), self.b.copy()
        for _ in range(20):
            self.b.fill(0)
            self.cp.copyto(self.b, weight)
            assert bool((self.run() == first).all())

    def check_a_weight_written_by_a_kernel_that_does_not_wait(self):
        """Have the weight written by a kernel of ours, which lets its dependents start at once, then launch twice.

        The second launch reads the weight early: it relies on the first one, which may not.
        """
        cp = self.cp
        want, weight = self.run(), self.b.copy()
        copy = plan_moves(self.problem.target, (NOTHING, NOTHING, NOTHING), self.b.nbytes // 2)
        launches = []
        for early in (False, True):
            self.problem = self.problem._replace(prefetch_weight=early)
            launches.append(self.launch(None))
        bias = self.bias.data.ptr if self.bias is not None else 0
        scales = [scale.data.ptr for scale in self.scales]
        stream = cp.cuda.get_current_stream().ptr
        results = [cp.empty_like(want) for _ in launches]
        for _ in range(30):
            for result in (*results, self.b):
                result.fill(0)
            copy(stream, (0, 0, 0), (0, 0, 0), (weight.data.ptr, self.b.data.ptr), (0, 0))
            for launch, result in zip(launches, results, strict=True):
                launch(stream, self.a.data.ptr, self.b.data.ptr, *scales, bias, result.data.ptr, 0, 0, 0)
            assert all(bool((result == want)[:, : self.n * ITEMSIZE[self.out_name]].all()) for result in results)

    def check(self, plan=None):
        """Assert that each number is near enough, and that what lies between the result's rows is untouched."""
        cp = self.cp
        storage = self.run(plan=plan)
        unit = {1: cp.uint8, 2: cp.uint16, 4: cp.uint32}[ITEMSIZE[self.out_name]]
        typed = storage.view(unit)
        got = wide(cp.ascontiguousarray(typed[:, : self.n]), self.out_name)
        allowed = HALF_UNIT[self.out_name] * abs(self.want) + OF_TERMS * self.terms
        far = ~(abs(got - self.want) <= allowed + SMALLEST[self.out_name])
        assert not bool(far.any()), f"{int(far.sum())} of {far.size} for {self.problem}"
        assert bool((typed[:, self.n :] == unit(-1 & ((1 << 8 * unit().itemsize) - 1))).all())


HALF_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Rounding of the result, relative to it."""
SMALLEST = {"bfloat16": 2.0**-126, "float16": 2.0**-25, "float32": 2.0**-126}
"""Below it the relative bound ends: kernels flush fp32's subnormals."""
OF_TERMS = 2.0**-10
"""The tensor cores cut off what lies 14 bits or so below the largest of 32 products: relative to the sum of sizes."""
SMALL = {"float16": 1e-3, "bfloat16": 1.0, "float32": 1.0}
"""float16 ends at 65504."""
ROWS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("m", ROWS)
def test_rows_and_modes(m, modes):
    Case(m, 1000 + 8 * m, 1024 + 16 * m, modes, gap=16 * (m % 3), seed=m // 4 + (m % 4 == 0)).check()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 7, 63, 64, 65, 127, 129, 1001, 8193])
@pytest.mark.parametrize("k", [1, 16, 100, 128, 129, 1000, 3000])
def test_ragged_shapes(n, k):
    for out, modes in (("float32", ("row", "row")), ("bfloat16", ("group", "block")), ("float16", ("tensor", "row"))):
        Case(5, n, k, modes, out=out, size=SMALL[out], seed=n + k).check()


OUTS = [(1000, 1000, 1), (1000, 1002, 0), (1000, 1004, 0), (1000, 1004, 2), (1000, 1008, 4), (999, 1001, 1)]
"""n, elements from row to row, and those before the first: rows at 2, 4 and 8 bytes."""


@pytest.mark.gpu
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("m", [5, 16, 40])
def test_rows_of_the_result_at_any_of_its_elements(m, out):
    for n, ldo, shift in OUTS:
        Case(m, n, 1500, out=out, ldo=ldo, shift=shift, seed=ldo).check()


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")])
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (512, 16384)])
def test_an_early_read_waits_for_what_the_launch_before_it_waited_for(n, k, modes):
    Case(8, n, k, modes, seed=6).check_a_weight_written_by_a_kernel_that_does_not_wait()


@pytest.mark.gpu
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", ["", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("a", "b"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_types(out, bias, a, b):
    modes = ("group", "block") if bias == "float32" else ("row", "row")
    Case(17, 520, 640, modes, a=a, b=b, out=out, bias=bias, size=SMALL[out], seed=3).check()


@pytest.mark.gpu
@pytest.mark.parametrize("span", [1e-23, 1e-15, 1e23])
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")])
def test_extreme_scales(span, modes):
    Case(6, 640, 1024, modes, span=span, seed=5).check()


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (6144, 4096), (28672, 1024), (7168, 16384), (512, 16384)])
@pytest.mark.parametrize("fast", [True, False])
def test_models_shapes(n, k, fast):
    for m, modes in ((1, ("row", "row")), (64, ("tensor", "tensor")), (16, ("group", "block"))):
        Case(m, n, k, modes, fast=fast, seed=m).check()


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (2112, 7168), (28672, 1024)])
def test_a_row_has_its_bits_whatever_the_batch(n, k, modes):
    case = Case(200, n, k, modes, invariant=True, seed=2)
    full = case.run()
    case.check()
    for m in (1, 5, 8, 9, 16, 31, 64, 65):
        case.problem, case.m = case.problem._replace(m=m), m
        assert bool((case.run() == full[:m]).all()), m


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")])
@pytest.mark.parametrize(("blocks", "tiles_together"), [(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("groups", [(1, 1), (1, 2), (2, 1)])
def test_blocks_that_share_what_they_load_of_a_give_the_same_bits(groups, blocks, tiles_together, modes):
    case = Case(64, 2600, 3000, modes, seed=4)  # tiles and chunks that no cluster divides
    for clusters in (1, 3):
        plan = decode_config.DecodeConfig(blocks, clusters, *groups, 1, 8, multicast_tiles=tiles_together)
        alone = decode_config.without_multicast(plan, case.n)
        assert alone.cluster == blocks
        assert bool((case.run(plan=plan) == case.run(plan=alone)).all()), clusters
    case.check()


def test_fewer_rows_than_mates_can_share_have_the_layout_without_them():
    for n, k in SHAPES:
        wide = sm90_decode.config_for(problem(64, n, k, batch_invariant=True))
        few = sm90_decode.config_for(problem(5, n, k, batch_invariant=True))
        assert few.multicast_tiles == 1
        assert few == (wide if wide.multicast_tiles == 1 else decode_config.without_multicast(wide, n))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1024, 16384])
def test_a_weight_that_the_kernel_before_wrote(k):
    Case(8, 8192, k, seed=9).check_a_written_weight()
