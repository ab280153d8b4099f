"""The ways to run a linear layer: which one a problem gets and why, and how its product is laid out."""

import itertools
from collections import defaultdict
from importlib import import_module
from math import prod
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import fp8core
from fp8core import GROUP_128, PER_TENSOR, PER_TOKEN
from fp8core.core.calls import Planned
from fp8core.core.specs import TensorSpec
from fp8core.kernels.gemm.args import ready
from fp8core.kernels.gemm.sm90 import decode_channels_config, decode_config
from fp8core.kernels.gemm.sm90.decode import config_for, decode
from fp8core.kernels.gemm.sm90.decode_config import linear_config
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.linear import fused
from fp8core.kernels.linear.fused import MOST_ELEMENTS, fused_config, plan_fused, row_teams, vectors
from fp8core.kernels.linear.overlapped import KEPT_FROM, PRODUCER_BYTES, plan_behind_producer, plan_overlapped
from fp8core.kernels.linear.table import LINEAR, Steps, explain_linear
from fp8core.ops.linear import LINEAR_CALLS, LinearOptions
from fp8core.ops.linear_scratch import codes_in_scratch, planned
from fp8core.problem import Linear, Quantize
from fp8core.runtime import jit
from support.engines import assert_same_bytes, fresh
from support.recorder import Recorder
from support.sm90_products import asked  # noqa: F401
from support.sm90_products import problem as product
from support.targets import H200

INF = float("inf")
HALF = 0.5


def problem(m, n, k, *, static=False, x="bfloat16", alignment=16, group=PER_TOKEN, scale_ub=INF, **fields):
    """Return a layer of aligned matrices, per token or with a given scale per tensor."""
    form = PER_TENSOR if static else group, static, "float32", "k"
    quantize = Quantize(H200, x, "float8_e4m3fn", *form, k, alignment)
    of_x = {"scale_a": "tensor", "scale_a_strides": (0, 0)} if static else {}
    return Linear(quantize, product(m, n, k, **{**of_x, "lda": k, "ldb": k, **fields}), k, scale_ub)


SHAPES = (
    (1, 4096, 4096),
    (2, 6144, 4096),
    (1, 7168, 16384),
    (3, 2112, 1024),
    (8, 28672, 1024),
    (1, 100, 16),
    (1, 100, 16384),
)
WAYS = list(itertools.product(SHAPES, (False, True), (False, True)))


