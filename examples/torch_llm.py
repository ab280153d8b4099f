"""A Hugging Face transformers language model in FP8: quantized while it is loaded, compiled, saved and loaded again.

The model is a tiny Llama with random weights, so that it runs on a CPU within a minute without a download; its text has
no meaning. With the folder or name of a real model, the same code runs that model:

    python examples/torch_llm.py [MODEL]

It needs torch, transformers and accelerate, and uses a GPU if there is one.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import fp8core.torch
from fp8core.transformers import Fp8CoreConfig, from_pretrained

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = torch.tensor([[1, 17, 42, 5]], device=DEVICE)


def tiny_model(folder: Path) -> Path:
    """Write a Llama with two layers and random bfloat16 weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        initializer_range=0.06,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def size(model: torch.nn.Module) -> int:
    """Return the bytes of a model's parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


@torch.inference_mode()
def main(model_of: str | None = None) -> None:
    """Load the model in bfloat16 and in FP8, compare them, generate text, and check that a saved copy is the same."""
    with TemporaryDirectory() as folder:
        source: Any = model_of or tiny_model(Path(folder, "bf16"))
        wide = AutoModelForCausalLM.from_pretrained(source, dtype="auto", device_map=DEVICE)
        model = from_pretrained(source, device_map=DEVICE, quantization_config=Fp8CoreConfig(scheme="channel"))
        print(f"parameters: {size(wide):,} bytes in bfloat16, {size(model):,} with FP8 layers")

        wanted, found = wide(PROMPT).logits.float(), model(PROMPT).logits.float()
        print(f"logits: relative error {float((found - wanted).norm() / wanted.norm()):.3f}")
        del wide

        fp8core.torch.warm_up(model, rows=[1, PROMPT.shape[1]])
        tokens = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
        print(f"generated: {tokens[0, PROMPT.shape[1] :].tolist()}")

        backend = "inductor" if DEVICE == "cuda" else "aot_eager"  # inductor compiles slowly on a CPU
        compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
        again = compiled(PROMPT, use_cache=False).logits.float()
        print(f"compiled: relative difference {float((again - found).norm() / found.norm()):.3f}")

        model.save_pretrained(Path(folder, "fp8"))
        copy = from_pretrained(Path(folder, "fp8"), device_map=DEVICE)
        same = torch.equal(copy(PROMPT).logits, model(PROMPT).logits)
        method = copy.config.quantization_config.to_dict()["quant_method"]
        print(f"saved as {method} and loaded again: {'the same logits' if same else 'other logits'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="the folder or name of a model; by default a tiny one")
    main(parser.parse_args().model)
