"""The products that the choice without tuning is fitted to and judged on: lists that are the same everywhere.

"models" has layers of real models, each with a few numbers of rows. "fresh", "second", "third" and "fourth" have layers
of other models and random variations of them, with random numbers of rows, odd ones among both; "border" has small
weights on both sides of where their layouts change. "few" has products of up to 64 rows alone, "many" of more, and
"between" of as many as several kernels may be fastest for, "fifth" and "sixth" of any number. The halves "judge" of the
lists that `BLIND` names are blind: nothing is fitted to them, and no rule is changed for one of their products. None of
their weights is in another list but "narrow", to which only the costs of a split k are fitted. "large" has the large
products of `python -m bench products models`, to be timed in long stretches. "narrow" has weights of few channels,
whose tiles are fewer than multiprocessors. "odd" has few products, for the times of kernels that take what others do
not.
"""

import hashlib
import math
import random
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final, NamedTuple

from bench.odd_cases import Product, log_uniform
from fp8core.ops.targets import target_of
from fp8core.problem import Granularity, ScaledMm
from fp8core.target import Target

SHAPES: Final[dict[str, tuple[str, ...]]] = {
    "Llama 8B": ("6144x4096", "4096x4096", "28672x4096", "4096x14336"),
    "Llama 70B": ("10240x8192", "8192x8192", "57344x8192", "8192x28672"),
    "Llama 70B / 8": ("1280x8192", "8192x1024", "7168x8192", "8192x3584"),
    "Llama 405B / 8": ("2304x16384", "13312x16384", "16384x6656"),
    "Qwen3 8B": ("24576x4096", "4096x12288"),
    "Qwen3 32B": ("10240x5120", "5120x8192", "51200x5120", "5120x25600"),
    "DeepSeek-V3": ("2112x7168", "24576x1536", "32768x512", "7168x16384", "36864x7168", "7168x18432", "4096x7168"),
    "DeepSeek-V3 / 8": ("7168x2048", "4608x7168", "7168x2304"),
    "Gemma 3 27B": ("8192x5376", "5376x4096", "43008x5376", "5376x21504"),
    "Mistral Small 24B": ("6144x5120", "5120x4096", "65536x5120", "5120x32768"),
}
"""n x k of linear layers; layers that read the same input are fused."""
FRESH_SHAPES: Final[dict[str, tuple[str, ...]]] = {
    "Qwen3 4B": ("6144x2560", "2560x4096", "19456x2560", "2560x9728"),
    "Qwen3 14B": ("7168x5120", "5120x5120", "34816x5120", "5120x17408"),
    "Qwen3 235B": ("9216x4096", "4096x8192"),
    "Qwen2.5 72B": ("59136x8192", "8192x29568"),
    "Qwen2.5 72B / 4": ("2560x8192", "8192x2048", "14784x8192", "8192x7392"),
    "Llama 3B": ("5120x3072", "3072x3072", "16384x3072", "3072x8192"),
    "Gemma 2 9B": ("8192x3584", "3584x4096", "28672x3584", "3584x14336"),
    "Phi-4": ("7680x5120", "35840x5120", "5120x17920"),
    "Mistral Large / 8": ("1792x12288", "12288x1536", "7168x12288", "12288x3584"),
    "gpt-oss 120B": ("5120x2880", "2880x4096"),
    "FLUX.1": ("9216x3072", "12288x3072", "3072x12288", "21504x3072", "3072x15360"),
    "ViT": ("4608x1536", "1152x4304", "4304x1152"),
}
SECOND_SHAPES: Final[dict[str, tuple[str, ...]]] = {
    "Llama 1B": ("3072x2048", "2048x2048", "16384x2048", "2048x8192"),
    "Llama 4 Scout": ("7168x5120", "16384x5120", "5120x8192"),
    "GLM-4.5": ("14336x5120", "5120x12288", "24576x5120"),
    "Yi 34B": ("9216x7168", "7168x7168", "40960x7168", "7168x20480"),
    "Command R+": ("14336x12288", "12288x12288", "67584x12288", "12288x33792"),
    "OLMo 2 32B": ("55296x5120", "5120x27648"),
    "Gemma 3 12B": ("8192x3840", "3840x4096", "30720x3840", "3840x15360"),
    "Gemma 3 4B": ("4096x2560", "2560x2048", "20480x2560", "2560x10240"),
    "Falcon 180B / 8": ("2320x14848", "14848x1856", "7424x14848", "14848x7424"),
    "Kimi K2 / 8": ("3072x1536", "2048x512", "1536x7168", "7168x1024"),
    "Stable Diffusion 3.5": ("7296x2432", "9728x2432", "2432x9728", "2432x2432"),
    "Wan 14B": ("15360x5120", "13824x5120", "5120x13824"),
}
SIXTH_SHAPES: Final[dict[str, tuple[str, ...]]] = {
    "Mixtral 8x22B": ("8192x6144", "6144x6144", "32768x6144", "6144x16384"),
    "Nemotron-4 340B / 8": ("2688x18432", "18432x2304", "9216x18432", "18432x9216"),
    "Granite 8B": ("25600x4096", "4096x12800"),
    "Llama 2 7B": ("12288x4096", "22016x4096", "4096x11008"),
    "Llama 2 13B": ("15360x5120", "27648x5120", "5120x13824"),
    "Qwen2.5 7B": ("4608x3584", "37888x3584", "3584x18944"),
    "Qwen3 1.7B": ("4096x2048", "12288x2048", "2048x6144"),
    "Qwen3 30B-A3B": ("5120x2048", "2048x4096", "1536x2048", "2048x768"),
    "Qwen3 Coder 480B": ("14336x6144", "6144x12288", "5120x6144", "6144x2560"),
    "Falcon 40B": ("9216x8192", "32768x8192", "8192x32768"),
    "DeepSeek-V2": ("2112x5120", "24576x1536", "5120x16384", "24576x5120", "3072x5120", "5120x1536"),
    "MiniMax-M2": ("8192x3072", "3072x6144", "3072x1536"),
    "GLM-4.5 Air": ("21888x4096", "4096x10944", "2816x4096", "4096x1408"),
    "Grok-1": ("65536x6144", "6144x32768"),
    "DBRX": ("21504x6144", "6144x10752"),
    "Gemma 2 27B": ("8192x4608", "4608x4096", "73728x4608", "4608x36864"),
    "Gemma 3 1B": ("1536x1152", "13824x1152", "1152x6912"),
    "BLOOM 176B / 8": ("5376x14336", "14336x1792", "7168x14336", "14336x7168"),
    "Arctic": ("9728x7168", "7168x4864", "9216x7168"),
    "Whisper": ("3840x1280", "5120x1280", "1280x5120"),
    "T5 XXL": ("10240x4096", "4096x10240"),
    "SDXL": ("10240x1280", "1920x640", "640x2560"),
}
NARROW_SHAPES: Final[dict[str, tuple[str, ...]]] = {
    "DeepSeek-V3": ("576x7168", "1536x7168", "256x7168"),
    "Kimi K2": ("384x7168", "576x7168"),
    "Llama 8B / 8": ("768x4096", "1024x4096", "512x4096"),
    "Llama 405B / 16": ("1152x16384", "6656x16384"),
    "Qwen3 32B / 8": ("1280x5120", "2048x5120"),
    "Qwen3 235B": ("128x4096", "1152x4096", "512x4096"),
    "Qwen2.5 72B / 8": ("1280x8192", "3696x8192"),
    "Gemma 3 27B / 8": ("1024x5376", "5376x2688"),
    "gpt-oss 120B": ("128x2880", "640x2880"),
}
"""Weights of few channels: of keys and values, of routers, and of parts for several GPUs."""
ROWS: Final = (
    *(1, 3, 8, 16, 24, 33, 48, 64, 72, 96, 128, 160, 200, 256, 300, 384),
    *(512, 768, 1000, 1024, 1536, 2048, 3000, 4096, 8192, 16384),
)
MODES: Final[dict[str, tuple[Granularity, Granularity]]] = {
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "block": ("group", "block"),
}
ROWS_A_WEIGHT: Final = 4
"""How many numbers of rows each weight and mode gets in the list "models"."""
MOST_OPERATIONS: Final = 4e12
"""Larger products are left out: they take milliseconds."""
MOST_ROWS: Final = 16384
ODD_SHAPES: Final = (
    *("4096x4096", "5000x4100", "12345x4096", "1537x7168", "14336x4101"),
    *("208x905", "448x262", "1008x777", "2576x301", "304x6066", "1200x2500"),
)
ODD_ROWS: Final = 1, 8, 33, 64, 80, 120, 301, 2001
LARGE_SHAPES: Final = (
    *("6144x4096", "28672x4096", "8192x8192", "7168x16384", "2112x7168", "24576x1536", "4096x7168", "7168x2048"),
    *("36864x7168", "10240x5120", "5120x8192", "5120x25600", "4096x14336"),
)
LARGE_ROWS: Final = 384, 1024, 4096
BLIND: Final = ("sixth",)
"""Lists whose half "judge" is blind."""


