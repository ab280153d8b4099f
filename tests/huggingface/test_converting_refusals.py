"""What `convert_` and its inverses refuse, before anything is replaced."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402 - after the skips
from transformers.integrations import finegrained_fp8  # noqa: E402

from fp8core.errors import CheckpointError, DeviceError, DTypeError, LayoutError  # noqa: E402
from fp8core.transformers import (  # noqa: E402
    convert_,
    group_experts_,
    split_experts_,
)
from huggingface.cases import (  # noqa: E402
    random_model,
)
from huggingface.foreign_layers import channelwise, of_fbgemm  # noqa: E402


@pytest.mark.parametrize("beside", ["weight_zero_point", "pre_quant_scale"])
def test_layers_that_are_more_than_codes_and_scales_are_refused(beside):
    model = nn.Sequential(of_fbgemm(*channelwise()[:2]), of_fbgemm(*channelwise()[:2]))
    model[1].register_buffer(beside, torch.ones(48, 1))
    before = list(model.modules())
    with pytest.raises(CheckpointError, match=rf"needs layers of FP8 codes and scales, got 1\.{beside}, which is of"):
        convert_(model)
    assert list(model.modules()) == before


@pytest.mark.parametrize(
    ("parameter", "shape"), [("down_proj", (64, 64)), ("down_proj", (64,)), ("kernel", (64, 64)), ("weight", (64, 64))]
)
def test_fp8_parameters_of_what_is_no_layer_are_refused_by_name(parameter, shape):
    model = nn.Sequential(of_fbgemm(*channelwise()[:2]), nn.Module())
    model[1].register_parameter(parameter, nn.Parameter(torch.ones(shape).to(torch.float8_e4m3fn), False))
    before = list(model.modules())
    words = f"needs FP8 weights of linear layers or of stacked experts, got 1.{parameter} in a Module$"
    with pytest.raises(CheckpointError, match=words):
        convert_(model)
    assert list(model.modules()) == before


def test_a_static_scale_beside_scales_of_blocks_is_refused_with_the_layer_s_name():
    layer = finegrained_fp8.FP8Linear(128, 128, block_size=(128, 128), activation_scheme="static")
    with pytest.raises(
        CheckpointError, match="0 needs scales per tensor or channel beside activation_scale, got blocks"
    ):
        convert_(nn.Sequential(layer))


@pytest.mark.parametrize("change", [convert_, split_experts_, group_experts_])
def test_what_is_no_model_is_refused_by_its_type(change):
    with pytest.raises(DTypeError, match=r"^model needs a torch\.nn\.Module, got str$"):
        change("meta-llama/Llama-3.1-8B")


def test_a_layer_alone_is_refused():
    with pytest.raises(LayoutError, match="model needs to hold what is replaced in it, got a FbgemmFp8Linear alone"):
        convert_(of_fbgemm(*channelwise()[:2]))


def test_layers_that_are_several_products_are_refused():
    """A plain layer in the place of one, such as DeepSeek V4 has, would multiply every input with all of its weights."""
    several = finegrained_fp8.FP8GroupedLinear(128, 256, 2, block_size=(128, 128))
    model = nn.Sequential(of_fbgemm(*channelwise()[:2]), several)
    before = list(model.modules())
    with pytest.raises(CheckpointError, match="needs FP8 layers of one product each, got 1, a FP8GroupedLinear of 2"):
        convert_(model)
    assert list(model.modules()) == before


def of_stacked_experts():
    experts = nn.Module()
    experts.down_proj = nn.Parameter(torch.zeros(2, 8, 8).to(torch.float8_e4m3fn), requires_grad=False)
    return experts


def quantized_by_compressed_tensors(layer):
    pytest.importorskip("compressed_tensors.quantization.lifecycle.forward").set_forward_quantized(layer)


HOOKED, PATCHED = "without hooks, got some on {}: remove them first", "the forward of their class, got another on {}$"


@pytest.mark.parametrize("made", [lambda: of_fbgemm(*channelwise()[:2]), of_stacked_experts], ids=["layer", "experts"])
@pytest.mark.parametrize(
    ("add", "match"),
    [
        (lambda layer: layer.register_forward_pre_hook(lambda *_: None), HOOKED),
        (lambda layer: layer.register_forward_hook(lambda *_: None), HOOKED),
        (lambda layer: setattr(layer, "forward", print), PATCHED),
        (quantized_by_compressed_tensors, PATCHED),
    ],
    ids=["pre_hook", "hook", "forward", "compressed-tensors"],
)
def test_layers_that_would_lose_something_are_refused_before_anything_is_replaced(add, match, made):
    """With a hook compressed-tensors transforms a layer's inputs, whose weight is that of the transformed ones."""
    model = nn.Sequential(of_fbgemm(*channelwise()[:2]), made())
    add(model[1])
    before = list(model.modules())
    with pytest.raises(LayoutError, match=match.format(1)):
        convert_(model)
    assert list(model.modules()) == before


@pytest.mark.parametrize(
    ("n", "k", "blocks", "scale"),
    [
        (128, 128, (64, 64), (2, 2)),
        (192, 128, (96, 128), (2, 1)),  # as many as blocks of 128x128 have
        (200, 200, (256, 256), (1, 1)),
        (128, 128, (2, 64), (64, 2)),  # as many as rows
        (128, 128, (128, 128), (3, 1)),
    ],
)
def test_scales_of_other_blocks_are_refused(n, k, blocks, scale):
    layer = finegrained_fp8.FP8Linear(k, n, block_size=blocks)
    layer.weight_scale_inv = nn.Parameter(torch.ones(scale), requires_grad=False)
    model = nn.Sequential(layer)
    words = rf"0 needs scales .* by blocks of 128x128, got \[{scale[0]}, {scale[1]}\] by blocks of \[{blocks[0]}, "
    with pytest.raises(CheckpointError, match=words):
        convert_(model)
    assert model[0] is layer


@pytest.mark.parametrize("change", [convert_, split_experts_])
def test_what_accelerate_has_offloaded_is_refused_before_anything_is_replaced(change):
    accelerate = pytest.importorskip("accelerate")
    if change is split_experts_:
        model, name = random_model("qwen3_moe"), "model.layers.0.mlp.experts"
    else:
        layers = [of_fbgemm(*channelwise()[:2]) for _ in range(2)]
        model, name = nn.Sequential(*layers), "1"
    accelerate.cpu_offload(model.get_submodule(name), execution_device="cpu")
    before = list(model.modules())
    with pytest.raises(DeviceError, match=f"model needs its weights in memory, got {name} offloaded"):
        change(model)
    assert list(model.modules()) == before


@pytest.mark.parametrize(
    ("add", "match"),
    [
        (lambda experts: experts.register_forward_hook(lambda *_: None), HOOKED),
        (lambda experts: setattr(experts, "forward", print), PATCHED),
    ],
    ids=["hook", "forward"],
)
def test_experts_that_would_lose_something_are_not_split(add, match):
    model = random_model("qwen3_moe")
    add(model.model.layers[1].mlp.experts)
    before = list(model.modules())
    with pytest.raises(LayoutError, match=match.format(r"model\.layers\.1\.mlp\.experts")):
        split_experts_(model)
    assert list(model.modules()) == before
