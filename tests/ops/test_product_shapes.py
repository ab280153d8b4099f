"""Shapes, strides and memory of products: every shape of a scale, both orientations, empty and folded axes."""

import numpy as np
import pytest

import fp8core
from fp8core.core.calls import Planned
from fp8core.core.specs import TensorSpec
from fp8core.interop.dlpack import contiguous
from fp8core.ops.grouped_mm import GROUPED_MM_CALLS
from fp8core.ops.scaled_mm import SCALED_MM_NT_CALLS
from support import reference
from support.engines import BOTH, engines, fresh, fresh_fp8, fresh_scale
from support.products import FAST, MODES, operands, scales_for
from support.targets import H200


@engines(*BOTH)
@pytest.mark.parametrize("mode", ["tensor-tensor", "row-row", "group-block"])
def test_rows_and_columns_further_apart_than_k(engine, mode):
    m, n, k = 20, 128, 256
    a, weight, scale_a, scale_b, exact = operands(m, n, k, mode)
    wide_a, wide_w = fresh_fp8((m, k + 48), salt=3), fresh_fp8((n, k + 16), salt=4)
    wide_a[:, :k], wide_w[:, :k] = a, weight
    if engine.name == "cupy":  # a Float8Array is sliced by rows alone
        held_a, held_w = (engine.cupy.asarray(x.view(np.uint8))[:, :k] for x in (wide_a, wide_w))
        there_a, there_w = (fp8core.Float8Array(x, "float8_e4m3fn") for x in (held_a, held_w))
    else:
        there_a, there_w = engine.array(wide_a)[:, :k], engine.array(wide_w)[:, :k]
    got = fp8core.scaled_mm(there_a, there_w.T, engine.array(scale_a), engine.array(scale_b))
    assert reference.relative_error(engine.numpy(got), exact) <= FAST
    every_other = fp8core.scaled_mm(
        there_a[::2],
        there_w.T,
        engine.array(scale_a if mode == "tensor-tensor" else scale_a[::2]),
        engine.array(scale_b),
    )
    assert reference.relative_error(engine.numpy(every_other), exact[::2]) <= FAST


@engines(*BOTH)
@pytest.mark.parametrize("mode", MODES)
def test_k_of_zero_gives_the_bias(engine, mode):
    a, weight = fresh_fp8((3, 0)), fresh_fp8((8, 0))
    scale_a, scale_b, _, _ = scales_for(mode.replace("group", "row").replace("block", "row"), 3, 8, 0)
    bias = fresh((8,), "bfloat16")
    got = fp8core.scaled_mm(
        engine.array(a), engine.array(weight).T, engine.array(scale_a), engine.array(scale_b), bias=engine.array(bias)
    )
    np.testing.assert_array_equal(engine.numpy(got), np.broadcast_to(bias, (3, 8)))


@pytest.mark.parametrize(("m", "n", "groups"), [(0, 8, 2), (4, 0, 2), (0, 8, None), (4, 0, None), (4, 8, 0)])
def test_nothing_is_planned_for_a_result_without_elements(m, n, groups):
    def spec(name, dtype, *shape):
        return TensorSpec(name, dtype, shape, contiguous(shape), H200)

    a, *scales = spec("a", "float8_e4m3fn", m, 64), *(spec(name, "float32", 1) for name in ("scale_a", "scale_b"))
    if groups is None:
        given = a, spec("weight", "float8_e4m3fn", n, 64), *scales, None, None, None, None
        described = SCALED_MM_NT_CALLS.describe(given, ("bfloat16", True, False))
    else:
        given = a, spec("weight", "float8_e4m3fn", groups, n, 64), *scales, None, spec("offs", "int32", groups), None
        described = GROUPED_MM_CALLS.describe(given, ("bfloat16", True))
    assert described.plan() == Planned(None)


