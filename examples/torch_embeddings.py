"""Sentence embeddings in FP8 by the demo's encoder, with PyTorch and Hugging Face transformers.

The model is all-MiniLM-L6-v2 in the package that `fp8core demo` fetches. Its linear layers are quantized while it is
loaded. The encoder then runs on batches, as in a search engine, and is compared with the same model in float32:

    python examples/torch_embeddings.py [MODEL_FOLDER]

It needs torch and transformers, and uses a GPU if there is one.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from fp8core import demo
from fp8core.transformers import Fp8CoreConfig, from_pretrained

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOCUMENTS = (
    "The last train to Zürich leaves at ten past eleven on Sundays.",
    "Kittens sleep up to twenty hours a day, often in warm places.",
    "Fold the sifted flour into the eggs and bake the cake for half an hour.",
    "Each row of a matrix keeps a scale of its own, so that eight bits are enough.",
    "The bridge is two hundred years old, and its eastern pier has cracks.",
)
QUESTIONS = (
    "When does the train go at night?",
    "Where do cats like to rest?",
    "How long does it stay in the oven?",
    "How are weights quantized?",
    "Why does the town want to repair it?",
)


class Encoder:
    """A tokenizer and a model; embeddings are means over the tokens, scaled to length one."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self.tokenizer, self.model = tokenizer, model.to(DEVICE).eval()

    @torch.inference_mode()
    def __call__(self, sentences: tuple[str, ...]) -> torch.Tensor:
        """Return an embedding for each sentence."""
        batch = self.tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt").to(DEVICE)
        hidden = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def main(chosen: str | None = None) -> None:
    """Answer questions by the nearest document, and print the cosine between FP8 and float32 embeddings."""
    folder = demo.model_folder(None if chosen is None else Path(chosen)) or demo.fetch_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    exact = Encoder(tokenizer, AutoModel.from_pretrained(folder, dtype=torch.float32))
    encoder = Encoder(tokenizer, from_pretrained(folder, AutoModel, quantization_config=Fp8CoreConfig()))

    documents, questions = encoder(DOCUMENTS), encoder(QUESTIONS)
    nearest = (questions @ documents.T).argmax(1).tolist()
    for question, at in zip(QUESTIONS, nearest, strict=True):
        print(f"{question}\n    {DOCUMENTS[at]}")
    cosines = (exact(QUESTIONS + DOCUMENTS) * torch.cat([questions, documents])).sum(1)
    print(f"cosine to float32: at least {cosines.min():.4f} over {len(cosines)} sentences")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_folder", nargs="?", help="a folder with the model; by default it is fetched")
    main(parser.parse_args().model_folder)
