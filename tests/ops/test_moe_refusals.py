"""What `moe_permute` and `moe_unpermute` refuse, and the alignment that their kernels may rely on."""

import re

import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, ArraySpec, Quantized, moe_permute, moe_unpermute
from fp8core.errors import DTypeError, LayoutError, ScaleError, ShapeError, UnsupportedProblemError
from support.engines import fresh_fp8

X, IDS, ONE = np.zeros((4, 8), np.float32), np.zeros((4, 2), np.int32), np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: moe_permute(X[0], IDS, 3), ShapeError, r"x needs two axes \[tokens, cols\]"),
        (lambda: moe_permute(X, IDS[:3], 3), ShapeError, r"topk_ids needs shape \(4, k\), .* got \(3, 2\)"),
        (lambda: moe_permute(X, IDS[:, 0], 3), ShapeError, "topk_ids needs shape"),
        (lambda: moe_permute(X, None, 3), DTypeError, "topk_ids needs an array, got None"),
        (lambda: moe_permute(X, IDS.astype(np.float32), 3), DTypeError, "topk_ids needs int32 or int64"),
        (lambda: moe_permute(X, IDS.astype(np.int16), 3), DTypeError, "topk_ids needs"),
        (lambda: moe_permute(X.astype(np.int32), IDS, 3), DTypeError, "x needs float32"),
        (lambda: moe_permute(X, IDS, -1), ShapeError, "experts needs a whole number"),
        (lambda: moe_permute(X, IDS, 2.5), ShapeError, "experts needs a whole number"),
        (lambda: moe_permute(X.T[:4], IDS, 3), LayoutError, "x needs a contiguous last axis"),
        (
            lambda: moe_permute(X, np.ascontiguousarray(IDS.T).T, 3),
            LayoutError,
            "topk_ids needs contiguous memory",
        ),
        (
            lambda: moe_permute(Quantized(fresh_fp8((4, 8)), np.ones((3, 1), np.float32)), IDS, 3),
            ShapeError,
            r"scale needs shape \(4, groups\), .* got \(3, 1\)",
        ),
        (
            lambda: moe_permute(Quantized(fresh_fp8((4, 8)), np.ones((4, 1, 2), np.float32)), IDS, 3),
            ShapeError,
            r"scale needs shape \(4, groups\), .* got \(4, 1, 2\)",
        ),
        (
            lambda: moe_permute(Quantized(fresh_fp8((4, 8)), np.ones((4, 1))), IDS, 3),
            DTypeError,
            "scale needs",
        ),
        (
            lambda: moe_permute(Quantized(fresh_fp8((4, 8)), np.ones((4, 1), np.float32), PER_TENSOR), IDS, 3),
            ShapeError,
            r"scale needs one number, .* got \(4, 1\)",
        ),
        (
            lambda: moe_permute(Quantized(fresh_fp8((4, 8)), None, PER_TENSOR), IDS, 3),
            DTypeError,
            "scale needs an array, got None",
        ),
        (lambda: moe_permute(Quantized(fresh_fp8((4, 8)), "a"), IDS, 3), DTypeError, "scale needs .*got built"),
        (lambda: moe_permute(Quantized(fresh_fp8((4, 8)), [0.5]), IDS, 3), DTypeError, "scale needs .*list"),
        (lambda: moe_permute(Quantized("a", ONE), IDS, 3), DTypeError, "x needs an array .*got builtins.str"),
        (lambda: moe_permute(Quantized(fresh_fp8((1, 8))[0], ONE), IDS, 3), ShapeError, "x needs two axes"),
        (lambda: moe_permute(Quantized(fresh_fp8(()), ONE), IDS, 3), ShapeError, "x needs two axes"),
        (lambda: moe_unpermute(X[0], IDS), ShapeError, r"y needs two axes \[rows, cols\]"),
        (lambda: moe_unpermute(X, IDS[0]), ShapeError, r"inverse needs two axes \[tokens, k\]"),
        (lambda: moe_unpermute(X, IDS.astype(np.int64)), DTypeError, "inverse needs int32, got int64"),
        (lambda: moe_unpermute(X, None), DTypeError, "inverse needs an array, got None"),
        (lambda: moe_unpermute(X, IDS, X), ShapeError, r"topk_weights needs shape \(4, 2\)"),
        (lambda: moe_unpermute(X, IDS, IDS), DTypeError, "topk_weights needs"),
        (
            lambda: moe_unpermute(X, IDS, np.ones((2, 4), np.float32).T),
            LayoutError,
            "topk_weights needs contiguous memory",
        ),
        (lambda: moe_unpermute(fresh_fp8((4, 8)), IDS), DTypeError, "y needs float32"),
        (lambda: moe_unpermute(X, IDS, out_dtype="float8_e5m2"), DTypeError, "out_dtype needs"),
        (lambda: moe_unpermute(X, IDS, out=X[:3]), ShapeError, r"out needs shape \(4, 8\)"),
        (lambda: moe_unpermute(X, IDS, out=X), LayoutError, "out needs memory of its own"),
        (lambda: moe_unpermute(X, IDS, out_dtype="float16", out=X), DTypeError, "out needs float16"),
        (lambda: moe_unpermute(X, np.broadcast_to(IDS[:1], (4, 2))), LayoutError, "inverse needs contiguous"),
    ],
)
def test_operands_that_cannot_be_meant_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("tokens", "scale", "group"),
    [(4, ONE, (4, -1)), (4, ONE, BLOCK_128), (1, np.ones((1, 2), np.float32), (-1, 128)), (1, 0.5, (2, -1))],
)
def test_scales_of_several_rows(tokens, scale, group):
    message = f"x needs scales per tensor, per token or by groups of 1xg, got group_shape {tuple(group)}"
    with pytest.raises(ScaleError, match=re.escape(message)):
        moe_permute(Quantized(fresh_fp8((tokens, 256)), scale, group), IDS[:tokens], 3)


