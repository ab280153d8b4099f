"""Converted checkpoints load in transformers, and give the logits of what they were made from."""

from functools import cache

import pytest

from fp8core.checkpoint import convert_checkpoint, verify_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import checkpoint_formats as written  # noqa: E402
from support.checkpoint_formats import FORMATS, write_format  # noqa: E402
from support.models import llama  # noqa: E402

TOKENS = torch.arange(48).reshape(2, 24)


def qwen3():
    config = transformers.Qwen3Config(
        vocab_size=128, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


@cache
def made(make):
    torch.manual_seed(0)
    return make().eval().float()


def cases(writers, few):
    """Every writer with one model, and some with another."""
    found = [(llama, writer) for writer in writers] + [(qwen3, writer) for writer in few]
    return pytest.mark.parametrize(("make", "writer"), found, ids=lambda one: one.__name__)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.float()


def written_model(model, writer, folder):
    """Write a model in a format; return the same model with the weights that the codes stand for, in float32."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    out = write_format(writer, folder, state, model.config.to_dict())
    meant = type(model)(model.config).eval()
    meant.load_state_dict({**state, **out.expected})
    return meant


@cases(FORMATS, (written.deepseek, written.ct_channel, written.modelopt))
def test_bf16_gives_the_logits_of_what_the_codes_stand_for(tmp_path, make, writer):
    model = made(make)
    meant = written_model(model, writer, tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", to="bf16")
    loaded, report = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    want, got = logits(meant), logits(loaded.eval())
    assert (got - want).norm() <= 0.01 * want.norm()  # bfloat16 rounds weights by up to 2**-9
    assert (want - logits(model)).norm() > 0.01 * want.norm()


@pytest.mark.parametrize("to", ["channel", "tensor", "block", "deepseek"])
@cases((written.hf_static, written.modelopt, written.comfyui_new), (written.ct_tensor,))
def test_fp8_that_kept_its_codes_gives_the_same_logits(tmp_path, make, writer, to):
    model = made(make)
    meant = written_model(model, writer, tmp_path / "in")
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to)
    assert not done.lossy
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    want, got = logits(meant), logits(loaded)
    # compressed-tensors quantizes activations, too; the dequantized fp8 is bfloat16 in places.
    assert (got - want).norm() <= 0.08 * want.norm()
    assert (got - logits(model)).norm() < 0.2 * want.norm()
    assert not verify_checkpoint(tmp_path / "out").faults


SAME = [(written.deepseek, "block"), (written.ct_block, "deepseek"), (written.fbgemm, "channel")]


@pytest.mark.parametrize(("writer", "to"), SAME)
def test_other_formats_of_the_same_granularity_give_the_same_logits(tmp_path, writer, to):
    model = made(llama)
    meant = written_model(model, writer, tmp_path / "in")
    assert not convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to).lossy
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert (logits(loaded) - logits(meant)).norm() <= 0.08 * logits(meant).norm()


def test_mxfp8_gives_the_logits_of_what_the_codes_stand_for(tmp_path):
    model = made(llama)
    meant = written_model(model, written.deepseek_powers, tmp_path / "in")
    assert not convert_checkpoint(tmp_path / "in", tmp_path / "out", to="mxfp8").lossy
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )  # in which its reader gives the weights
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    want, got = logits(meant), logits(loaded.eval()).float()
    assert (got - want).norm() <= 0.1 * want.norm()
    assert (want - logits(model)).norm() > 0.01 * want.norm()