@pytest.mark.parametrize(("shape", "static", "invariant"), WAYS)
def test_the_product_lies_as_that_of_two_launches_and_fits(shape, static, invariant):
    layer = problem(*shape, static=static, batch_invariant=invariant)
    m, _, k = shape
    plan, own, side = fused_config(layer), linear_config(config_for(layer.product)), decode_config.width(m)
    assert plan._replace(a_stages=0) == own._replace(a_stages=0)
    chunks = -(-k // decode_config.BLOCK_K)
    assert plan.a_stages * plan.split_k >= chunks
    team = 128 * plan.m_warpgroups * plan.k_warpgroups // row_teams(layer)
    assert m <= row_teams(layer)
    columns = decode_config.BLOCK_K * (plan.a_stages if static else chunks)
    assert team * (vectors(layer) - 1) * 8 < columns <= team * vectors(layer) * 8
    depth = decode_config.stages(plan, side, 0, H200)
    asked = decode_config.dynamic_bytes(plan, side, 0, depth, H200)
    assert decode_config.ring_bytes(plan, side, depth) <= asked
    assert plan.ctas_per_sm * depth * plan.tile * decode_config.BLOCK_K >= 80 << 10


@pytest.mark.parametrize("static", [False, True])
def test_few_elements_take_one_launch(static):
    for m, n, k in SHAPES:
        told = explain_linear(problem(m, n, k, static=static))
        assert (told.chosen, told.before) == ("fused", ())


@pytest.mark.parametrize(
    ("shape", "fields", "words", "instead"),
    [
        ((1, 4096, 4 * MOST_ELEMENTS), {}, "needs registers", "overlapped"),
        ((1, 4096, 1 << 18), {"static": True}, "shared memory", "overlapped"),
        (
            (1, 8192, 12288),
            {"static": True, "target": H200._replace(multiprocessors=78)},
            "shared memory",
            "overlapped",
        ),
        (
            (48, 640, 512),
            {"static": True, "target": H200._replace(multiprocessors=264)},
            "got one of sm90_decode_rows for 48 x 512",
            "sequential",
        ),
        ((16, 4096, 4096), {}, "elements", "overlapped"),
        ((1, 4096, 4096), {"x": "float32"}, "float32", "overlapped"),
        ((1, 4096, 4096), {"alignment": 8}, "aligned to 8", "overlapped"),
        ((4, 4096, 1020), {"lda": 1024, "ldb": 1024}, "multiple of 8", "overlapped"),
        ((1, 4096, 4096), {"group": PER_TENSOR, "scale_a": "tensor"}, "per token", "overlapped"),
        ((1, 4096, 4096), {"group": GROUP_128, "scale_a": "group", "scale_b": "block"}, "per token", "overlapped"),
        ((1, 4096, 4096), {"static": True, "scale_b": "block"}, "scale_b per block", "overlapped"),
        ((1, 0, 4096), {}, "needs n > 0", "overlapped"),
        ((2, 4096, MOST_ELEMENTS), {}, "preferred up to", "overlapped"),
        ((1, 4096, 4096), {"scale_ub": None}, "scale_ub", "overlapped"),
        ((65, 4096, 16), {"batch_invariant": True}, "m=65", "sequential"),
        ((1, 4096, 4096), {"target": H200._replace(arch=100)}, "sm90_decode", "sequential"),
        ((1, 4096, 4096), {"a": "float8_e5m2", "b": "float8_e5m2"}, "sm90_decode", "sequential"),
        ((1, 4096, 4104), {}, "sm90_decode", "sequential"),
    ],
)
def test_it_says_why_it_takes_two_launches(shape, fields, words, instead):
    got = LINEAR.explain(problem(*shape, **fields))
    assert got.chosen == instead
    assert words in got.verdicts[0].reason


@pytest.mark.parametrize("m", [64, 65])
def test_two_launches_overlap_up_to_the_rows_of_one_panel(m):
    refusal = LINEAR.kernels[1].refusal(problem(m, 4096, 4096))
    assert refusal == (None if m == 64 else "needs m <= 64, got m=65")


def test_the_stride_of_x_is_given_in_bytes(asked):
    layer = problem(2, 4096, 4096)._replace(x_stride=4104)
    with mock.patch.object(fused, "tensor_maps", return_value=defaultdict(bytes)):
        plan_fused(layer)(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    ((_, _, given),) = asked
    assert (given.x_stride, given.x_vecs) == (2 * 4104, 512)


def test_in_a_chain_there_is_room_for_the_quantization_and_for_what_it_asks():
    for (n, k), side in itertools.product(((4096, 4096), (6144, 4096), (7168, 16384)), decode_config.WIDTHS):
        plan = decode_channels_config.cheapest(n, k, decode_channels_config.cost_model(side, False), H200)
        behind = linear_config(plan)
        depth = decode_config.stages(behind, side, 0, H200)
        assert 0 < behind.prefetch_k_blocks < depth
        asked = decode_config.dynamic_bytes(behind, side, 0, depth, H200)
        block = asked + decode_config.fixed_bytes(behind, side, 0, depth) + 1024
        assert behind.ctas_per_sm * block + decode_config.QUANTIZER_BYTES <= H200.shared_bytes + 1024


@pytest.mark.parametrize("m", [1, 16, 64])
def test_a_product_behind_a_producer_leaves_room_and_has_the_bits_of_the_product_alone(m, monkeypatch):
    found = []

    def prepare(target, source, entry, constants, arguments, **launch):
        found.append((constants, launch["shared_bytes"]))
        return Recorder(entry, [])

    monkeypatch.setattr(jit, "prepare", prepare)
    alone = problem(m, 28672, 4096).product
    plan_behind_producer(alone)
    decode(alone)
    (behind, rest), (other, everything) = found
    assert 0 < behind["FP8_PREFETCH_K_BLOCKS"] < behind["FP8_STAGES"]
    assert rest < everything or behind["FP8_STAGES"] < other["FP8_STAGES"]
    # Small kernels of more rows would wait.
    assert (behind["FP8_AHEAD_K_BLOCKS"] < other["FP8_AHEAD_K_BLOCKS"]) == (m > 32)
    assert behind["FP8_AHEAD_K_BLOCKS"] > 0
    assert not other["FP8_KEEPS_RESULT"]
    assert behind["FP8_KEEPS_RESULT"] == (2 * m * 28672 >= KEPT_FROM)
    free = dict.fromkeys(("FP8_PREFETCH_K_BLOCKS", "FP8_AHEAD_K_BLOCKS", "FP8_STAGES", "FP8_KEEPS_RESULT"), 0)
    assert {**behind, **free} == {**other, **free}


@pytest.mark.parametrize(
    "shape", [(7168, 8192), (8192, 3584), (57344, 8192), (6144, 4096), (8192, 1024), (13312, 16384)]
)
@pytest.mark.parametrize("m", [16, 64])
def test_room_for_a_quantization_of_64_rows_costs_nothing_of_the_weight_in_flight(m, shape, monkeypatch):
    found = []

    def prepare(target, source, entry, constants, arguments, **launch):
        found.append((constants, launch))
        return Recorder(entry, [])

    monkeypatch.setattr(jit, "prepare", prepare)
    layer = problem(m, *shape)
    plan_overlapped(layer)
    decode(layer.product)
    (constants, launch), (alone, _) = found
    config, stages = config_for(layer.product), constants["FP8_A_STAGES"]
    if m <= 32:
        assert stages == alone["FP8_A_STAGES"]
        return
    assert min(6, alone["FP8_A_STAGES"]) <= stages <= alone["FP8_A_STAGES"]
    assert constants["FP8_STAGES"] >= alone["FP8_STAGES"]
    static = decode_config.fixed_bytes(config._replace(a_stages=stages), 64, 0, constants["FP8_STAGES"])
    block = launch["shared_bytes"] + static + 1024
    assert config.ctas_per_sm * block + PRODUCER_BYTES <= H200.shared_bytes + 1024


@pytest.mark.parametrize(
    ("m", "fields"),
    [
        (100, {}),
        (100, {"batch_invariant": True}),  # by sm90_decode, but in panels of 64 rows
        (16, {"target": H200._replace(arch=100)}),
    ],
    ids=str,
)
def test_other_products_behind_a_producer_are_planned_as_ever(m, fields, monkeypatch):
    monkeypatch.setattr(SCALED_MM, "plan", lambda problem: problem)
    alone = problem(m, 6144, 4096, **fields).product
    assert plan_behind_producer(alone) == alone


def test_explain_tells_the_way():
    layer = fp8core.Fp8Linear.from_weight(fresh((64, 256)))
    got = layer.explain(fresh((1, 256)))
    assert [type(step.problem).__name__ for step in got.before] == ["Quantize", "Linear"]
    assert got.before[1].chosen == "sequential"
    assert "fused" in str(got)


@pytest.mark.parametrize("bound", [HALF, np.float32([HALF])], ids=["number", "array"])
def test_an_upper_bound_is_that_of_the_quantization(bound):
    x, weight = fresh((3, 256)), fp8core.quantize(fresh((64, 256)))
    want = fp8core.scaled_mm_nt(fp8core.quantize(x, scale_ub=bound), weight, out_dtype="float32")
    assert_same_bytes(fp8core.linear(x, weight, scale_ub=bound, out_dtype="float32"), want)
    way = fp8core.explain(fp8core.linear, fp8core.ArraySpec((1, 256), "bfloat16"), weight, scale_ub=bound, target=H200)
    linear = way if way.problem._fields == Linear._fields else way.before[1]
    assert linear.chosen == ("fused" if bound is HALF else "overlapped")
    with pytest.raises(fp8core.ScaleError, match="scale_ub needs to be left out where x is FP8"):
        fp8core.linear(fp8core.quantize(x), weight, scale_ub=bound)


@pytest.mark.parametrize("group", [PER_TENSOR, PER_TOKEN, GROUP_128], ids=str)
def test_one_number_is_the_scale_of_all_of_x_whatever_the_group_shape_is(group):
    weight, q = fp8core.quantize(fresh((64, 256))), fp8core.quantize(fresh((3, 256)), group_shape=PER_TENSOR)
    want = fp8core.scaled_mm_nt(q, weight)
    assert_same_bytes(fp8core.linear(q.data, weight, input_scale=q.scale, group_shape=group), want)


@pytest.mark.parametrize("stable", [False, True])
def test_only_a_weight_that_may_be_is_prefetched(stable, asked):
    launch = plan_fused(problem(1, 4096, 4096, prefetch_weight=stable))
    launch(7, *range(16, 160, 16))
    assert launch.prefetches_weight
    ((entry, stream, arguments),) = asked
    assert (entry, stream, arguments.x, arguments.prefetch_weight) == ("sm90_decode", 7, 16, stable)


@pytest.mark.parametrize("needed", [64, 4096])
def test_a_launch_that_reads_early_gets_no_scratch_that_is_too_small(monkeypatch, needed):
    """A tuning may come between the two plans, and choose a kernel that needs more of it."""
    made = []

    def planned(name, scratch_bytes):
        def plan(problem):
            assert problem.prefetch_weight == (name == "early")
            return ready(lambda *_: made.append(name), scratch_bytes=scratch_bytes, prefetches_weight=True)

        return plan

    module = import_module("fp8core.ops.linear")  # the package's attribute of this name is the function
    monkeypatch.setattr(module, "SCALED_MM", SimpleNamespace(plan=planned("late", 64)))
    monkeypatch.setattr(module, "plan_behind_producer", planned("early", needed))
    x, weight = (TensorSpec(name, "float8_e4m3fn", (4, 64), (64, 1), H200) for name in ("x", "weight"))
    scales = [TensorSpec(name, "float32", (4, 1), (1, 1), H200) for name in ("weight_scale", "input_scale")]
    options = LinearOptions(PER_TOKEN, None, None, True, False)
    described = module.LINEAR_CALLS.describe((x, weight, scales[0], None, scales[1], None, None), options)
    plan = described.plan()
    plan.prefetching()(0, *range(8))
    assert (plan.scratch_bytes, made) == (64, ["early" if needed == 64 else "late"])


def test_a_layer_that_quantizes_has_a_launch_that_reads_early_too(monkeypatch):
    asked = []

    def plan(layer):
        asked.append(layer.product.prefetch_weight)
        return Steps(None, ready(lambda *_: None, prefetches_weight=True))

    monkeypatch.setattr(import_module("fp8core.ops.linear"), "LINEAR", SimpleNamespace(plan=plan))
    x, weight = (
        TensorSpec("x", "bfloat16", (4, 64), (64, 1), H200),
        TensorSpec("", "float8_e4m3fn", (8, 64), (64, 1), H200),
    )
    scale = TensorSpec("weight_scale", "float32", (1,), (1,), H200)
    options = LinearOptions(PER_TOKEN, None, None, True, False)
    LINEAR_CALLS.describe((x, weight, scale, None, None, None, None), options).plan().prefetching()
    assert asked == [False, True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("m", "n"), [(0, 8), (4, 0)])
def test_nothing_is_planned_for_a_result_without_elements(m, n, dtype):
    x = TensorSpec("x", dtype, (m, 64), (64, 1), H200)
    weight = TensorSpec("weight", "float8_e4m3fn", (n, 64), (64, 1), H200)
    weight_scale, input_scale = (TensorSpec("", "float32", (1,), (1,), H200) for _ in range(2))
    operands = x, weight, weight_scale, None, input_scale if dtype.startswith("float8") else None, None, None
    described = LINEAR_CALLS.describe(operands, LinearOptions(PER_TOKEN, None, None, True, False))
    assert described.plan() == Planned(None)


@pytest.mark.parametrize("rows", [0, 1, 3, 65, 300])
@pytest.mark.parametrize("cols", [64, 100])
@pytest.mark.parametrize("group", [PER_TENSOR, PER_TOKEN, GROUP_128], ids=str)
def test_codes_and_scales_have_room_of_their_own_in_the_scratch(rows, cols, group):
    x = TensorSpec("x", "bfloat16", (rows, cols), (cols, 1), H200)
    q = codes_in_scratch(x, "float8_e4m3fn", group, None, None, None)
    assert q.stride >= cols
    assert (q.codes.strides, q.stride % 16) == ((q.stride, 1), 0)  # as the product reads them and kernels need them
    assert q.scale_offset >= rows * q.stride
    assert q.bytes >= q.scale_offset + 4 * prod(q.scale.shape)
    assert q.scale_offset % 256 == q.bytes % 256 == 0
    given = codes_in_scratch(x, "float8_e4m3fn", group, TensorSpec("scale", "float32", (1,), (1,), H200), None, None)
    assert (given.scale_offset, given.bytes) == (None, q.scale_offset)


@pytest.mark.parametrize("given", [False, True])
def test_the_product_has_its_scratch_behind_codes_and_scales(given):
    x = TensorSpec("x", "bfloat16", (65, 100), (100, 1), H200)
    scale = TensorSpec("scale", "float32", (1,), (1,), H200) if given else None
    q, seen = codes_in_scratch(x, "float8_e4m3fn", PER_TOKEN, scale, None, None), []
    quantize = SimpleNamespace(bind=lambda numbers: lambda *addresses: seen.append(addresses))
    multiply = ready(lambda *addresses: seen.append(addresses), scratch_bytes=1000)
    made = planned(lambda prefetch: Steps(quantize, multiply), q)
    assert (made.scratch_bytes, made.prefetching) == (q.bytes + 1000, None)
    assert planned(lambda prefetch: Steps(None, multiply), q).scratch_bytes == 1000
    made.launch(7, *range(1, 8), 1 << 20)
    of_x = 5 if given else (1 << 20) + q.scale_offset
    assert seen == [
        (7, 1, 1 << 20, of_x, 6),
        (7, 1 << 20, 2, of_x, 3, 4, 7, 0, 0, (1 << 20) + q.bytes),
    ]
