"""The alignments of a problem are those of all operands and of their rows: with more, a kernel would load across vectors."""

import pytest

import fp8core
from fp8core import GROUP_128, PER_TENSOR, PER_TOKEN, ArraySpec
from fp8core.interop.dlpack import contiguous

E4M3 = "float8_e4m3fn"
ROWS, COLS, OTHERS = 16, 256, 32
NORM = {
    "x": ((ROWS, COLS), "bfloat16"),
    "weight": ((COLS,), "float32"),
    "residual": ((ROWS, COLS), "bfloat16"),
    "out": ((ROWS, COLS), E4M3),
}
PRODUCT = {
    "a": ((ROWS, COLS), E4M3),
    "weight": ((OTHERS, COLS), E4M3),
    "scale_a": ((ROWS, 1), "float32"),
    "scale_b": ((OTHERS, 1), "float32"),
    "bias": ((OTHERS,), "bfloat16"),
    "amax": ((1,), "float32"),
    "out": ((ROWS, OTHERS), "bfloat16"),
}
CALLS = {
    "quantize": (fp8core.quantize, {"x": ((ROWS, COLS), "bfloat16"), "out": ((ROWS, COLS), E4M3)}, {}),
    "dequantize": (
        fp8core.dequantize,
        {"q": ((ROWS, COLS), E4M3), "out": ((ROWS, COLS), "bfloat16")},
        {"scale": 1.0, "dtype": "bfloat16"},
    ),
    "norm": (fp8core.rms_norm_quant, NORM, {"epsilon": 1e-6}),
    "silu": (fp8core.silu_and_mul_quant, {"x": ((ROWS, 2 * COLS), "bfloat16"), "out": ((ROWS, COLS), E4M3)}, {}),
    "product": (fp8core.scaled_mm_nt, PRODUCT, {}),
    "grouped": (
        fp8core.grouped_scaled_mm_nt,
        {
            "a": ((ROWS, COLS), E4M3),
            "weight": ((3, OTHERS, COLS), E4M3),
            "scale_a": ((ROWS, 1), "float32"),
            "scale_b": ((3, OTHERS, 1), "float32"),
            "bias": ((3, OTHERS), "bfloat16"),
            "offs": ((3,), "int32"),
            "out": ((ROWS, OTHERS), "bfloat16"),
        },
        {},
    ),
    "requantize": (
        fp8core.requantize_with_max_scale,
        {"weight": ((ROWS, COLS), E4M3), "out": ((ROWS, COLS), E4M3)},
        {"weight_scale": 1.0, "logical_widths": [ROWS]},
    ),
    "normalize": (
        fp8core.normalize_e4m3fn_to_e4m3fnuz,
        {"weight": ((ROWS, COLS), E4M3), "out": ((ROWS, COLS), E4M3)},
        {"weight_scale": 1.0},
    ),
    "permute": (
        fp8core.moe_permute,
        {"x": ((ROWS, COLS), "bfloat16"), "topk_ids": ((ROWS, 2), "int32")},
        {"experts": 4},
    ),
    "unpermute": (
        fp8core.moe_unpermute,
        {"y": ((ROWS, COLS), "float32"), "inverse": ((8, 2), "int32"), "out": ((8, COLS), "bfloat16")},
        {"out_dtype": "bfloat16"},
    ),
}
"""Calls with all operands whose rows have an alignment, by their names: the function, these operands, and the others."""


def alignments(call, operand=None, at=32, apart=0):
    """Return the alignments of a call's problem other than 16, with one operand at another address, or rows further apart."""
    function, operands, others = CALLS[call]
    given = {}
    for name, (shape, dtype) in operands.items():
        alignment, gap = (at, apart) if name == operand else (32, 0)
        strides = contiguous((*shape[:-1], shape[-1] + gap))
        given[name] = ArraySpec(shape, dtype, strides=strides, alignment=alignment)
    problem = fp8core.explain(function, **given, **others, target="sm_90").problem
    fields = problem.product._asdict() if call == "grouped" else problem._asdict()
    found = {name: x for name, x in fields.items() if name.endswith("alignment")}
    assert found
    return {name: x for name, x in found.items() if x != 16}


@pytest.mark.parametrize("call", CALLS)
def test_aligned_operands_make_an_aligned_problem(call):
    assert alignments(call) == {}


