"""LoRA on frozen FP8 models: by PEFT, by transformers' own adapters, and in its Trainer."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from fp8core.torch import Linear  # noqa: E402 - after the skips
from fp8core.transformers import from_pretrained  # noqa: E402
from huggingface.cases import TOKENS, logits, same, written  # noqa: E402

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
