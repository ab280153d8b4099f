"""Llama 4's experts, which transformers has transposed and stacked, from checkpoints that have them one by one."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from fp8core.checkpoint import quantize_checkpoint  # noqa: E402 - after the skips
from fp8core.errors import CheckpointError  # noqa: E402
from fp8core.torch import Linear  # noqa: E402
from fp8core.transformers import Fp8CoreConfig, from_pretrained  # noqa: E402
from fp8core.transformers.unstacking import unstack_experts  # noqa: E402
from huggingface.cases import TOKENS, distance, logits, random_model, tensors_of  # noqa: E402

SIZES = {
    "hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_hidden_layers": 2, "vocab_size": 256,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 2,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "initializer_range": 0.05,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint in bfloat16, and one that `fp8core quantize --split-experts` makes of it."""
    root = tmp_path_factory.mktemp("llama4")
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(**SIZES)
    transformers.Llama4ForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "wide")
    quantize_checkpoint(root / "wide", root / "fp8", split_experts=True)
    quantize_checkpoint(root / "wide", root / "attention", split_experts=True, exclude=["*.experts.*"])
    return root


@pytest.mark.parametrize("name", ["fp8", "attention"])
def test_experts_one_by_one_are_layers_of_their_own(folders, name, tmp_path):
    model = from_pretrained(folders / name)
    wanted = logits(from_pretrained(folders / "wide", quantization_config=Fp8CoreConfig()))
    found = logits(model)
    assert distance(found, wanted) < 0.15
    expert = model.model.layers[1].feed_forward.experts[1].up_proj
    assert isinstance(expert, Linear) == (name == "fp8")
    model.save_pretrained(tmp_path)
    assert tensors_of(tmp_path).keys() == tensors_of(folders / name).keys()
    assert torch.equal(logits(from_pretrained(tmp_path)), found)


def test_experts_of_the_text_model_in_one_of_images(tmp_path):
    """The text model's name is in all names then; it is loaded alone, too, by the class that loads models by default."""
    vision = {
        "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Llama4Config(text_config=SIZES, vision_config=vision)
    transformers.Llama4ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(tmp_path / "wide")
    quantize_checkpoint(tmp_path / "wide", tmp_path / "fp8", split_experts=True)
    found = [
        from_pretrained(tmp_path / "fp8", auto)
        for auto in (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM)
    ]
    assert [sum(isinstance(module, Linear) for module in model.modules()) for model in found] == [26, 26]
    whole, text = found
    inner = whole.language_model  # transformers 5.24 fails in the forward of the whole without images
    assert torch.equal(inner(input_ids=TOKENS).logits, text(input_ids=TOKENS).logits)


def test_experts_that_no_module_takes_one_by_one_are_refused():
    """Or they would be left out, and the model's have random values."""
    model = random_model("llama")
    model.model.layers[0].mlp.experts = torch.nn.Module()
    model.model.layers[0].mlp.experts.down_proj = torch.nn.Parameter(torch.empty(2, 4, 4))
    key = "model.layers.0.mlp.experts.1.down_proj.weight"
    with pytest.raises(
        CheckpointError, match=f"{key} needs a layer of its own in LlamaForCausalLM, got experts stacked"
    ):
        unstack_experts(model, [key])
    others = "experts.down_proj", "experts.1.down_proj.bias", "experts.router.weight", "up_proj.0.weight"
    unstack_experts(model, [f"model.layers.0.mlp.{one}" for one in others])
    unstack_experts(model, ["model.layers.7.mlp.experts.1.down_proj.weight"])
