"""A small random transformers model, whose weights consist of whole 128x128 blocks."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def llama():
    """Return a Llama model with two layers, with the same weights in every call."""
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()
