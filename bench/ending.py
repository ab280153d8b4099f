"""Measures the cost of an activation and of beta in products, inside a CUDA graph, for each row of the table.

    python -m bench ending
    python -m bench.ending [--json FILE] [--shapes 14336x4096] [--m 16 64 512 4096] [--modes row block]

A shape is n x k; results are bfloat16; weights and the results that beta reads rotate over more memory than L2 holds.
Of the kernels' table, the rows for this many rows of a product are timed; a star marks the row that calls use. "silu
behind" and "add behind" are torch's kernels after the plain product. Each result is checked against torch's, computed
from the plain product in float32, before anything is timed.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

import fp8core
from bench import decode, log, timing
from bench.errors import relative
from bench.needs import require_gpu
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.explain import explain_product
from fp8core.problem import ScaledMm
from fp8core.table import Kernel

SHAPES: Final = ("14336x4096", "4096x14336")
ROWS: Final = (16, 64, 512, 4096)
MODES: Final = {
    "row": ("row", "row", fp8core.PER_TOKEN, fp8core.PER_CHANNEL),
    "tensor": ("tensor", "tensor", fp8core.PER_TENSOR, fp8core.PER_TENSOR),
    "block": ("group", "block", fp8core.GROUP_128, fp8core.BLOCK_128),
}
ENDINGS: Final[dict[str, tuple[str, float]]] = {
    "plain": ("", 0.0),
    "gelu": ("gelu", 0.0),
    "gelu_tanh": ("gelu_tanh", 0.0),
    "silu": ("silu", 0.0),
    "beta": ("", 1.0),
}
TORCH: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "": lambda x: x,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
FAR: Final = 5e-3
"""A relative error above this is a mistake."""


class Operands:
    """The operands of a product, and the calls of rows with them."""

    def __init__(self, mode: str, m: int, n: int, k: int) -> None:
        scale_a, scale_b, of_a, of_b = MODES[mode]
        layout = {"scale_layout": "mn"} if mode == "block" else {}
        self.a = fp8core.quantize(torch.randn(m, k, device="cuda"), group_shape=of_a, **layout)
        size = timing.copies(n * k, most=16)
        self.weights = [
            fp8core.quantize(torch.randn(n, k, device="cuda") / math.sqrt(k), group_shape=of_b) for _ in range(size)
        ]
        self.out = [torch.zeros(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(size)]
        self.problem: ScaledMm = explain_product(m, n, k, scale_a=scale_a, scale_b=scale_b).problem
        self.plain = fp8core.scaled_mm_nt(self.a, self.weights[0], out_dtype="float32", use_fast_accum=False)

    def calls(self, row: Kernel, activation: str, beta: float) -> list[Callable[[], torch.Tensor]]:
        """Return the calls of a row, one for each weight."""
        run = decode.launched(row.plan(self.problem._replace(activation=activation, beta=beta)))
        return [
            partial(run, decode.Operands(self.a.data, w.data, self.a.scale, w.scale, out))
            for w, out in zip(self.weights, self.out, strict=True)
        ]

    def wrong(self, calls: list[Callable[[], torch.Tensor]], activation: str, beta: float) -> bool:
        """Return whether a first result is far from torch's."""
        self.out[0].normal_()
        want = TORCH[activation](self.plain + beta * self.out[0].float())
        return relative(calls[0](), want) > FAR


def able(problem: ScaledMm) -> list[Kernel]:
    """Return the rows of the table that are meant for a product and able to run it."""
    names = ("sm90_decode",) if problem.m <= 64 else ("sm90_tiled", "cublaslt", "cublaslt_epilogue")
    return [row for row in SCALED_MM.kernels if row.name in names and row.refusal(problem) is None]


def case(mode: str, m: int, n: int, k: int) -> dict[str, object]:
    """Return the record of one shape."""
    made, variants, wrong, chosen = Operands(mode, m, n, k), {}, {}, {}
    for ending, (activation, beta) in ENDINGS.items():
        asked = made.problem._replace(activation=activation, beta=beta)
        chosen[ending] = SCALED_MM.choice(asked).kernel
        for row in able(asked):
            calls = made.calls(row, activation, beta)
            if made.wrong(calls, activation, beta):
                wrong[f"{row.name} {ending}"] = "far from torch's"
            else:
                variants[f"{row.name} {ending}"] = calls
    plain = made.calls(SCALED_MM.kernel(chosen["plain"]), "", 0.0)
    kept = [torch.zeros_like(out) for out in made.out]
    variants["torch silu"] = [lambda call=call: functional.silu(call(), inplace=True) for call in plain]
    variants["torch add"] = [lambda call=call, to=to: to.add_(call()) for call, to in zip(plain, kept, strict=True)]
    times = timing.compare(variants, least=16 if m > 1000 else 64)
    return {
        "bench": "ending",
        "mode": mode,
        "m": m,
        "n": n,
        "k": k,
        "chosen": chosen,
        "us": {name: spent._asdict() for name, spent in times.items()},
        "wrong": wrong,
    }


def main() -> None:
    """Time the cases, print a table, and append JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    log.options(parser)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--m", nargs="+", type=int, default=ROWS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=("row", "block"))
    chosen = parser.parse_args()
    require_gpu(parser)
    there = log.Log(chosen)
    for mode in chosen.modes:
        table = Table(title=f"{mode} scales, microseconds", title_justify="left")
        for name in ("m", "n x k", "row", *ENDINGS, "silu behind", "add behind"):
            table.add_column(name, justify="left" if name in ("n x k", "row") else "right")
        for shape in chosen.shapes:
            n, k = map(int, shape.split("x"))
            for m in chosen.m:
                if there.has({"bench": "ending", "mode": mode, "m": m, "n": n, "k": k}):
                    continue
                record = case(mode, m, n, k)
                there.append(record)
                spent = {name: f"{time['median']:.2f}" for name, time in record["us"].items()}
                behind = spent.pop("torch silu"), spent.pop("torch add")
                for row in dict.fromkeys(name.split()[0] for name in spent):
                    got = [spent.get(f"{row} {ending}", "-") for ending in ENDINGS]
                    stars = [" *" if of == row else "" for of in record["chosen"].values()]
                    got = [time + star for time, star in zip(got, stars, strict=True)]
                    table.add_row(str(m), shape, row, *got, *(behind if row == record["chosen"]["plain"] else ()))
                if record["wrong"]:
                    table.add_row(str(m), shape, f"wrong: {', '.join(record['wrong'])}")
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
