"""Calls that are planned for a device that is not in this machine ask for the kernels that they would run there."""

from dataclasses import replace

import pytest

import fp8core
from bench.choice_records import on
from fp8core import BLOCK_128, GROUP_128, PER_TOKEN, ArraySpec, Quantized, tuning
from fp8core.checkpoint.shapes.kernels import kernels_of
from fp8core.checkpoint.shapes.linear import LayerShape
from fp8core.core.ahead import PlanRequest, plan_ahead
from fp8core.core.explaining import answer_of
from fp8core.kernels.gemm import corrections
from fp8core.kernels.gemm.generic import ClearArgs
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.linear import linear
from fp8core.ops.targets import TARGETS
from fp8core.runtime import device, jit
from fp8core.table import Choice
from fp8core.target import ABSENT
from fp8core.tuning import values
from fp8core.tuning.files import FILE_VARIABLE, load_named, named_ahead
from fp8core.tuning.shapes import layer_call, layer_product
from support.ahead import absent, forget
from support.targets import ADA, H200, MI300
from support.tunings import forget_all
from support.warm import Nothing

FP8 = "float8_e4m3fn"


def weight(n, k, shape, group, fp8=FP8):
    return Quantized(ArraySpec((n, k), fp8), ArraySpec(shape, "float32"), group)


