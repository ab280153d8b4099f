"""The row "sm90_decode": its layouts, which problems it takes, and what it launches."""

import itertools

import pytest

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.gemm.sm90 import decode as sm90_decode
from fp8core.kernels.gemm.sm90 import decode_channels_config, decode_config
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.table import Choice
from support.sm90_products import asked, problem  # noqa: F401
from support.targets import H200

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
    assert plan.prefetch_k_blocks < depth


@pytest.mark.parametrize(("shape", "side"), [*itertools.product(SHAPES, decode_config.WIDTHS)])
def test_small_weights_ask_for_little_before_the_predecessor_ends(shape, side):
    plan, bytes_ = (
        decode_channels_config.cheapest(*shape, decode_channels_config.cost_model(side, False), H200),
        shape[0] * shape[1],
    )
    if side <= 16:
        assert (plan.prefetch_k_blocks > 0) == (plan.ctas_per_sm > 1)
        assert plan.ctas_per_sm > 1 or bytes_ > 40e6
    else:
        assert (plan.prefetch_k_blocks > 0) == (bytes_ < 32e6)
        assert plan.multicast_tiles == 1 or bytes_ > 32e6
    assert plan.ctas_per_sm * plan.prefetch_k_blocks * plan.tile * decode_config.BLOCK_K <= 48 << 10


@pytest.mark.parametrize(("shape", "m"), [*itertools.product([*SHAPES, (3584, 4096)], (1, 16, 32, 64))])
def test_when_the_weight_is_read_changes_no_order_of_sums(shape, m):
    early, late = (sm90_decode.config_for(problem(m, *shape, prefetch_weight=stable)) for stable in (True, False))
    assert early._replace(ctas_per_sm=0, a_stages=0) == late._replace(ctas_per_sm=0, a_stages=0)
    assert late.ctas_per_sm <= early.ctas_per_sm
    assert late.clusters <= max(2, late.ctas_per_sm) * decode_config.CLUSTERS[late.split_k]
    assert decode_config.stages(late, decode_config.width(m), 0, H200) > late.prefetch_k_blocks


def test_smaller_devices_get_fewer_clusters():
    small = H200._replace(multiprocessors=114)
    assert all(decode_config.clusters_at_once(small)[blocks] * blocks <= 114 for blocks in decode_config.CLUSTERS)
    plan = decode_channels_config.cheapest(28672, 4096, decode_channels_config.cost_model(16, False), small)
    assert plan.clusters <= decode_config.clusters_at_once(small)[plan.split_k] * plan.ctas_per_sm


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"a": "float8_e4m3fnuz"}, "e4m3fn"),
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
    assert sm90_decode.SM90_DECODE.refusal(made) is None
    assert SCALED_MM.choice(made) in (Choice("sm90_decode"), Choice("sm90_tiled"))


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


def test_fewer_rows_than_mates_can_share_have_the_layout_without_them():
    for n, k in SHAPES:
        wide = sm90_decode.config_for(problem(64, n, k, batch_invariant=True))
        few = sm90_decode.config_for(problem(5, n, k, batch_invariant=True))
        assert few.multicast_tiles == 1
        assert few == (wide if wide.multicast_tiles == 1 else decode_config.without_multicast(wide, n))
