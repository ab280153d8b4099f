"""A sentence encoder in plain arrays whose 36 linear layers run in fp32 or in FP8.

The model is all-MiniLM-L6-v2: 6 BERT layers of width 384. This file has everything that it needs, with NumPy on the CPU
and CuPy on a GPU: the tokenizer, the encoder, and the conversion of its linear layers to FP8 (`quantized`). Run it with
the folder of the model (model.safetensors, vocab.txt, config.json), or let `fp8core demo` find and measure it:

    python examples/minilm.py MODEL_FOLDER
"""

import argparse
import json
import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

import fp8core
from fp8core import PER_CHANNEL, PER_TENSOR, PER_TOKEN, Fp8Linear, GroupShape

Array = Any
"""A NumPy or a CuPy array."""
Linear = Callable[[Array], Array]
Watch = Callable[[str, Array, Array], None]

SENTENCES = (
    "Where is the library?",
    "The cat sleeps on the warm roof.",
    "A kitten is napping on top of the house because the tiles are warm.",
    "Eight bits are enough for most weights, as long as every row keeps its own scale.",
    "Could you tell me at what time the last train to Zürich leaves on Sundays?",
    "GDP grew by 2.3 % in Q4/2025, against 1.9 % (revised) a quarter earlier.",
    "def mean(xs): return sum(xs) / len(xs)",
    "Naïve café owners coöperate; their résumés, oddly enough, never mention déjà vu.",
    (
        "She whisked the eggs with sugar until pale, folded in the sifted flour, poured the batter into a buttered tin "
        "and baked it at 180 degrees for thirty-five minutes, which filled the whole flat with the smell of vanilla."
    ),
    (
        "The committee could not agree. Half of its members wanted to repair the old bridge, whose arches had stood "
        "for two hundred years and had become the emblem of the town; the other half pointed at the cracks in the "
        "eastern pier, at the lorries that had to drive around through three villages, and at an offer for a new "
        "bridge that would cost less than the repair. In the end they did what committees do, and asked for a report."
    ),
)
"""The sentences that the demo encodes."""

CALIBRATION = (
    "The soup is too hot.",
    "Two dogs run across a wet field.",
    "Interest rates were left unchanged at 4.25 % in March.",
    "Please send the signed contract back before Friday, or call our office if anything is unclear.",
    "for i in range(10): print(i ** 2)",
    (
        "The museum has a small garden behind it, where visitors sit under chestnut trees, drink coffee from paper "
        "cups and talk about everything but paintings."
    ),
    "Quantum computers do not try all answers at once; they let wrong answers cancel.",
)
"""The sentences for the calibration of static scales, different from those that are measured."""


class Scheme(NamedTuple):
    """The group shapes of weights and inputs of the linear layers, and whether input scales are static."""

    weights: GroupShape
    inputs: GroupShape
    static: bool
    meaning: str


SCHEMES = {
    "channel": Scheme(PER_CHANNEL, PER_TOKEN, False, "a scale per output channel, a scale per token"),
    "tensor": Scheme(PER_TENSOR, PER_TENSOR, False, "one scale per weight, one scale per input"),
    "block": Scheme(GroupShape(128, 128), GroupShape(1, 128), False, "weights in blocks of 128x128, inputs in 1x128"),
    "static": Scheme(PER_CHANNEL, PER_TENSOR, True, "a scale per output channel, a calibrated scale per layer's input"),
}


