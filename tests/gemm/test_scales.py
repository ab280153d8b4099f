"""Mixes of scales in the kernels of sm_90a: read as scales along k, by their strides, with the bits of those."""

import itertools

import pytest

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.gemm.scales import in_groups, is_along_k
from fp8core.kernels.gemm.sm90 import decode as sm90_decode
from fp8core.kernels.gemm.sm90 import decode_unaligned, tiled, tiled_choice, tiled_cost
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.example_problems import example_product
from fp8core.problem import BLOCK
from support.sm90_products import Case, problem
from support.targets import on

MIXES = [
    (a, b)
    for a, b in itertools.product(("tensor", "row", "group"), ("tensor", "row", "group", "block"))
    if (a == "group") != (b in ("group", "block"))
]


@pytest.mark.parametrize("modes", [*itertools.product(("tensor", "row", "group"), ("tensor", "row", "group", "block"))])
def test_scales_along_k_are_read_at_the_strides_that_they_have(modes):
    made = example_product(on(90), *modes)
    read = in_groups(made)
    assert (read.scale_a_strides, read.scale_b_strides) == (made.scale_a_strides, made.scale_b_strides)
    if not is_along_k(made):
        assert read == made
        return
    assert read.scale_a == "group"
    assert read.scale_b == {"tensor": "block", "row": "group"}.get(modes[1], modes[1])
    assert in_groups(read) == read


@pytest.mark.parametrize("modes", MIXES, ids="-".join)
@pytest.mark.parametrize("m", [1, 16, 33, 64, 65, 3000])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4095, 4096), (4096, 4095), (33, 80)])
def test_no_mix_of_scales_needs_a_fallback(m, n, k, modes):
    made = example_product(on(90), *modes, m=m, n=n, k=k)._replace(out_alignment=2)
    chosen = SCALED_MM.choice(made).kernel
    assert chosen in ("sm90_decode", "sm90_tiled", "sm90_decode_unaligned", "realigned")


@pytest.mark.parametrize("m", [1, 16, 64])
def test_a_mix_is_laid_out_as_the_scales_that_it_is_read_as(m):
    mixed, alike = (problem(m, 4096, 4096, scale_a=a, scale_b="block") for a in ("row", "group"))
    assert sm90_decode.config_for(mixed) == sm90_decode.config_for(alike)
    assert tiled_cost.us(mixed) == tiled_cost.us(alike)
    odd = {"k": 4095, "lda": 4095, "ldb": 4095}
    assert decode_unaligned.layout(mixed._replace(**odd)) == decode_unaligned.layout(alike._replace(**odd))


# ---- on the device


