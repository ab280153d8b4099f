"""The alignments of a grouped product hold for every group."""

import pytest

from core.grouped_calls import ROWS
from fp8core.core.grouped import grouped_product_of
from fp8core.core.specs import TensorSpec
from support.targets import H200


def aligned(a, weight):
    """Return the alignment of the codes of a product of groups."""
    scale = TensorSpec("scale", "float32", (1,), (1,), H200)
    offs = TensorSpec("offs", "int32", weight.shape[:1], (1,), H200)
    return (
        grouped_product_of(a, weight, scale, scale, None, offs, "bfloat16").problem(True, None).product.codes_alignment
    )


@pytest.mark.parametrize(("groups", "stride", "alignment"), [(3, 336, 16), (3, 340, 4), (3, 337, 1), (1, 337, 16)])
def test_the_alignment_holds_for_every_group(groups, stride, alignment):
    """Rows of k=100 that are 112 apart; from one group to the next there may be more."""
    a = TensorSpec("a", "float8_e4m3fn", (ROWS, 100), (112, 1), H200)
    weight = TensorSpec("weight", "float8_e4m3fn", (groups, 3, 100), (stride, 112, 1), H200)
    assert aligned(a, weight) == alignment


@pytest.mark.parametrize(
    ("stride", "n", "bias", "alignment"),
    [(32, 1000, "", 16), (33, 1000, "", 4), (32, 1000, "bfloat16", 16), (32, 1001, "float32", 4)],
)
def test_the_alignment_of_the_scales_of_a_is_their_own(stride, n, bias, alignment):
    """That of the vectors holds for every group, too: the scales of its weight, which are 8 x 4, and its bias."""
    a = TensorSpec("a", "float8_e4m3fn", (ROWS, 512), (512, 1), H200)
    weight = TensorSpec("weight", "float8_e4m3fn", (3, n, 512), (n * 512, 512, 1), H200)
    scale_a = TensorSpec("scale_a", "float32", (ROWS, 4), (4, 1), H200)
    scale_b = TensorSpec("scale_b", "float32", (3, 8, 4), (stride, 4, 1), H200)
    given = TensorSpec("bias", bias, (3, n), (n, 1), H200) if bias else None
    offs = TensorSpec("offs", "int32", (3,), (1,), H200)
    made = grouped_product_of(a, weight, scale_a, scale_b, given, offs, "bfloat16").problem(True, None).product
    assert (made.vectors_alignment, made.scale_a_alignment) == (alignment, 16)


@pytest.mark.parametrize(("stride", "address", "alignment"), [(336, 16, 16), (336, 2, 2), (340, 16, 4), (340, 2, 2)])
def test_the_alignment_of_codes_and_results_is_the_least(stride, address, alignment):
    a = TensorSpec("a", "float8_e4m3fn", (ROWS, 100), (112, 1), H200)
    weight = TensorSpec("weight", "float8_e4m3fn", (3, 3, 100), (stride, 112, 1), H200)
    scale = TensorSpec("scale", "float32", (1,), (1,), H200)
    offs = TensorSpec("offs", "int32", (3,), (1,), H200)
    out = TensorSpec("out", "bfloat16", (ROWS, 3), (8, 1), H200, address)
    product = grouped_product_of(a, weight, scale, scale, None, offs, "bfloat16").problem(True, out).product
    assert (product.alignment, product.out_alignment) == (alignment, address)
