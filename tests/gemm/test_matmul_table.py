"""The table of products as a whole: what several of its rows have in common."""

from itertools import product

import pytest

from fp8core.kernels.gemm.generic import GENERIC_DECODE, GENERIC_MMA
from fp8core.kernels.gemm.generic import HOST as ON_HOST
from fp8core.kernels.gemm.realigned import copies_codes, copies_out, inner, rest
from fp8core.kernels.gemm.requirements import MOST_COUNTED
from fp8core.kernels.gemm.sm90.decode import SM90_DECODE
from fp8core.kernels.gemm.sm90.tiled import SM90_TILED
from fp8core.kernels.gemm.table import COPIES, SCALED_MM
from fp8core.ops.example_problems import example_product
from fp8core.table import Unknown
from fp8core.target import HOST
from support.targets import TARGETS, on

SCALES = (("tensor", "tensor"), ("row", "row"), ("group", "block"), ("group", "group"))
DECODE_ROWS = (("sm90_decode", 90, 64), ("sm89_decode", 89, 64), ("sm89_decode", 120, 64), ("gfx9_decode", 0x942, 16))
"""A row of the table for few rows of a, an architecture that has it, and how many rows it is preferred for."""


@pytest.mark.parametrize("scales", SCALES, ids="-".join)
@pytest.mark.parametrize("target", [*TARGETS, HOST], ids=str)
def test_no_row_takes_scales_of_another_dtype(target, scales):
    """A kernel would read bytes as fp32: a row that takes another dtype has to say so."""
    problem = example_product(target, *scales, m=16)
    other = problem._replace(scale_dtype="float8_e8m0fnu")
    able = [row for row in SCALED_MM.kernels if row.refusal(problem) is None]
    assert able
    for row in able:
        assert row.refusal(other) == "takes scales of float32, got float8_e8m0fnu", row.name
    for row in SCALED_MM.kernels:
        refusal = row.refusal(other)
        assert refusal is not None, row.name
        assert not isinstance(refusal, Unknown), row.name


@pytest.mark.parametrize("extent", ["m", "n", "k"])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_no_kernel_takes_extents_past_which_it_cannot_count(target, extent):
    """Some count in 32 bits to the end of their last tile: past 2**31 results would be written anywhere."""
    sizes = {"m": 1, "n": 16, "k": 16, extent: MOST_COUNTED}
    counted = example_product(target, "row", "row", **sizes)
    past = example_product(target, "row", "row", **sizes | {extent: MOST_COUNTED + 16})
    reasons = {row: row.refusal(counted) for row in SCALED_MM.kernels}
    able = [row for row, reason in reasons.items() if reason is None or isinstance(reason, Unknown)]
    assert SCALED_MM.choice(counted) is not None
    for row in able:
        assert f"needs m, n and k of at most {MOST_COUNTED}, got m={past.m}" in row.refusal(past), row.name
    assert SCALED_MM.choice(past) is None


@pytest.mark.parametrize(("name", "arch", "rows"), DECODE_ROWS)
def test_more_rows_are_able_and_not_preferred(name, arch, rows):
    def verdict(m):
        verdicts = SCALED_MM.explain(example_product(on(arch), "row", "row", m=m)).verdicts
        return next(v for v in verdicts if v.kernel == name)

    assert verdict(1).status == "chosen"
    assert "preferred for m" not in verdict(rows).reason  # what else is estimated to be faster there
    assert verdict(rows + 1).status == "not preferred"
    assert f"preferred for m <= {rows} or batch_invariant; got m={rows + 1}" in verdict(rows + 1).reason


@pytest.mark.parametrize(("name", "arch", "rows"), DECODE_ROWS)
def test_a_batch_that_must_not_matter_chooses_it_at_any_m(name, arch, rows):
    problem = example_product(on(arch), "row", "row", m=300)
    assert SCALED_MM.explain(problem).chosen != name
    assert SCALED_MM.explain(problem._replace(batch_invariant=True)).chosen == name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": on(100)}, "needs wgmma (sm_90), got sm_100"),
        ({"target": on(0x942)}, "needs cuda"),
        ({"a": "float8_e5m2", "b": "float8_e5m2"}, "e4m3fn"),
        ({"b": "float8_e4m3fnuz"}, "got a float8_e4m3fn and b float8_e4m3fnuz"),
        ({"alignment": 8}, "aligned to 16"),
        ({"lda": 4104}, "got k=4096 lda=4104"),
        ({"ldb": 4104}, "got k=4096 lda=4096 ldb=4104"),
        ({"k": 0}, "needs k > 0"),
        ({"alignment": 1, "codes_alignment": 16}, "divisible by the size of its elements, got bfloat16 aligned to 1"),
        ({"m": MOST_COUNTED + 1}, "needs m, n and k of at most"),
        ({"vectors_alignment": 2}, "divisible by 4"),
    ],
)
@pytest.mark.parametrize("row", [SM90_DECODE, SM90_TILED], ids=lambda row: row.name)
def test_what_no_kernel_of_sm_90_takes(row, changes, words):
    problem = example_product(on(90), "group", "block", m=64)
    assert row.refusal(problem) is None
    assert words in row.refusal(problem._replace(**changes))


