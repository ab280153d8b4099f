"""Models of transformers on a GPU: the results of the CPU, in every format, with experts, compiled and trained."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import fp8core.torch  # noqa: E402 - after the skips
from fp8core.torch import Linear  # noqa: E402
from fp8core.transformers import Experts, Fp8CoreConfig, GroupedExperts, from_pretrained  # noqa: E402
from huggingface import cases  # noqa: E402
from huggingface.cases import TOKENS, config_of, distance, logits, same, tensors_of, written  # noqa: E402
from support import checkpoint_formats as formats  # noqa: E402

pytestmark = pytest.mark.models
NEAR = 0.06
"""CPU and GPU sum in other orders, in attention and norms too, and round codes that lie between two others apart."""


def on_gpu(model):
    return logits(model, TOKENS.cuda()).cpu()


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "writer",
    [
        formats.deepseek,
        formats.deepseek_v4,
        formats.hf_static,
        formats.fbgemm,
        formats.modelopt,
        formats.ct_static,
        formats.ct_tensor,
        formats.ct_channel,
        formats.ct_block,
    ],
    ids=lambda writer: writer.__name__,
)
def test_a_checkpoint_of_any_format_runs_on_the_gpu(writer, kind, tmp_path):
    wanted = written(kind, tmp_path / "wide")
    formats.write_format(writer, tmp_path / "fp8", tensors_of(tmp_path / "wide"), config_of(tmp_path / "wide"))
    model = from_pretrained(tmp_path / "fp8", device_map="cuda")
    assert all(parameter.is_cuda for parameter in model.parameters())
    blocks = writer in (formats.deepseek, formats.deepseek_v4, formats.ct_block)  # which would lie in gate and up
    experts = {type(module) for module in model.modules()} & {Experts, GroupedExperts}
    assert experts == ({Experts if blocks else GroupedExperts} if kind == "qwen3_moe" else set())
    found = on_gpu(model)
    assert distance(found, logits(from_pretrained(tmp_path / "fp8"))) < NEAR
    assert 0.001 < distance(found, wanted) < 0.15


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
def test_quantized_on_the_gpu(scheme, tmp_path, monkeypatch):
    """The bits are those of the CPU."""
    monkeypatch.setitem(cases.EXPERTS, "moe_intermediate_size", 256)
    written("qwen3_moe", tmp_path)
    asked = Fp8CoreConfig(scheme=scheme)
    model = from_pretrained(tmp_path, quantization_config=asked, device_map="cuda")
    assert any(isinstance(module, GroupedExperts) for module in model.modules())
    other = from_pretrained(tmp_path, quantization_config=asked).state_dict()
    assert [name for name, value in model.state_dict().items() if not same(value.cpu(), other[name])] == []
    assert distance(on_gpu(model), logits(from_pretrained(tmp_path, quantization_config=asked))) < NEAR


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_compiled_and_in_a_graph(kind, tmp_path):
    written(kind, tmp_path)
    model = from_pretrained(tmp_path, device_map="cuda")
    tokens = TOKENS.cuda()
    fp8core.torch.warm_up(model, rows=[tokens.numel()])
    with torch.no_grad():
        wanted = model(tokens, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        assert distance(compiled(tokens, use_cache=False).logits.float(), wanted.float()) < NEAR
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compiled(tokens, use_cache=False).logits
        tokens.copy_(TOKENS.flip(0))
        graph.replay()
        assert distance(result.float(), wanted.flip(0).float()) < NEAR


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_adapters_learn(kind, tmp_path):
    peft = pytest.importorskip("peft")
    written(kind, tmp_path)
    model = from_pretrained(tmp_path, device_map="cuda")
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    tokens, losses = TOKENS.cuda(), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = tuned(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not any(p.requires_grad for layer in model.modules() if isinstance(layer, Linear) for p in (layer.weight,))