@pytest.mark.parametrize(
    ("shape", "group", "wanted"),
    [
        ((4, 3), GROUP_128, (4, 2)),
        ((4, 1), GROUP_128, (4, 2)),
        ((4,), GROUP_128, (4, 2)),
        ((4, 0), GROUP_128, (4, 2)),
        ((4, 2), PER_TOKEN, (4, 1)),
    ],
)
def test_a_scale_of_other_groups_than_its_own(shape, group, wanted):
    words = f"scale needs shape {wanted}, as group_shape is {tuple(group)}, a row for each token, got {shape}"
    with pytest.raises(ShapeError, match=re.escape(words)):
        moe_permute(Quantized(fresh_fp8((4, 256)), np.ones(shape, np.float32), group), IDS, 3)


MANY = ArraySpec((1 << 27, 8), "int32")
NONE = ArraySpec((1 << 30, 0), "int32")


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (moe_permute, (ArraySpec(MANY.shape, "float32"), MANY, 4), "topk_ids needs less than 2**30 rows and elements"),
        (
            moe_permute,
            (ArraySpec((1 << 30, 8), "float32"), NONE, 4),
            "topk_ids needs less than 2**30 rows and elements",
        ),
        (
            moe_permute,
            (
                Quantized(ArraySpec((4, 1 << 21), "float8_e4m3fn"), ArraySpec((4, 1 << 21), "float32"), (1, 1)),
                ArraySpec((4, 1), "int32"),
                4,
            ),
            "scale needs less than 2**21 groups of a row, got 2097152",
        ),
        (moe_unpermute, (ArraySpec((8, 8), "float32"), MANY), "inverse needs less than 2**30 rows and elements"),
        (moe_unpermute, (ArraySpec((8, 8), "float32"), NONE), "inverse needs less than 2**30 rows and elements"),
        (
            moe_unpermute,
            (ArraySpec((1 << 30, 8), "float32"), ArraySpec((4, 2), "int32")),
            "y needs less than 2**30 rows, got shape (1073741824, 8)",
        ),
    ],
)
def test_more_than_kernels_count(function, arguments, words):
    with pytest.raises(UnsupportedProblemError, match=re.escape(words)):
        fp8core.explain(function, *arguments, target="sm_90")


def test_more_choices_than_kernels_count():
    rows = np.broadcast_to(X[0], (1 << 27, 8))
    with pytest.raises(UnsupportedProblemError, match=re.escape("topk_ids needs less than 2**30 rows and elements")):
        moe_permute(rows, np.empty(rows.shape, np.int32), 4)  # memory that is never touched


@pytest.mark.parametrize(
    ("shape", "strides", "dtype", "alignment"),
    [
        ((4, 8), None, "float32", 16),
        ((4, 9), None, "float32", 4),
        ((4, 8), (9, 1), "float32", 4),
        ((4, 6), (8, 1), "float32", 8),
        ((4, 32), (34, 1), "float8_e4m3fn", 2),
        ((4, 34), (64, 1), "float8_e4m3fn", 2),
    ],
)
def test_rows_are_copied_in_parts_that_are_aligned_in_both_arrays(shape, strides, dtype, alignment):
    x = ArraySpec(shape, dtype, strides=strides)
    explained = fp8core.explain(moe_permute, x, ArraySpec((4, 2), "int32"), 3, target="sm_90")
    assert explained.problem.alignment == alignment


@pytest.mark.parametrize(
    ("cols", "stride", "dtype", "out_dtype", "alignment"),
    [
        (8, 8, "float32", "bfloat16", 16),
        (8, 8, "bfloat16", "float32", 8),  # four numbers, which are 16 bytes of the result
        (8, 9, "float32", "float32", 4),
        (6, 6, "float32", "float32", 8),
        (6, 8, "bfloat16", "float32", 4),
    ],
)
def test_numbers_are_added_in_vectors_that_are_aligned_in_both_arrays(cols, stride, dtype, out_dtype, alignment):
    y, inverse = ArraySpec((4, cols), dtype, strides=(stride, 1)), ArraySpec((4, 2), "int32")
    explained = fp8core.explain(moe_unpermute, y, inverse, out_dtype=out_dtype, target="sm_90")
    assert explained.problem.alignment == alignment