@engines(*BOTH)
@pytest.mark.parametrize("m", [0, 4])
def test_empty_batches(engine, m):
    n = 0 if m else 32
    got = fp8core.scaled_mm(
        engine.array(fresh_fp8((m, 64))),
        engine.array(fresh_fp8((n, 64))).T,
        engine.array(fresh_scale((1,))),
        engine.array(fresh_scale((1,))),
    )
    assert engine.numpy(got).shape == (m, n)


@engines(*BOTH)
def test_leading_axes_and_every_shape_of_a_scale_per_tensor(engine):
    a, weight, _, _, _ = operands(24, 64, 128, "tensor-tensor")
    exact = reference.scaled_mm(a.astype(np.float32), weight.astype(np.float32).T, 0.5, 0.25)
    for shape in ((), (1,), (1, 1)):
        half, quarter = np.full(shape, 0.5, np.float32), np.full(shape, 0.25, np.float32)
        got = fp8core.scaled_mm(
            engine.array(a.reshape(2, 3, 4, 128)), engine.array(weight).T, engine.array(half), engine.array(quarter)
        )
        assert engine.numpy(got).shape == (2, 3, 4, 64)
        assert reference.relative_error(engine.numpy(got).reshape(24, 64), exact) <= FAST


@engines(*BOTH)
@pytest.mark.parametrize("shape", [(1, 64), (64,), (64, 1)], ids=str)
def test_every_shape_of_a_scale_per_channel(engine, shape):
    a, weight, scale_a, scale_b, exact = operands(1, 64, 256, "row-row")
    got = fp8core.scaled_mm(
        engine.array(a), engine.array(weight).T, engine.array(scale_a), engine.array(scale_b.reshape(shape))
    )
    assert reference.relative_error(engine.numpy(got), exact) <= FAST


@engines(*BOTH)
def test_a_weight_of_four_channels_at_k_512_reads_four_scales_as_channels_or_as_blocks(engine):
    a, weight = fresh_fp8((6, 512)), fresh_fp8((4, 512))
    four = fresh_scale((4, 1), low=0.001, high=1.0)
    da, dw = a.astype(np.float32), weight.astype(np.float32).T
    token, groups = fresh_scale((6, 1)), fresh_scale((6, 4))
    channels = fp8core.scaled_mm(engine.array(a), engine.array(weight).T, engine.array(token), engine.array(four))
    assert reference.relative_error(engine.numpy(channels), reference.scaled_mm(da, dw, token, four.T)) <= FAST
    blocks = fp8core.scaled_mm(engine.array(a), engine.array(weight).T, engine.array(groups), engine.array(four))
    wide_a, wide_b = np.repeat(groups, 128, 1), np.repeat(four, 128, 0)
    assert reference.relative_error(engine.numpy(blocks), reference.scaled_mm(da, dw, wide_a, wide_b)) <= FAST


@engines(*BOTH)
@pytest.mark.parametrize("mode", ["row-row", "group-block", "group-group"])
def test_the_stored_orientation(engine, mode):
    a, weight, scale_a, scale_b, exact = operands(7, 320, 384, mode)
    got = fp8core.scaled_mm_nt(
        engine.array(a), engine.array(weight), engine.array(scale_a), engine.array(np.ascontiguousarray(scale_b.T))
    )
    assert reference.relative_error(engine.numpy(got), exact) <= FAST


@engines(*BOTH)
@pytest.mark.parametrize("m", [1, 17, 80])
def test_given_memory_receives_the_product_and_nothing_beside_it(engine, m):
    a, weight, scale_a, scale_b, exact = operands(m, 64, 128, "row-row")
    poisoned = engine.array(np.full((m + 2, 96), 77, np.float32))
    out = poisoned[1 : m + 1, 4:68]
    got = fp8core.scaled_mm(
        engine.array(a),
        engine.array(weight).T,
        engine.array(scale_a),
        engine.array(scale_b),
        out=out,
        out_dtype="float32",
    )
    assert got is out
    whole = engine.numpy(poisoned)
    assert reference.relative_error(whole[1 : m + 1, 4:68], exact) <= FAST
    outside = np.ones(whole.shape, bool)
    outside[1 : m + 1, 4:68] = False
    assert (whole[outside] == 77).all()