@pytest.mark.parametrize(
    ("call", "operand", "at", "apart", "want"),
    [
        ("quantize", "x", 4, 0, 4),
        ("quantize", "x", 32, 1, 2),
        ("quantize", "out", 4, 0, 4),
        ("quantize", "out", 8, 0, 16),  # kernels store eight codes at a time
        ("quantize", "out", 32, 2, 2),
        ("dequantize", "q", 4, 0, 8),  # as many elements of out
        ("dequantize", "q", 32, 1, 2),
        ("dequantize", "out", 8, 0, 8),
        ("dequantize", "out", 32, 2, 4),
        ("norm", "x", 8, 0, 8),
        ("norm", "x", 32, 2, 4),
        ("norm", "weight", 16, 0, 8),  # four of its elements, and of x
        ("norm", "residual", 8, 0, 8),
        ("norm", "residual", 32, 2, 4),
        ("norm", "out", 4, 0, 8),
        ("norm", "out", 32, 1, 2),
        ("silu", "x", 8, 0, 8),
        ("silu", "x", 32, 2, 4),
        ("silu", "out", 4, 0, 8),
        ("silu", "out", 32, 1, 2),
        ("requantize", "weight", 4, 0, 4),
        ("requantize", "weight", 32, 8, 8),
        ("requantize", "out", 4, 0, 4),
        ("requantize", "out", 32, 8, 8),
        ("normalize", "weight", 4, 0, 4),
        ("normalize", "out", 4, 0, 4),
        ("permute", "x", 4, 0, 4),
        ("permute", "x", 32, 1, 2),
        ("unpermute", "y", 4, 0, 4),
        ("unpermute", "y", 32, 1, 4),
        ("unpermute", "out", 4, 0, 8),  # two of its elements, and of y
        ("unpermute", "out", 32, 1, 4),
    ],
)
def test_the_alignment_is_that_of_all_operands(call, operand, at, apart, want):
    assert alignments(call, operand, at, apart) == ({} if want == 16 else {"alignment": want})


@pytest.mark.parametrize("call", ["product", "grouped"])
@pytest.mark.parametrize(
    ("operand", "at", "apart", "want"),
    [
        ("a", 4, 0, {"alignment": 4, "codes_alignment": 4}),
        ("a", 32, 2, {"alignment": 2, "codes_alignment": 2}),
        ("weight", 4, 0, {"alignment": 4, "codes_alignment": 4}),
        ("weight", 32, 2, {"alignment": 2, "codes_alignment": 2}),
        ("out", 4, 0, {"alignment": 4, "out_alignment": 4}),
        ("out", 32, 1, {"alignment": 2, "out_alignment": 2}),
        ("scale_a", 8, 0, {"vectors_alignment": 8, "scale_a_alignment": 8}),
        ("scale_b", 8, 0, {"vectors_alignment": 8}),
        ("bias", 8, 0, {"vectors_alignment": 8}),
    ],
)
def test_a_product_has_alignments_of_its_codes_of_its_result_and_of_its_vectors(call, operand, at, apart, want):
    assert alignments(call, operand, at, apart) == want


def test_vectors_are_also_amax_and_the_bias_of_every_group():
    assert alignments("product", "amax", 8) == {"vectors_alignment": 8}
    assert alignments("grouped", "bias", apart=1) == {"vectors_alignment": 2}


@pytest.mark.parametrize(
    ("options", "rows", "apart", "want"),
    [
        ({}, ROWS, 0, 16),
        ({"rows_padded": ROWS}, ROWS, 0, 16),
        ({"rows_padded": ROWS + 1}, ROWS + 1, 0, 1),
        ({}, ROWS, 2, 1),
        ({"scale": 1.0}, ROWS, 0, 1),
        ({"group_shape": PER_TOKEN}, ROWS, 0, 1),
        ({"group_shape": GROUP_128}, ROWS, 0, 1),
    ],
    ids=str,
)
def test_only_a_dense_tensor_with_one_computed_scale_counts_as_one_row(options, rows, apart, want):
    cols = COLS - 1
    x = ArraySpec((ROWS, cols), "bfloat16", strides=(cols + apart, 1))
    out = ArraySpec((rows, cols), E4M3, strides=(cols + apart, 1))
    got = fp8core.explain(fp8core.quantize, x, out=out, target="sm_90", **{"group_shape": PER_TENSOR, **options})
    assert got.problem.alignment == want


def test_rows_and_halves_of_an_odd_length_are_not_aligned():
    """Permuted rows follow each other without gaps, and up begins where gate ends."""
    x, ids = ArraySpec((ROWS, 255), "bfloat16", strides=(256, 1)), ArraySpec((ROWS, 2), "int32")
    assert fp8core.explain(fp8core.moe_permute, x, ids, 4, target="sm_90").problem.alignment == 2
    x, out = ArraySpec((ROWS, 510), "bfloat16", strides=(512, 1)), ArraySpec((ROWS, 255), E4M3, strides=(256, 1))
    assert fp8core.explain(fp8core.silu_and_mul_quant, x, out=out, target="sm_90").problem.alignment == 2