@pytest.mark.parametrize("changes", [{}, {"alignment": 1, "codes_alignment": 16, "out_alignment": 2}], ids=str)
@pytest.mark.parametrize("row", [SM90_DECODE, SM90_TILED], ids=lambda row: row.name)
def test_operands_may_be_aligned_alone_on_sm_90(row, changes):
    assert row.refusal(example_product(on(90), "group", "block", m=64)._replace(**changes)) is None


@pytest.mark.parametrize("formats", [("float8_e5m2", "float8_e5m2fnuz"), ("float8_e5m2fnuz",) * 2], ids=str)
@pytest.mark.parametrize(
    ("row", "target"),
    [(GENERIC_DECODE, on(90)), (GENERIC_MMA, on(0x942)), (ON_HOST, HOST)],
    ids=["generic_decode", "generic_mma", "host"],
)
def test_no_fallback_multiplies_two_kinds_of_e5m2(row, target, formats):
    problem = example_product(target)
    assert row.refusal(problem._replace(a=formats[0])) is None
    assert row.refusal(problem._replace(b=formats[1])) is None
    assert "both e5m2" in row.refusal(problem._replace(a=formats[0], b=formats[1]))


ODD_N = {"n": 4097, "ldo": 4097}


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        (90, {}, "needs k, addresses or rows that are not multiples of 16 bytes"),
        (89, {"codes_alignment": 16, "out_alignment": 8}, "got k=4096 n=4096 with codes aligned to 16 and out to 8"),
        (90, ODD_N, "needs k, addresses or rows that are not multiples of 16 bytes"),  # sm90_tiled stores such rows
        (90, {"k": 0, "alignment": 8}, "needs k > 0 and n >= 8, got k=0 n=4096"),
        (89, {"n": 7, "ldo": 7}, "needs k > 0 and n >= 8, got k=4096 n=7"),
        (89, {**ODD_N, "amax": True}, "takes no amax where two launches share the result"),
        (89, {"alignment": 8, "beta": 1.0}, "takes no beta where it copies the result, got 1.0"),
        (90, {"alignment": 8, "batch_invariant": True}, "not batch-invariant"),
        (90, {"alignment": 8, "m": (1 << 18) - 4096}, "needs a and b of less than 1073741824 bytes, got m=258048"),
        (90, {"alignment": 8, "n": MOST_COUNTED + 1}, "needs m, n and k of at most"),
    ],
)
def test_what_is_not_copied_into_aligned_rows(arch, changes, words):
    assert words in COPIES.refusal(example_product(on(arch), "row", "row", m=300)._replace(**changes))


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        (90, {"k": 4104, "lda": 4104, "ldb": 4104}),
        (90, {"alignment": 8, "m": (1 << 18) - 4097}),
        (90, {"alignment": 8, "n": 7, "ldo": 7}),
        (90, {"alignment": 8, "amax": True, "beta": 1.0}),
        (89, ODD_N),
        (89, {"n": 9, "ldo": 9}),
    ],
)
def test_what_is_copied_into_aligned_rows(arch, changes):
    assert COPIES.refusal(example_product(on(arch), "row", "row", m=300)._replace(**changes)) is None


@pytest.mark.parametrize("changes", [{"out": "float8_e4m3fn", "out_scale": True}, {"amax": True}])
def test_only_the_kernel_of_many_rows_gives_codes_and_an_amax_on_sm_90(changes):
    problem = example_product(on(90), "group", "block", m=64)._replace(**changes)
    assert "out_scale and amax" in SM90_DECODE.refusal(problem)
    assert SM90_TILED.refusal(problem) is None


@pytest.mark.parametrize("scales", SCALES, ids="-".join)
@pytest.mark.parametrize("nothing", ["m", "n", "k"])
@pytest.mark.parametrize("target", [*TARGETS, HOST], ids=str)
def test_a_product_of_nothing_is_explained(target, nothing, scales):
    """Estimates divide by the extents of products, and choose among tiles of their results."""
    extents = product((1, 16, 33, 64, 65, 300), (4096, 4097), (1040, 1025))
    empty = {example_product(target, *scales, **{"m": m, "n": n, "k": k, nothing: 0}) for m, n, k in extents}
    for problem, amax, out_alignment in product(empty, (False, True), (1, 16)):
        told = SCALED_MM.explain(problem._replace(amax=amax, out_alignment=out_alignment))
        assert told.chosen
        assert str(told)


@pytest.mark.parametrize(
    ("at", "codes", "out"),
    [
        ((16, 1, 1), False, False),
        ((1, 16, 16), False, False),
        ((1, 8, 16), True, False),
        ((1, 16, 8), False, True),
    ],
)
def test_only_what_is_not_aligned_is_copied(at, codes, out):
    """``at``: the alignment of everything, of codes and of the result, of which the larger one counts."""
    fields = dict(zip(("alignment", "codes_alignment", "out_alignment"), at, strict=True))
    p = example_product(on(89), m=300)._replace(**fields)
    assert (copies_codes(p), copies_out(p)) == (codes, out)
    assert inner(p).alignment == inner(p).codes_alignment == 16


@pytest.mark.parametrize("n", [4096, 4101])
@pytest.mark.parametrize("target", [on(89), on(90)], ids=str)
def test_no_weight_is_read_before_it_is_copied(target, n):
    p = example_product(target, m=300, n=n, k=4101)._replace(prefetch_weight=True)
    assert copies_codes(p)
    assert not inner(p).prefetch_weight
    assert not rest(p).prefetch_weight