class Drawn(NamedTuple):
    """A list of products that are drawn at random."""

    name: str
    """The name of the list, and the seed of its random numbers."""
    shapes: dict[str, tuple[str, ...]]
    """n x k of weights, by model: half the weights of the list have these shapes, the others are near to them."""
    number: int
    """The number of products."""
    others: tuple["Drawn", ...] = ()
    """The lists, beside "models", with which this one has no weight in common."""
    rows: tuple[int, int] = (1, MOST_ROWS)
    """The least and the greatest number of rows of a product."""
    weight_bytes: tuple[float, float] = (0.0, math.inf)
    """The least and the greatest size of a weight, in bytes."""


FRESH: Final = Drawn("fresh", FRESH_SHAPES, 480)
SECOND: Final = Drawn("second", SECOND_SHAPES, 600, (FRESH,))
THIRD: Final = Drawn("third", FRESH_SHAPES | SECOND_SHAPES, 600, (FRESH, SECOND))
BORDER: Final = Drawn("border", THIRD.shapes, 480, (FRESH, SECOND, THIRD), (33, 64), (6e6, 40e6))
TRANSPOSED: Final = {
    f"{name}, transposed": tuple("x".join(reversed(shape.split("x"))) for shape in shapes)
    for name, shapes in THIRD.shapes.items()
}
"""The shapes of `THIRD` with n and k exchanged."""
FOURTH: Final = Drawn("fourth", THIRD.shapes | TRANSPOSED, 600, (FRESH, SECOND, THIRD, BORDER), (33, 4096))
FEW: Final = Drawn("few", FOURTH.shapes, 1600, (FRESH, SECOND, THIRD, FOURTH, BORDER), (4, 64))
MANY: Final = Drawn("many", FEW.shapes, 1000, (*FEW.others, FEW), (65, 8192))
BETWEEN: Final = Drawn("between", FEW.shapes, 1000, (*MANY.others, MANY), (12, 64), (1e6, 150e6))
FIFTH: Final = Drawn("fifth", FEW.shapes, 3600, (*BETWEEN.others, BETWEEN), (4, 8192))
SIXTH: Final = Drawn("sixth", SIXTH_SHAPES | FEW.shapes, 3600, (*FIFTH.others, FIFTH), (4, MOST_ROWS))
NARROW: Final = Drawn("narrow", NARROW_SHAPES, 400, SIXTH.others, (65, 1024), (2e5, 40e6))
DRAWN: Final = {
    made.name: made for made in (FRESH, SECOND, THIRD, FOURTH, BORDER, FEW, MANY, BETWEEN, FIFTH, SIXTH, NARROW)
}
LISTS: Final = ("models", *DRAWN, "large", "odd")


