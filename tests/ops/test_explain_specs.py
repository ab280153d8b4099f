"""`explain` without arrays: specs, meta and fake tensors, shapes of JAX, and targets by name."""

import re

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core import PER_CHANNEL, ArraySpec
from fp8core.ops.targets import MODELS, TARGETS, target_of
from fp8core.target import native_e4m3
from support.host_arrays import Exporter
from support.targets import H200, MI250

SPEC = ArraySpec((16, 4096), "bfloat16")
CODES = ArraySpec((16, 4096), "float8_e4m3fn")
PER_ROW = ArraySpec((16, 1), "float32")
ONE = ArraySpec((1,), "float32")
WEIGHT = fp8core.Quantized(ArraySpec((8192, 4096), "float8_e4m3fn"), ArraySpec((8192, 1), "float32"), PER_CHANNEL)
WITHOUT_ARRAYS = {
    "quantize": (fp8core.quantize, (SPEC,), {"group_shape": (1, 128)}, "Quantize"),
    "quantize, given": (fp8core.quantize, (SPEC,), {"scale": ONE, "out": CODES}, "Quantize"),
    "dequantize": (fp8core.dequantize, (CODES, PER_ROW), {}, "Dequantize"),
    "per_tensor_dequantize": (fp8core.per_tensor_dequantize, (CODES, 0.5), {}, "Dequantize"),
    "rms_norm_quant": (
        fp8core.rms_norm_quant,
        (SPEC, ArraySpec((4096,), "bfloat16"), 1e-6),
        {"residual": SPEC},
        "NormQuantize",
    ),
    "silu_and_mul_quant": (fp8core.silu_and_mul_quant, (SPEC,), {}, "SiluQuantize"),
    "scaled_mm": (fp8core.scaled_mm, (CODES, WEIGHT.data.T, PER_ROW, WEIGHT.scale.T), {}, "ScaledMm"),
    "scaled_mm_nt": (fp8core.scaled_mm_nt, (CODES, WEIGHT.data, 1.0, 2.0), {"amax": ONE}, "ScaledMm"),
    "scaled_mm, Quantized": (fp8core.scaled_mm, (fp8core.Quantized(CODES, PER_ROW), WEIGHT.T), {}, "ScaledMm"),
    "grouped_scaled_mm_nt": (
        fp8core.grouped_scaled_mm_nt,
        (CODES, ArraySpec((8, 512, 4096), "float8_e4m3fn"), PER_ROW, ArraySpec((8, 512, 1), "float32")),
        {"offs": ArraySpec((8,), "int32"), "bias": ArraySpec((8, 512), "bfloat16")},
        "GroupedMm",
    ),
    "moe_permute": (fp8core.moe_permute, (SPEC, ArraySpec((16, 8), "int64"), 64), {}, "MoePermute"),
    "moe_permute, Quantized": (
        fp8core.moe_permute,
        (fp8core.Quantized(CODES, PER_ROW), ArraySpec((16, 8), "int32"), 64),
        {},
        "MoePermute",
    ),
    "moe_unpermute": (
        fp8core.moe_unpermute,
        (SPEC, ArraySpec((2, 8), "int32"), ArraySpec((2, 8), "float32")),
        {"out": ArraySpec((2, 4096), "bfloat16")},
        "MoeUnpermute",
    ),
    "linear": (fp8core.linear, (SPEC, WEIGHT), {"bias": ArraySpec((8192,), "float32")}, "ScaledMm"),
    "linear of FP8": (fp8core.linear, (CODES, WEIGHT), {"input_scale": 1.0}, "ScaledMm"),
    "requantize_with_max_scale": (fp8core.requantize_with_max_scale, (CODES, ONE, [8, 8]), {}, "Requantize"),
    "convert_to_channelwise": (fp8core.convert_to_channelwise, (ONE, [8, 8]), {}, "Expand"),
    "normalize": (fp8core.normalize_e4m3fn_to_e4m3fnuz, (CODES, ONE, None), {}, "Normalize"),
    "all_close_1d": (fp8core.all_close_1d, (ONE,), {}, "AllClose"),
}


