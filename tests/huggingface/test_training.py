"""LoRA on frozen FP8 models: by PEFT, by transformers' own adapters, and in its Trainer."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402 - after the skips
from transformers import AutoModelForCausalLM  # noqa: E402

from fp8core.errors import CheckpointError  # noqa: E402
from fp8core.torch import Linear, dequantize_model_  # noqa: E402
from fp8core.transformers import from_pretrained  # noqa: E402
from huggingface.cases import TOKENS, distance, logits, same, written  # noqa: E402

TARGETS = {"llama": ["q_proj", "down_proj"], "qwen3_moe": ["q_proj", "o_proj"]}


def adapted(kind, folder):
    written(kind, folder)
    model = from_pretrained(folder)
    torch.manual_seed(5)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS[kind], lora_alpha=8))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_adapters_learn_and_the_base_stays(kind, tmp_path):
    model = adapted(kind, tmp_path)
    base = {name: value.clone() for name, value in model.state_dict().items() if "lora" not in name}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained
    assert all("lora" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        losses.append(loss.item())
        if step == 1:  # lora_B starts as zero, so that lora_A has a gradient from the second step on
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    assert parameter.grad is not None, name
                    assert parameter.grad.abs().sum() > 0, name
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    after = model.state_dict()
    assert [name for name, value in base.items() if not same(after[name], value)] == []


def test_an_adapter_is_saved_and_loaded(tmp_path):
    model = adapted("llama", tmp_path / "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    model.save_pretrained(tmp_path / "adapter")
    base = from_pretrained(tmp_path / "base")
    plain = logits(base)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(again), plain)


@pytest.mark.parametrize("way", ["function", "method"])
def test_an_adapter_is_merged_into_a_base_that_was_dequantized(way, tmp_path):
    """Sums of FP8 weights and updates do not exist; of the weights' values they do, and give the trained model."""
    model = adapted("llama", tmp_path / "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    found = logits(model)
    with pytest.raises(RuntimeError, match="Float8"):
        model.merge_adapter()
    base = model.get_base_model()
    if way == "function":
        assert len(dequantize_model_(model)) == 14
    else:
        base.dequantize()
    exact = logits(model)
    merged = model.merge_and_unload()
    assert merged is base
    assert not any(isinstance(module, Linear) or "lora" in name for name, module in merged.named_modules())
    assert distance(logits(merged), exact) < 0.02
    assert distance(logits(merged), found) < 0.15
    assert distance(exact, logits(from_pretrained(tmp_path / "base"))) > 0.2, "the update changes the model"
    if way == "function":  # whose configuration says what it was
        with pytest.raises(
            CheckpointError, match=r"needs model.layers.0.self_attn.q_proj in FP8, .* its own dequantize"
        ):
            merged.save_pretrained(tmp_path / "merged")
        assert not (tmp_path / "merged" / "config.json").exists()
        return
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(again), logits(merged))


@pytest.mark.parametrize(
    ("method", "right"),
    [*((name, True) for name in ("AdaLora", "IA3", "LoHa", "LoKr", "Lora", "OFT", "Vera")),
     *((name, False) for name in ("Deft", "Frod", "HRA", "Peanut"))],
)  # fmt: skip
def test_methods_that_call_the_layer_are_right_and_those_that_read_its_weight_see_codes(method, right, tmp_path):
    """As docs/how-to/transformers.md says: the model with FP8 layers has the logits of one with their values, or not."""
    written("llama", tmp_path)
    kind = getattr(peft, f"{method}Config", None)
    if kind is None:
        pytest.skip(f"this PEFT has no {method}")
    options = {"IA3": {"feedforward_modules": []}, "AdaLora": {"total_step": 10}}.get(method, {})
    found = []
    for values in (False, True):
        base = from_pretrained(tmp_path)
        if values:
            base.dequantize()
        torch.manual_seed(5)
        model = peft.get_peft_model(base, kind(target_modules=["q_proj"], **options)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.02 * torch.randn_like(parameter))
        found.append(logits(model))
    assert (distance(*found) < 0.15) == right


def test_the_trainer_takes_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = adapted("llama", tmp_path / "base")
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=2, report_to=[], use_cpu=True, save_strategy="no", bf16=False
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    assert result.global_step == 2
    changed = {name for name, value in model.state_dict().items() if not same(value, before[name])}
    assert changed
    assert all("lora" in name for name in changed)
    assert sum(isinstance(module, Linear) for module in model.modules()) == 14


def test_adapters_of_a_bare_layer_have_the_model_s_dtype(tmp_path):
    """PEFT gives them the base's dtype: FP8 has no arithmetic, and rounds what they begin with."""
    written("qwen3", tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, from_pretrained(tmp_path / "base"))
    adapters = {name: x for name, x in model.named_parameters() if "lora" in name}
    assert {x.dtype for x in adapters.values()} == {torch.bfloat16}
    found = logits(model)
    save_file(peft.get_peft_model_state_dict(model), tmp_path / "adapter.safetensors")
    again = peft.inject_adapter_in_model(config, from_pretrained(tmp_path / "base"))
    assert not torch.equal(logits(again), found)
    peft.set_peft_model_state_dict(again, load_file(tmp_path / "adapter.safetensors"))
    assert torch.equal(logits(again), found)