CALLS = {
    "linear, per token": lambda m: (fp8core.linear, (ArraySpec((m, 4096), "bfloat16"), weight(1024, 4096, (1024, 1), (1, -1)))),
    "linear, blocks": lambda m: (
        fp8core.linear,
        (ArraySpec((m, 4096), "bfloat16"), weight(1024, 4096, (8, 32), BLOCK_128)),
        {"group_shape": GROUP_128},
    ),
    "quantize": lambda m: (fp8core.quantize, (ArraySpec((m, 1000), "float16"),), {"group_shape": PER_TOKEN}),
    "grouped": lambda m: (
        fp8core.grouped_scaled_mm_nt,
        (
            *(ArraySpec((m, 256), FP8), ArraySpec((8, 512, 256), FP8)),
            *(ArraySpec((m, 1), "float32"), ArraySpec((8, 512, 1), "float32")),
        ),
        {"offs": ArraySpec((8,), "int32")},
    ),
    "moe_permute": lambda m: (fp8core.moe_permute, (ArraySpec((m, 256), "bfloat16"), ArraySpec((m, 8), "int64"), 64)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def forgotten():
    """Drop plans before and after: those of a test are for stand-ins."""
    forget()
    yield
    forget()


def there(monkeypatch, target, function, args, kwargs=None):
    """Return the kernels that a machine with the device prepares for the same call: source, entry and constants."""
    asked = {}

    def prepare(target, source, entry, constants, *_, **__):
        asked[source, entry, tuple(constants.items())] = None
        return Nothing()

    monkeypatch.setattr(jit, "prepare", prepare)
    answer_of(function, PlanRequest(target), *args, **(kwargs or {}))
    monkeypatch.undo()
    return set(asked)


@pytest.mark.parametrize("target", [H200, ADA], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize("call", CALLS)
def test_they_are_those_of_a_machine_with_the_device(monkeypatch, call, rows, target):
    made = CALLS[call](rows)
    wanted = there(monkeypatch, target, *made)
    function, args, kwargs = (*made, {})[:3]
    plan_ahead(function, absent(target), *args, **kwargs)
    found = {kernel[1:] for kernel in jit.ASKED}
    assert found == wanted
    assert found
    assert {kernel.target for kernel in jit.ASKED} == {absent(target)}


LLAMA = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
LAYERS = [(m, LayerShape(n, k, scheme)) for n, k in LLAMA for m in (1, 64, 128, 256) for scheme in ("channel", "block")]


def planned(target):
    """Return the kernels of `LAYERS` for a target, planned for it alone."""
    jit.ASKED.clear()
    return set(kernels_of(LAYERS, "bfloat16", target))


@pytest.mark.parametrize("gpu", corrections.trees())
def test_a_model_of_gpu_gets_the_kernels_that_it_chooses_itself(monkeypatch, gpu):
    """Estimates are corrected for the model that is in the machine, and for the one that is named."""
    calls = [layer_call((m, of.n, of.k), of.scheme, "bfloat16", device=H200) for m, of in LAYERS]
    with on(gpu):
        wanted = set().union(*(there(monkeypatch, H200, linear, *call[:2]) for call in calls))
    forget()
    found = planned(TARGETS["sm_90"]._replace(model=gpu))
    assert {kernel[1:] for kernel in found} == wanted
    assert {kernel.target for kernel in found} == {absent(H200)}
    forget()
    monkeypatch.setattr(device, "name", lambda ordinal: gpu)
    assert planned(H200) == found


def test_an_architecture_stands_for_each_measured_model_and_for_others():
    of_models = [planned(TARGETS["sm_90"]._replace(model=model)) for model in ("another", *corrections.trees())]
    assert of_models[0] != of_models[1] != of_models[2] != of_models[0]
    forget()
    assert planned(TARGETS["sm_90"]) == set().union(*of_models)


TUNED = 128, LayerShape(4096, 4096, "channel")
NUMBER = 2
"""The algorithm that `tuned_for` finds to be the fastest."""


def tuned_for(gpu, made_of, kernel, version=fp8core.__version__):
    """Return a tuning of `TUNED`, as another machine has written it."""
    m, layer = TUNED
    product = layer_product((m, layer.n, layer.k), layer.scheme, "bfloat16", device=absent(H200))
    name = list(SCALED_MM.kernel("sm90_tiled").algorithms(product))[NUMBER]
    machine = tuning.Machine(gpu, 13000, 130000, version, made_of)
    chosen = tuning.Timed(kernel, NUMBER, 1.0, name)
    return tuning.Tuning(machine, chosen, chosen, (chosen,), product._replace(target=H200))


@pytest.mark.parametrize("model", ["NVIDIA H200", "NVIDIA L99", ""])
@pytest.mark.parametrize(
    ("gpu", "same", "kernel"),
    [
        ("NVIDIA H200", True, "sm90_tiled"),
        ("NVIDIA L99", True, "sm90_tiled"),
        ("NVIDIA H100 80GB HBM3", True, "sm90_tiled"),
        ("NVIDIA H200", False, "sm90_tiled"),
        ("NVIDIA H200", True, "cublaslt"),
    ],
)
def test_tunings_of_that_gpu_count_and_no_others(monkeypatch, tmp_path, model, gpu, same, kernel):
    target = TARGETS["sm_90"]._replace(model=model)
    forget_all(monkeypatch)
    without = set(kernels_of([TUNED], "bfloat16", target))
    one = tuned_for(gpu, values.digest() if same else "of others", kernel)
    SCALED_MM.planned(one._problem._replace(target=absent(H200)), Choice("sm90_tiled", NUMBER))
    of_choice = set(jit.ASKED) - without
    forget()
    monkeypatch.setenv(FILE_VARIABLE, str(tuning.save_tunings(tmp_path / "tunings.jsonl", [one])))
    counts = model in ("", gpu) and same and kernel == "sm90_tiled"
    found = set(kernels_of([TUNED], "bfloat16", target))
    assert of_choice
    assert found - without == (of_choice if counts else set())
    assert model or found >= without


def test_tunings_of_another_release_or_architecture_do_not_count(monkeypatch, tmp_path):
    one = tuned_for("NVIDIA H200", values.digest(), "sm90_tiled")
    release = tuned_for("NVIDIA H200", values.digest(), "sm90_tiled", "0.0.1")
    divided = replace(one, _problem=one._problem._replace(target=H200._replace(multiprocessors=60)))
    monkeypatch.setenv(FILE_VARIABLE, str(tuning.save_tunings(tmp_path / "x", [one, release, divided])))
    assert named_ahead(absent(H200)) == named_ahead(absent(H200)._replace(model="NVIDIA H200")) == [one]
    assert named_ahead(absent(H200)._replace(model="NVIDIA L99")) == []


def test_a_tuning_is_for_the_call_that_reads_the_weight_early_too(monkeypatch):
    forget_all(monkeypatch)
    target, one = absent(H200)._replace(model="NVIDIA H200"), tuned_for("NVIDIA H200", values.digest(), "sm90_tiled")
    before = set(kernels_of([TUNED], "bfloat16", target))
    chosen = tuning.Timed("generic_mma", 0, 1.0)
    values.apply_ahead(replace(one, chosen=chosen, timed=(chosen,)), target)
    for prefetch in (False, True):
        product = one._problem._replace(target=target, prefetch_weight=prefetch)
        assert SCALED_MM.choice(product) == ("generic_mma", 0)
    assert set(kernels_of([TUNED], "bfloat16", target)) > before  # what was planned is planned anew


@pytest.mark.parametrize(
    ("named", "said"), [("absent", "No such file"), ("~no such user/t.jsonl", "~ stands for no folder")]
)
def test_tunings_that_cannot_be_read_are_named(monkeypatch, tmp_path, named, said):
    monkeypatch.chdir(tmp_path)
    tuning.save_tunings(tmp_path / "tunings.jsonl", [tuned_for("NVIDIA H200", values.digest(), "sm90_tiled")])
    (tmp_path / "~no such user").mkdir()
    (tmp_path / "tunings.jsonl").rename(tmp_path / "~no such user" / "t.jsonl")
    monkeypatch.setenv(FILE_VARIABLE, named)
    monkeypatch.setattr(SCALED_MM, "before", load_named)
    with pytest.warns(RuntimeWarning, match=f"which {FILE_VARIABLE} names, are not used: {said}") as caught:
        assert kernels_of([TUNED], "bfloat16", TARGETS["sm_90"])
    assert len(caught) == 1


@pytest.mark.parametrize(("target", "of_shapes"), [(H200, FP8), (MI300, "float8_e4m3fnuz")], ids=str)
def test_weights_have_the_format_and_the_rows_of_layers(target, of_shapes):
    """Layers of torch keep a file's format on every GPU, and pad rows to 16 bytes."""
    of_file = LayerShape(64, 1000, "tensor", static=True)
    for layer, dtype in ((of_file, FP8), (of_file._replace(weight_dtype=None), of_shapes)):
        x, weight = layer_call((16, 64, 1000), "tensor", "bfloat16", **layer.options, device=target).arguments
        assert (weight.data.dtype, weight.data.strides, x.strides) == (dtype, (1008, 1), (1000, 1))
        assert layer_product((16, 64, 1000), "tensor", "bfloat16", **layer.options, device=target).b == dtype


def test_a_plan_for_an_absent_device_cannot_be_launched():
    prepared = jit.prepare(absent(H200), "gemm/clear_amax", "clear_amax", {}, ClearArgs, block=1)
    launch = prepared.bind_args((1, 1, 1), ClearArgs(0))
    with pytest.raises(fp8core.DeviceError, match="clear_amax cannot be launched: sm_90 is not in this machine"):
        launch(0, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("group", [PER_TOKEN, GROUP_128], ids=str)
def test_calls_on_the_device_need_no_other_kernel(monkeypatch, group, rows):
    cupy = pytest.importorskip("cupy")
    real, needed = jit.prepare, set()

    def prepare(target, source, entry, constants, *args, **options):
        if target.device != ABSENT:
            needed.add((source, entry, tuple(constants.items())))
        return real(target, source, entry, constants, *args, **options)

    monkeypatch.setattr(jit, "prepare", prepare)
    n, k = 1024, 4096
    stored = fp8core.quantize(cupy.ones((n, k), "float16"), group_shape=(1, -1) if group == PER_TOKEN else BLOCK_128)
    specs = weight(n, k, stored.scale.shape, stored.group_shape)
    here = absent(device.target(0))._replace(model=device.name(0))
    plan_ahead(fp8core.linear, here, ArraySpec((rows, k), "float16"), specs, group_shape=group)
    needed.clear()
    layer = fp8core.Fp8Linear(stored, group_shape=group)
    x = cupy.ones((rows, k), "float16")
    for _ in range(3):  # the second call may read the weight early
        layer(x)
    chosen = fp8core.explain(layer, x).chosen
    assert needed
    assert needed <= {kernel[1:] for kernel in jit.ASKED} or chosen.startswith("cublaslt")


def test_a_call_that_is_refused_asks_for_nothing():
    with pytest.raises(fp8core.DTypeError, match="x needs"):
        plan_ahead(fp8core.quantize, absent(MI300), ArraySpec((4, 4), "int32"))
    assert not jit.ASKED