@pytest.mark.parametrize("name", ["host", "sm_80", "sm_90", "sm_100", "gfx942", "gfx950"])
@pytest.mark.parametrize("case", WITHOUT_ARRAYS)
def test_calls_without_arrays_are_explained_for_any_target(case, name):
    function, args, kwargs, problem = WITHOUT_ARRAYS[case]
    got = fp8core.explain(function, *args, target=name, **kwargs)
    assert type(got.problem).__name__ == problem
    assert str(got.problem.target) == name
    assert [v.status for v in got.verdicts].count("chosen") == 1
    assert got.short.endswith(f"{problem}: {got.chosen}")
    assert f"{name} (device" not in str(got)


def array_of(spec):
    """Return a NumPy array as a spec says."""
    if isinstance(spec, fp8core.Quantized):
        return fp8core.Quantized(array_of(spec.data), array_of(spec.scale), spec.group_shape)
    if not isinstance(spec, ArraySpec):
        return spec
    dtype = np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype))
    least = np.ones(spec.shape[::-1], dtype).T if spec.strides != ArraySpec(spec.shape, spec.dtype).strides else None
    return np.ones(spec.shape, dtype) if least is None else least


@pytest.mark.parametrize("name", ["host", "sm_90", "gfx942"])
@pytest.mark.parametrize("case", WITHOUT_ARRAYS)
def test_arrays_are_explained_as_their_specs_are(case, name):
    function, args, kwargs, _ = WITHOUT_ARRAYS[case]
    arrays = [array_of(x) for x in args]
    given = {key: array_of(x) for key, x in kwargs.items()}
    assert str(fp8core.explain(function, *arrays, target=name, **given)) == str(
        fp8core.explain(function, *args, target=name, **kwargs)
    )


def without_memory(kind, x):
    """Return what frameworks have for a shape and a dtype without memory, and what is none of these as it is."""
    if isinstance(x, fp8core.Quantized):
        return fp8core.Quantized(without_memory(kind, x.data), without_memory(kind, x.scale), x.group_shape)
    if not isinstance(x, ArraySpec):
        return x
    if kind == "jax":
        jax = pytest.importorskip("jax")
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if x.strides == ArraySpec(x.shape, x.dtype).strides else x
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, x.dtype)
    if kind == "meta":
        return torch.empty_strided(x.shape, x.strides, dtype=dtype, device="meta")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty_strided(x.shape, x.strides, dtype=dtype, device="cpu")


@pytest.mark.parametrize("kind", ["jax", "meta", "fake"])
@pytest.mark.parametrize("case", WITHOUT_ARRAYS)
def test_arrays_without_memory_are_explained_as_specs_are(case, kind):
    function, args, kwargs, _ = WITHOUT_ARRAYS[case]
    given = [without_memory(kind, x) for x in args]
    options = {key: without_memory(kind, x) for key, x in kwargs.items()}
    for target in ("host", "sm_90", "gfx942", None):
        assert str(fp8core.explain(function, *given, target=target, **options)) == str(
            fp8core.explain(function, *args, target=target, **kwargs)
        )


def test_a_product_of_nothing_that_no_kernel_takes_is_explained_so_and_made():
    a, weight = (fp8core.quantize(np.ones((rows, 32), np.float32), dtype="float8_e5m2") for rows in (0, 4))
    assert fp8core.explain(fp8core.scaled_mm_nt, a, weight).chosen is None
    assert fp8core.scaled_mm_nt(a, weight).shape == (0, 4)


@pytest.mark.parametrize("name", ["sm_90", "sm_80", "gfx942", "host"])
@pytest.mark.parametrize("empty", ["m", "n", "k"])
def test_a_linear_of_nothing_is_explained(empty, name):
    """Layouts divide channels among blocks, of which there are none."""
    for m in (1, 16, 33, 64, 65):
        (rows, n, k), e4m3 = ({"m": m, "n": 64, "k": 1024, empty: 0}.values(), native_e4m3(target_of(name)))
        weight = fp8core.Quantized(ArraySpec((n, k), e4m3), ArraySpec((n, 1), "float32"), PER_CHANNEL)
        told = fp8core.explain(fp8core.linear, ArraySpec((rows, k), "bfloat16"), weight, target=name)
        assert told.chosen
        assert str(told)


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (lambda codes: fp8core.explain(fp8core.dequantize, codes, 1.0, target="sm_90"), "dequantize"),
        (
            lambda codes: fp8core.explain(fp8core.requantize_with_max_scale, codes, ONE, [2], target="sm_90"),
            "requantize",
        ),
    ],
)
def test_more_columns_than_a_kernel_counts_are_explained_as_the_call_refuses_them(call, kernel):
    assert call(ArraySpec((2, (1 << 31) - 1), "float8_e4m3fn")).chosen == kernel
    told = call(ArraySpec((2, 1 << 31), "float8_e4m3fn"))
    assert told.chosen is None
    assert "needs less than 2**31 columns" in str(told)


