"""Products of odd shapes or at odd addresses: those of a list, and randomly drawn ones."""

import math
import random
from collections.abc import Iterator
from typing import Final, NamedTuple

from fp8core.dtypes import ITEMSIZE
from fp8core.ops.example_problems import example_product
from fp8core.problem import Activation, Granularity, ScaledMm
from fp8core.target import Target

STEP: Final = 16
"""Aligned extents and addresses are multiples of this."""
FEW: Final = 64
"""Up to this many rows, a product is bound by reading its weight."""
MANY: Final = 4096
MOST_OPERATIONS: Final = 4e11
MOST_BYTES: Final = 120e6
"""Products with more operations, or a weight of more bytes, are drawn again."""
ROW: Final[tuple[Granularity, Granularity]] = ("row", "row")
BLOCKS: Final[tuple[Granularity, Granularity]] = ("group", "block")
GROUP: Final[tuple[Granularity, Granularity]] = ("group", "group")
MODES: Final[tuple[tuple[Granularity, Granularity], ...]] = (
    *(("tensor", "tensor"), ("tensor", "row"), ("row", "tensor")),
    *(ROW, BLOCKS, GROUP),
)
"""The combinations of scales of a and b that products support."""
CODES: Final = ("float8_e4m3fn", "float8_e5m2")
WIDE: Final = "bfloat16"
OUTS: Final = (WIDE, WIDE, WIDE, "float16", "float32", *CODES)
ACTIVATIONS: Final[tuple[Activation, ...]] = ("", "", "", "gelu", "silu")


class Product(NamedTuple):
    """A product of contiguous matrices, without the device."""

    m: int
    n: int
    k: int
    scale_a: Granularity
    scale_b: Granularity
    a: str = CODES[0]
    b: str = CODES[0]
    out: str = WIDE
    bias: str = ""
    activation: Activation = ""
    beta: float = 0.0
    amax: bool = False
    address: int = STEP
    """The largest power of two, up to 16, that divides the addresses of a, b and out."""

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def odd(self) -> bool:
        """Whether an extent or an address is not aligned."""
        return bool(self.n % STEP or self.k % STEP or self.address < STEP)

    @property
    def scales(self) -> str:
        """A short description of its scales."""
        return f"{self.scale_a} x {self.scale_b}"

    @property
    def ending(self) -> str:
        """A short description of the product besides its shape and scales."""
        said = (
            self.out if self.out != WIDE else "",
            f"bias {self.bias}" if self.bias else "",
            self.activation,
            "beta" if self.beta else "",
            "amax" if self.amax else "",
            "e5m2" if CODES[1] in (self.a, self.b) else "",
            f"@{self.address}" if self.address < STEP else "",
        )
        return " ".join(filter(None, said))

    def neighbour(self) -> "Product":
        """Return the next aligned product, which ends alike."""
        n, k = (math.ceil(extent / STEP) * STEP for extent in (self.n, self.k))
        return self._replace(n=n, k=k, address=STEP)

    def plain(self) -> "Product":
        """Return the neighbour with a bfloat16 result, without beta and amax."""
        return self.neighbour()._replace(out=WIDE, beta=0.0, amax=False)

    def problem(self, target: Target) -> ScaledMm:
        """Return the product on a device."""
        codes_alignment = math.gcd(self.address, self.k)
        address = max(self.address, ITEMSIZE[self.out])
        out_alignment = math.gcd(address, self.n * ITEMSIZE[self.out])
        extents = {"m": self.m, "n": self.n, "k": self.k}
        dtypes = {"a": self.a, "b": self.b, "out": self.out, "bias": self.bias}
        return example_product(target, self.scale_a, self.scale_b, **extents, **dtypes)._replace(
            amax=self.amax,
            alignment=min(codes_alignment, out_alignment),
            prefetch_weight=True,
            codes_alignment=codes_alignment,
            out_alignment=out_alignment,
            scale_a_alignment=STEP,
            activation=self.activation,
            beta=self.beta,
        )


def listed() -> tuple[Product, ...]:
    """Return weights with odd n, odd k or k no multiple of 16, with few and many rows and bfloat16 or FP8 results."""
    few = (1, 16, FEW)
    return (
        *(Product(m, 5000, k, *scales) for scales in (ROW, BLOCKS) for k in (4100, 4101) for m in few),
        *(Product(m, 28672, 4097, *scales) for scales in (ROW, BLOCKS) for m in few[1:]),
        *(Product(m, *nk, *scales) for scales in (ROW, BLOCKS) for nk in ((12345, 4096), (5001, 16384)) for m in few),
        *(Product(m, 5000, 4101, *GROUP) for m in few),
        *(
            Product(m, *nk, *scales)
            for scales in (ROW, BLOCKS, GROUP)
            for nk in ((5000, 4101), (12345, 4096))
            for m in (100, 300, 2000)
        ),
        *(Product(m, 5000, 4101, *scales, out=CODES[0]) for scales in (ROW, BLOCKS) for m in few),
    )


def log_uniform(chance: random.Random, least: float, most: float) -> int:
    """Return a log-uniformly distributed number."""
    return round(math.exp(chance.uniform(math.log(least), math.log(most))))


def _extent(chance: random.Random, least: float, most: float) -> int:
    """Return a log-uniformly distributed number; half of the numbers are rounded up to a multiple of `STEP`."""
    number = log_uniform(chance, least, most)
    return number if chance.random() < 0.5 else math.ceil(number / STEP) * STEP


def draws(seed: int) -> Iterator[Product]:
    """Yield an endless sequence of odd products that are not too large; it is determined by the seed."""
    chance = random.Random(seed)
    while True:
        least, most = (1, FEW) if chance.random() < 0.6 else (FEW, MANY)
        m = log_uniform(chance, least, most)
        n, k = _extent(chance, 200, 16384), _extent(chance, 64, 16384)
        made = Product(
            m,
            n,
            k,
            *chance.choice(MODES),
            b=CODES[chance.random() < 0.1],
            out=chance.choice(OUTS),
            bias=chance.choice(("", "", "bfloat16", "float32")),
            activation=chance.choice(ACTIVATIONS),
            beta=chance.choice((0.0, 0.0, 0.0, 1.0)),
            amax=chance.random() < 0.15,
            address=chance.choice((16, 16, 16, 8, 4, 1)),
        )
        if made.out in CODES:  # FP8 results do not support beta
            made = made._replace(beta=0.0)
        if made.odd and n * k <= MOST_BYTES and 2 * m * n * k <= MOST_OPERATIONS:
            yield made


def drawn(count: int, seed: int = 0) -> tuple[Product, ...]:
    """Return the first products of a seed."""
    each = draws(seed)
    return tuple(next(each) for _ in range(count))