def spread(case):
    """Return the problem that a mix is read as, and scales with one for each row, or block, and k-block."""
    cp, p = case.cp, case.problem
    read, blocks = in_groups(p), -(-p.k // BLOCK)
    each = []
    for scale, rows in zip(case.scales, (p.m, -(-p.n // BLOCK) if read.scale_b == "block" else p.n), strict=True):
        tall = cp.repeat(scale, -(-rows // scale.shape[0]), 0)[:rows]
        each.append(cp.ascontiguousarray(cp.repeat(tall, -(-blocks // scale.shape[1]), 1)[:, :blocks]))
    return read._replace(scale_a_strides=(blocks, 1), scale_b_strides=(blocks, 1)), each


def check(case, plans):
    """Check plans of a problem against float64, and each one's bits against those with all scales written out."""
    cp, mixed, scales = case.cp, case.problem, case.scales
    for plan in plans:
        case.problem, case.scales = mixed, scales
        case.launch = lambda _, plan=plan: plan(case.problem)
        case.check()
        got = case.run()
        case.problem, case.scales = spread(case)
        assert bool((case.run() == got).all()), mixed
    cp.cuda.Device().synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("modes", MIXES, ids="-".join)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1000, 1024), (9, 333, 80), (33, 1001, 4096), (64, 520, 2000)])
def test_few_rows_with_any_mix_of_scales(m, n, k, modes):
    check(Case(m, n, k, modes, out=("bfloat16", "float32")[m % 2], seed=m + n), [sm90_decode.decode])


@pytest.mark.gpu
@pytest.mark.parametrize("modes", MIXES, ids="-".join)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1000, 80), (64, 333, 1024), (300, 1001, 2000), (1500, 2056, 384)])
def test_many_rows_with_any_mix_of_scales(m, n, k, modes):
    case = Case(m, n, k, modes, bias="float32", seed=m + n)
    some = tiled_choice.by_cost(case.problem)[:3]
    check(case, [lambda p, tile=tile: tiled.tiled(p, tile) for tile in some])


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block"), ("tensor", "group")], ids="-".join)
@pytest.mark.parametrize(("n", "ldo", "shift"), [(1000, 1000, 1), (1000, 1004, 2), (999, 1001, 1), (7, 7, 3)])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_tiles_store_results_at_any_of_their_elements(n, ldo, shift, out, modes):
    odd, even = (
        Case(200, n, 640, modes, out=out, ldo=row, shift=offset, fast=False, seed=n + shift)
        for row, offset in ((ldo, shift), (1008, 0))
    )
    assert tiled.SM90_TILED.refusal(odd.problem) is None
    assert odd.problem.out_alignment < 16
    for tile in tiled_choice.by_cost(odd.problem)[:4]:
        for case in (odd, even):
            case.launch = lambda _, tile=tile, case=case: tiled.tiled(case.problem, tile)
        odd.check()
        size = n * ITEMSIZE[out]
        assert bool((odd.run()[:, :size] == even.run()[:, :size]).all()), tile


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [*MIXES, ("row", "row"), ("group", "block")], ids="-".join)
@pytest.mark.parametrize(("m", "n", "k"), [(9, 150, 517), (64, 1003, 4100), (70, 150, 517), (300, 1001, 1003)])
def test_codes_and_results_at_any_address(m, n, k, modes):
    from gemm.test_generic_gpu import Operands

    out = ("bfloat16", "float16", "float32", "float8_e4m3fn")[(m + len(modes[0])) % 4]
    made = Operands((m, n, k), modes, (3, 1, 1), out, "float32", amax=m % 2 == 0, fast=False)
    choice = SCALED_MM.choice(made.problem)
    assert choice.kernel in ("sm90_decode_unaligned", "realigned")
    made.check(SCALED_MM.planned(made.problem, choice), 2.0**-10)


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "tensor"), ("tensor", "block")], ids="-".join)
@pytest.mark.parametrize(("m", "n", "k"), [(30, 333, 256), (174, 791, 80), (300, 1001, 520)])
def test_what_odd_rows_of_a_result_held_is_added(m, n, k, modes):
    case = Case(m, n, k, modes, out="float32", seed=m)
    cp = case.cp
    before = cp.random.default_rng(m).standard_normal((m, n), dtype=cp.float32)
    assert ITEMSIZE[case.out_name] == 4
    plain = case.run().view(cp.float32)
    case.problem = case.problem._replace(beta=0.5)
    choice = SCALED_MM.choice(case.problem)
    assert choice.kernel in ("sm90_decode", "sm90_tiled")
    storage = before.copy()
    scales = (scale.data.ptr for scale in case.scales)
    stream = cp.cuda.get_current_stream().ptr
    launch = SCALED_MM.planned(case.problem, choice)
    launch(stream, case.a.data.ptr, case.b.data.ptr, *scales, 0, storage.data.ptr, 0, 0, 0)
    want = case.want + 0.5 * before.astype(cp.float64)
    assert bool((abs(storage - want) <= 2.0**-10 * case.terms + 2.0**-23 * abs(want) + 1e-6).all())
    assert not bool((storage == plain).all())