def test_memory_that_is_there_is_looked_at():
    torch = pytest.importorskip("torch")
    x = torch.zeros(65, 64)[:, 1:33]  # not aligned
    assert fp8core.explain(fp8core.quantize, x, target="sm_90").chosen == "rowwise_unaligned"


def test_an_exporter_is_explained_by_what_it_exports():
    class Bare(Exporter):
        @property
        def shape(self):
            raise RuntimeError("ask DLPack")

    x = Bare(np.ones((3, 64), np.float32), "float32")
    assert fp8core.explain(fp8core.quantize, x).chosen == "host"


@pytest.mark.parametrize("dtype", ["float64", "int16"])
def test_arrays_without_memory_of_other_dtypes_are_refused(dtype):
    torch = pytest.importorskip("torch")
    x = torch.empty(4, 64, dtype=getattr(torch, dtype), device="meta")
    with pytest.raises(fp8core.DTypeError, match=r"x needs one of .*got"):
        fp8core.explain(fp8core.quantize, x, target="sm_90")


def test_extents_are_whole_numbers_of_any_kind_and_no_symbols():
    jax = pytest.importorskip("jax")
    for shape in (jax.export.symbolic_shape("b, 64"), (-4, 64)):
        with pytest.raises(fp8core.ShapeError, match="x needs extents that are numbers of at least 0, got shape"):
            fp8core.explain(fp8core.quantize, jax.ShapeDtypeStruct(shape, "float32"), target="sm_90")
    told = fp8core.explain(fp8core.quantize, jax.ShapeDtypeStruct((np.int64(4), 64), "float32"), target="sm_90")
    assert told.chosen == "rowwise"


def test_a_target_of_one_s_own():
    for target, name in ((H200, "sm_90 (device 0)"), (H200._replace(device=-1), "sm_90"), (MI250, "gfx90a (device 0)")):
        assert str(fp8core.explain(fp8core.quantize, SPEC, target=target).problem.target) == name


def test_the_host_by_name_asks_for_no_devices(monkeypatch):
    monkeypatch.setattr("fp8core.runtime.device.count", lambda: pytest.fail("the driver was asked"))
    assert fp8core.explain(fp8core.quantize, SPEC, target="host").chosen == "host"
    assert fp8core.capabilities("host")["scaled_mm_block"].able


@pytest.mark.parametrize("name", ["h100", "H200"])
def test_a_model_of_gpu_is_refused_with_the_architectures_of_models(name):
    assert {*MODELS, "host"} == {*TARGETS}
    with pytest.raises(fp8core.DeviceError, match=rf"sm_90 \(H100, H200\), .* or gfx1201 \(.*\), got '{name}'"):
        fp8core.explain(fp8core.quantize, SPEC, target=name)


@pytest.mark.parametrize("target", ["sm_91", "cuda", 5, "SM_90"])
def test_what_is_no_target(target, monkeypatch):
    monkeypatch.setattr("fp8core.runtime.device.count", lambda: 0)
    monkeypatch.setattr("fp8core.runtime.device.why_none", lambda: "there is none")
    with pytest.raises(fp8core.DeviceError, match=r"^target needs .*, got "):
        fp8core.explain(fp8core.quantize, SPEC, target=target)
    with pytest.raises(fp8core.DeviceError, match=r"^device needs .*, got "):
        fp8core.capabilities(target)