class Case(NamedTuple):
    """A product: a mode of scales, rows, and a weight."""

    mode: str
    m: int
    n: int
    k: int

    @property
    def half(self) -> str:
        """The half of its list that the case is in, by its weight's shape: "fit" or "judge"."""
        return ("fit", "judge")[number(f"{self.n}x{self.k}") % 2]

    @property
    def operations(self) -> int:
        """The number of multiplications and additions."""
        return 2 * self.m * self.n * self.k

    def problem(self, target: int | str | Target | None = None) -> ScaledMm:
        """Return the case as a problem for the table of kernels, with weights that are read from memory."""
        scale_a, scale_b = MODES[self.mode]
        if self.m == 1 and scale_a == "row":
            scale_a = "tensor"
        return Product(self.m, self.n, self.k, scale_a, scale_b).problem(target_of(target))


def number(text: str) -> int:
    """Return a hash of a text that is the same on all machines and in all processes."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def cases(which: str = "models", modes: Iterable[str] = tuple(MODES)) -> list[Case]:
    """Return a list of products, in an order that does not depend on their shapes."""
    if which == "odd":
        weights = [tuple(map(int, shape.split("x"))) for shape in ODD_SHAPES]
        return [Case(mode, m, n, k) for n, k in weights for mode in ("row", "block") if mode in modes for m in ODD_ROWS]
    if which in DRAWN:
        found = [case for case in _drawn(which) if case.mode in set(modes)]
    else:
        found = list(_models(modes) if which == "models" else _large(modes))
    return sorted(found, key=lambda case: number(str(case)))


def _weights(shapes: dict[str, tuple[str, ...]]) -> list[str]:
    return list(dict.fromkeys(shape for some in shapes.values() for shape in some))


def _models(modes: Iterable[str]) -> Iterator[Case]:
    for shape in _weights(SHAPES):
        n, k = map(int, shape.split("x"))
        for mode in modes:
            fitting = [m for m in ROWS if 2 * m * n * k <= MOST_OPERATIONS]
            some = sorted(fitting, key=lambda m: number(f"{mode} {m} {shape}"))[:ROWS_A_WEIGHT]
            yield from (Case(mode, m, n, k) for m in some)


def _large(modes: Iterable[str]) -> Iterator[Case]:
    for shape in LARGE_SHAPES:
        n, k = map(int, shape.split("x"))
        yield from (Case(mode, m, n, k) for mode in modes if mode != "tensor" for m in LARGE_ROWS)


@cache
def _drawn(name: str) -> tuple[Case, ...]:
    """Return the products of a list: half of the weights have the shapes of models, half are near to these shapes."""
    made, chance, modes = DRAWN[name], random.Random(name), list(MODES)
    shapes, found = _weights(made.shapes), dict[Case, None]()
    known = {tuple(map(int, shape.split("x"))) for shape in _weights(SHAPES)}
    known |= {(case.n, case.k) for other in made.others for case in _drawn(other.name)}
    while len(found) < made.number:
        n, k = map(int, chance.choice(shapes).split("x"))
        if chance.random() < 0.5:
            n = _near(chance, n, chance.choice((8, 64, 128)))
            k = _near(chance, k, chance.choice((16, 128, 128)))
        n += chance.randrange(1, 8) if chance.random() < 0.06 else 0
        m = log_uniform(chance, *made.rows)
        if chance.random() < 0.4:
            m = -(-m // 8) * 8 if m < 512 else -(-m // 128) * 128
        least, most = made.weight_bytes
        if 2 * m * n * k <= MOST_OPERATIONS and (n, k) not in known and least <= n * k <= most:
            found[Case(modes[len(found) % len(modes)], m, n, k)] = None
    return tuple(found)


def _near(chance: random.Random, size: int, multiple: int) -> int:
    return max(multiple, round(size * math.exp(chance.uniform(-0.5, 0.5)) / multiple) * multiple)