class Tokenizer:
    """BERT's uncased WordPiece: splits text into words, and words into the longest pieces in the vocabulary."""

    def __init__(self, vocabulary: Path, longest: int = 256) -> None:
        lines = vocabulary.read_text(encoding="utf-8").splitlines()
        self.ids = {piece: number for number, piece in enumerate(lines)}
        self.longest = longest

    def __call__(self, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids [sentences, tokens], padded with 0, and a mask that is false for the padding."""
        rows = [[self.ids["[CLS]"], *self.pieces(s)[: self.longest - 2], self.ids["[SEP]"]] for s in sentences]
        width = max(map(len, rows))
        ids = np.array([row + [0] * (width - len(row)) for row in rows], np.int64)
        lengths = np.array([len(row) for row in rows])
        return ids, np.arange(width) < lengths[:, None]

    def pieces(self, sentence: str) -> list[int]:
        """Return the ids of the pieces of a sentence."""
        return [self.ids[piece] for word in words(sentence) for piece in self.split(word)]

    def split(self, word: str) -> list[str]:
        """Return the pieces of a word, or [UNK] if the vocabulary lacks one."""
        pieces: list[str] = []
        start = 0
        while start < len(word):
            tries = (("##" if start else "") + word[start:end] for end in range(len(word), start, -1))
            piece = next((t for t in tries if t in self.ids), None)
            if piece is None or len(word) > 100:
                return ["[UNK]"]
            pieces.append(piece)
            start += len(piece) - (2 if start else 0)
        return pieces


def words(sentence: str) -> list[str]:
    """Return lower-case words without accents; punctuation marks and Chinese characters are words of their own."""
    spaced = []
    for character in unicodedata.normalize("NFD", sentence.lower()):
        category = unicodedata.category(character)
        alone = category[0] == "P" or (character.isascii() and category[0] == "S") or "\u4e00" <= character <= "\u9fff"
        if category == "Mn" or character == "\ufffd" or (category[0] == "C" and not character.isspace()):
            continue
        spaced.append(f" {character} " if alone else character)
    return "".join(spaced).split()


@dataclass(frozen=True)
class Dense:
    """A linear layer of the checkpoint, in fp32."""

    weight: Array
    bias: Array

    def __call__(self, x: Array) -> Array:
        """Return x @ weight.T + bias."""
        return x @ self.weight.T + self.bias


class Encoder:
    """The model: computes a unit vector for each sentence from token ids. FP8 replaces the layers in `linears`."""

    def __init__(self, folder: Path, xp: Any = np) -> None:
        self.xp = xp
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.weights = {name: xp.asarray(value) for name, value in load_file(folder / "model.safetensors").items()}
        self.linears: dict[str, Linear] = {name: self.dense(name) for name in self.linear_names()}

    def dense(self, name: str) -> Dense:
        """Return a linear layer in fp32."""
        return Dense(self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def linear_names(self) -> Iterator[str]:
        """Yield the names of the linear layers, in the order of their use."""
        for i in range(self.config["num_hidden_layers"]):
            for part in ("query", "key", "value"):
                yield f"encoder.layer.{i}.attention.self.{part}"
            for part in ("attention.output.dense", "intermediate.dense", "output.dense"):
                yield f"encoder.layer.{i}.{part}"

    def __call__(self, ids: np.ndarray, mask: np.ndarray, watch: Watch | None = None) -> Array:
        """Return embeddings [sentences, 384]; `watch` gets the name, input and output of every linear layer."""
        xp, config = self.xp, self.config

        def linear(name: str, x: Array) -> Array:
            y = self.linears[name](x)
            if watch is not None:
                watch(name, x, y)
            return y

        counted = xp.asarray(mask)
        x = self.embed(xp.asarray(ids))
        for i in range(config["num_hidden_layers"]):
            layer = f"encoder.layer.{i}"
            q, k, v = (self.heads(linear(f"{layer}.attention.self.{part}", x)) for part in ("query", "key", "value"))
            scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
            probabilities = softmax(xp, xp.where(counted[:, None, None, :], scores, xp.float32(-1e9)))
            mixed = (probabilities @ v).swapaxes(1, 2).reshape(x.shape)
            x = self.norm(f"{layer}.attention.output.LayerNorm", x + linear(f"{layer}.attention.output.dense", mixed))
            inner = gelu(xp, linear(f"{layer}.intermediate.dense", x))
            x = self.norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", inner))
        weights = counted[:, :, None].astype(xp.float32)
        mean = (x * weights).sum(1) / weights.sum(1)
        return mean / xp.sqrt((mean * mean).sum(-1, keepdims=True))

    def embed(self, ids: Array) -> Array:
        """Return the normalized sum of the embeddings of tokens, positions and the first segment."""
        table = {
            part: self.weights[f"embeddings.{part}_embeddings.weight"] for part in ("word", "position", "token_type")
        }
        return self.norm(
            "embeddings.LayerNorm", table["word"][ids] + table["position"][: ids.shape[1]] + table["token_type"][0]
        )

    def heads(self, x: Array) -> Array:
        """Return [sentences, tokens, 384] split into heads: [sentences, heads, tokens, 32]."""
        sentences, tokens, width = x.shape
        count = self.config["num_attention_heads"]
        return x.reshape(sentences, tokens, count, width // count).swapaxes(1, 2)

    def norm(self, name: str, x: Array) -> Array:
        """Return the layer normalization over the last axis."""
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        unit = centred / self.xp.sqrt(variance + self.xp.float32(self.config["layer_norm_eps"]))
        return unit * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def softmax(xp: Any, x: Array) -> Array:
    """Return the softmax over the last axis."""
    powers = xp.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def gelu(xp: Any, x: Array) -> Array:
    """Return x * Phi(x), with erf to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    z = xp.abs(x) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = xp.sign(x) * (1 - series * xp.exp(-z * z))
    return x * (1 + erf) / 2


def quantized(
    encoder: Encoder, scheme: Scheme, input_scales: Mapping[str, Array] | None = None
) -> dict[str, Fp8Linear]:
    """Return FP8 layers to replace the encoder's; a static scheme needs one scale for each layer's input."""
    return {
        name: Fp8Linear.from_weight(
            encoder.weights[f"{name}.weight"],
            bias=encoder.weights[f"{name}.bias"],
            weight_group_shape=scheme.weights,
            group_shape=scheme.inputs,
            input_scale=input_scales[name] if input_scales else None,
        )
        for name in encoder.linear_names()
    }


def calibrated(encoder: Encoder, ids: np.ndarray, mask: np.ndarray) -> dict[str, Array]:
    """Return static scales for the inputs of all linear layers, from the inputs' largest values on some sentences."""
    scales: dict[str, Array] = {}

    def watch(name: str, x: Array, _: Array) -> None:
        scales[name] = fp8core.quantize(x, group_shape=PER_TENSOR).scale

    encoder(ids, mask, watch)
    return scales


def main(folder: Path) -> None:
    """Print, for every sentence, the cosine between its FP8 and fp32 embeddings."""
    encoder = Encoder(folder)
    tokens = Tokenizer(folder / "vocab.txt")(SENTENCES)
    exact = encoder(*tokens)
    encoder.linears.update(quantized(encoder, SCHEMES["channel"]))
    for sentence, cosine in zip(SENTENCES, (exact * encoder(*tokens)).sum(-1), strict=True):
        print(f"{cosine:.5f}  {sentence:.80}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_folder", type=Path)
    main(parser.parse_args().model_folder)