@pytest.mark.parametrize(
    ("field", "wrong", "needs"),
    [
        ("platform", "x", "platform cuda or hip, got 'x'"),
        ("platform", "host", "platform cuda or hip, got 'host'"),
        ("platform", ["cuda"], "platform cuda or hip, got ['cuda']"),
        ("arch", "90", "arch to be a whole number from 1, got '90'"),
        ("device", -2, "device to be a whole number from -1, got -2"),
        ("multiprocessors", 0, "multiprocessors to be a whole number from 1, got 0"),
        ("multiprocessors", 1.5, "multiprocessors to be a whole number from 1, got 1.5"),
        ("shared_bytes", 227, "shared_bytes to be a whole number from 49152, got 227"),
        ("warp", 64, "warp 32 on cuda, got 64"),
    ],
)
def test_a_target_that_no_device_is_like_is_refused(field, wrong, needs):
    target = TARGETS["sm_90"]._replace(**{field: wrong})
    with pytest.raises(fp8core.DeviceError, match=f"^target needs {re.escape(needs)}$"):
        fp8core.explain(fp8core.quantize, SPEC, target=target)
    with pytest.raises(fp8core.DeviceError, match=f"^device needs {re.escape(needs)}$"):
        fp8core.capabilities(target)


@pytest.mark.parametrize("wrong", [0.5, [0], b"sm_90", object()], ids=lambda wrong: type(wrong).__name__)
def test_what_is_no_ordinal_is_refused_beside_gpus_too(wrong, monkeypatch):
    monkeypatch.setattr("fp8core.runtime.device.count", lambda: 2)
    with pytest.raises(fp8core.DeviceError, match=f"device needs a Target, its .*, got .*{type(wrong).__name__}"):
        fp8core.capabilities(wrong)


@pytest.mark.parametrize("ordinal", [1, 1.0, True])
def test_ordinals_that_are_equal_are_one_target(ordinal, monkeypatch):
    asked = []
    monkeypatch.setattr("fp8core.runtime.device.count", lambda: 2)
    monkeypatch.setattr("fp8core.runtime.device.target", lambda at: asked.append(at) or H200._replace(device=at))
    assert str(target_of(ordinal)) == "sm_90 (device 1)"
    assert type(asked[0]) is int


def test_a_named_target_is_the_one_of_this_machine_if_there_is_one(monkeypatch):
    here = [H200._replace(multiprocessors=78), H200._replace(device=1)]
    monkeypatch.setattr("fp8core.runtime.device.count", lambda: 2)
    monkeypatch.setattr("fp8core.runtime.device.target", here.__getitem__)
    assert target_of("sm_90") == here[0]
    assert target_of("sm_89").device == -1


def test_specs_are_refused_where_a_call_is_made():
    with pytest.raises(fp8core.DTypeError, match="x needs an array that offers DLPack"):
        fp8core.quantize(SPEC)


def test_alignment_and_strides_of_a_spec_count():
    rows = ArraySpec((16, 64), "float32", strides=(65, 1), alignment=4)
    assert fp8core.explain(fp8core.quantize, rows, target="sm_90").chosen == "rowwise_unaligned"
    assert fp8core.explain(fp8core.quantize, ArraySpec((16, 64), "float32"), target="sm_90").chosen == "rowwise"
    assert repr(rows) == "ArraySpec((16, 64), 'float32', strides=(65, 1), alignment=4)"
    assert repr(ArraySpec([2, 3], np.float32).T) == "ArraySpec((3, 2), 'float32', strides=(1, 3))"
    with pytest.raises(fp8core.LayoutError, match="x needs rows in ascending order"):
        fp8core.explain(fp8core.quantize, ArraySpec((4, 8), "float32", strides=(-8, 1)), target="sm_90")


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        (((2, -1), "float32"), {}, fp8core.ShapeError),
        (((2, 1.5), "float32"), {}, fp8core.ShapeError),
        ((16, "float32"), {}, fp8core.ShapeError),
        (("16", "float32"), {}, fp8core.ShapeError),
        (((2, 2), "float64"), {}, fp8core.DTypeError),
        (((2, 2), "float32"), {"strides": (2,)}, fp8core.LayoutError),
        (((2, 2), "float32"), {"strides": "21"}, fp8core.LayoutError),
        (((2, 2), "float32"), {"alignment": 2}, fp8core.LayoutError),
        (((2, 2), "float32"), {"alignment": 24}, fp8core.LayoutError),
        (((2, 2), "float32"), {"alignment": "16"}, fp8core.LayoutError),
    ],
    ids=str,
)
def test_specs_that_no_array_can_have_are_refused(arguments, options, error):
    with pytest.raises(error, match=r"needs .*, got "):
        ArraySpec(*arguments, **options)
