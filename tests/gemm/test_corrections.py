"""Estimates corrected by trees: which GPUs have some, and what becomes of an estimate and of the choice."""

from math import exp
from random import Random

import pytest

from bench.choice_records import H200, on
from fp8core.kernels.gemm import corrections, table
from fp8core.kernels.gemm.sm90 import decode_cost, tiled_choice, tiled_cost
from fp8core.kernels.gemm.sm90.decode import config_for
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.explain import explain_product
from fp8core.runtime import device

FIELDS = tuple("abcdef")
THRESHOLDS = {"a": [-9.0, -1.0, 9.0], "b": [0.5], "c": [1.0], "d": [2.5], "e": [7.0], "f": [5.0]}
TREES = (
    ("d0 f0 a1 b0", [*range(15), 45]),
    ("a2 a0 c0 e0", [0, 0, 0, 0, 10, 20, -40, 30, *[0] * 8]),
)
"""Of the features 0, 1, 2 ... the answers of the first are yes, no, yes, yes, those of the second no, yes, yes, no."""


def line(questions, leaves):
    """Return a tree as the file has it: features and their thresholds by number, and what its leaves are."""
    places = [place for feature, above in questions.split() for place in ("abcdef".index(feature), int(above))]
    return "".join(corrections.DIGITS[place] for place in [*places, *(leaf + 45 for leaf in leaves)])


GROWN = corrections.Grown(THRESHOLDS, 4, [line(*tree) for tree in TREES])


@pytest.fixture
def grown(monkeypatch):
    monkeypatch.setattr(corrections, "trees", lambda: {"a GPU": {"a kernel": GROWN}})
    corrections.forest_of.cache_clear()
    corrections.gpu_of.cache_clear()
    yield
    corrections.forest_of.cache_clear()
    corrections.gpu_of.cache_clear()


def test_a_correction_is_the_sum_of_the_leaves_that_a_product_comes_to(grown):
    asked = tuple(map(float, range(6)))
    assert corrections.factor("a kernel", asked, FIELDS, "a GPU") == pytest.approx(exp(corrections.LEAF * (11 - 40)))
    for kernel, gpu in (("a kernel", "another"), ("another", "a GPU"), ("a kernel", None)):
        assert corrections.factor(kernel, asked, FIELDS, gpu) == 1.0


def test_a_feature_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="not in tuple"):
        corrections.forest(GROWN, FIELDS[:3])


@pytest.mark.parametrize("kernel", ["cublaslt", "sm90_tiled", "sm90_decode"])
def test_trees_are_walked_question_by_question(kernel):
    """All trees at once, by the places of values among thresholds, give what a walk through each gives."""
    grown = corrections.trees()["NVIDIA H200"][kernel]
    names = tuple(grown.thresholds)
    forest, digits = corrections.forest(grown, names), {digit: place for place, digit in enumerate(corrections.DIGITS)}
    chance = Random(kernel)
    for _ in range(30):
        asked = tuple(chance.choice([*values, values[0] - 1, values[-1] + 1]) for values in grown.thresholds.values())
        total = 0
        for tree in grown.trees:
            places, leaf = [digits[digit] for digit in tree], 0
            for feature, above in batched(places[: 2 * grown.questions]):
                leaf = 2 * leaf + (asked[feature] > grown.thresholds[names[feature]][above])
            total += places[2 * grown.questions + leaf] - corrections.MOST
        assert forest.sum_of(asked) == total


def batched(values):
    return zip(values[::2], values[1::2], strict=True)


@pytest.mark.parametrize(("name", "ordinal", "found"), [("a GPU", 0, "a GPU"), ("other", 0, None), ("a GPU", 1, None)])
def test_only_gpus_that_were_measured_have_corrections(grown, monkeypatch, name, ordinal, found):
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(device, "name", lambda ordinal: name)
    assert corrections.gpu_of(H200._replace(device=ordinal)) == found
    assert corrections.gpu_of(H200._replace(device=-1)) is None


@pytest.mark.parametrize(("model", "found"), [("a GPU", "a GPU"), ("other", None)])
def test_a_gpu_that_is_not_here_has_those_of_its_model(grown, model, found):
    assert corrections.gpu_of(H200._replace(device=-1, model=model)) == found


def product(m, n=4096, k=4096, scale="row"):
    return explain_product(m, n, k, scale_a=scale, scale_b=scale, target=H200).problem


@pytest.mark.parametrize("m", [1, 17, 40, 300])
def test_own_kernels_are_corrected_where_they_were_measured(m):
    p = product(m)
    formula = tiled_cost.us(p)
    assert tiled_choice.least_us(p) == formula
    with on("NVIDIA H200"):
        corrected = tiled_choice.least_us(p)
        assert 0.7 < corrected / formula < 1.4
        assert corrected != formula
        assert tiled_choice.fastest(p) == tiled_choice.by_cost(p)[0]
        assert sorted(map(str, tiled_choice.by_cost(p))) == sorted(map(str, tiled_cost.candidates(p)))
        if m <= 64:
            assert 0.7 < decode_cost.corrected_us(p, config_for) / decode_cost.us(p, config_for) < 1.4
    assert tiled_choice.least_us(p) == formula


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "another"])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 4096, 4096), (8, 0, 4096), (8, 4096, 0)])
def test_empty_products_have_a_kernel_with_corrections_and_without(m, n, k, gpu):
    with on(gpu):
        assert SCALED_MM.choice(product(m, n, k)) is not None


def sm90_decode_takes(times, monkeypatch):
    """Let the fastest tile seem to take so much less than sm90_decode."""
    monkeypatch.setattr(table, "least_us", lambda p: decode_cost.corrected_us(p, config_for) / times)


@pytest.mark.parametrize(
    ("m", "times", "alone", "corrected"),
    [
        (1, 1.2, "sm90_decode", "sm90_decode"),
        (16, 1.2, "sm90_decode", "sm90_decode"),
        (24, 1.1, "sm90_tiled", "sm90_tiled"),
        (24, 1.03, "sm90_decode", "sm90_tiled"),
        (24, 0.98, "sm90_decode", "sm90_decode"),
    ],
)
def test_formulas_alone_leave_more_to_sm90_decode(monkeypatch, m, times, alone, corrected):
    sm90_decode_takes(times, monkeypatch)
    p = product(m, 10112, 6400)
    assert SCALED_MM.choice(p).kernel == alone
    with on("NVIDIA H200"):
        assert SCALED_MM.choice(p).kernel == corrected


@pytest.mark.parametrize("scale", ["row", "tensor"])
@pytest.mark.parametrize("m", [17, 24, 32, 33, 48, 64])
def test_the_choice_does_not_depend_on_when_the_weight_may_be_read(m, scale):
    with on("NVIDIA H200"):
        for n, k in ((6080, 1280), (18816, 1232), (9216, 6912), (3840, 1792), (12288, 2048), (14592, 5776)):
            p = product(m, n, k, scale)
            now, early = (p._replace(prefetch_weight=early) for early in (False, True))
            assert decode_cost.corrected_us(now, config_for) == decode_cost.corrected_us(early, config_for)
            assert SCALED_MM.choice(now) == SCALED_MM.choice(early)


def test_the_order_of_a_sum_does_not_depend_on_estimates():
    p = product(40, 10112, 6400)._replace(batch_invariant=True)
    with on("NVIDIA H200"):
        assert SCALED_MM.choice(p).kernel == "sm90_decode"
