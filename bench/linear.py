"""A whole linear layer, quantization and product, inside a CUDA graph, beside vLLM's two kernels.

    python -m bench.linear [--peers FOLDER] [--json FILE] [--shapes 6144x4096] [--m 1 16 64]

A shape is n x k; per token x per channel. A graph holds 64 calls; weights rotate over more memory than the second cache
holds, activations stay warm. The layers are called through the public `Fp8Linear`, and each result is checked against
the product of the dequantized operands before anything is timed. The floor counts weight, activations and result.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

import fp8core
from bench import baselines, timing

BANDWIDTH: Final = 4.3e12
SHAPES: Final = ("4096x4096", "6144x4096", "8192x8192", "28672x4096", "7168x16384")
ROWS: Final = (1, 16, 64)
FAR: Final = 4e-3
"""A relative error that is a mistake."""


def vllm(ops: object, x: torch.Tensor, layer: fp8core.Fp8Linear) -> torch.Tensor:
    """Return the same by vLLM's kernels, with their outputs allocated."""
    quantize, product = ops.dynamic_per_token_scaled_fp8_quant, ops.cutlass_scaled_mm
    data = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty(len(x), 1, device=x.device, dtype=torch.float32)
    quantize(data, x, scale, None)
    out = torch.empty(len(x), len(layer.weight), device=x.device, dtype=x.dtype)
    product(out, data, layer.weight.t(), scale, layer.weight_scale.t(), None)
    return out


def wrong(got: torch.Tensor, x: torch.Tensor, layer: fp8core.Fp8Linear) -> bool:
    """Return whether a result is far from the product of the dequantized operands."""
    data, scale = fp8core.quantize(x)
    wide = fp8core.dequantize(data, scale).double() @ fp8core.dequantize(layer.weight, layer.weight_scale).double().t()
    return not (got.double() - wide).norm() / wide.norm() < FAR


def case(m: int, n: int, k: int, peers: baselines.Peers) -> dict[str, object]:
    """Return the record of one shape."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    layers: Sequence[fp8core.Fp8Linear] = [
        fp8core.Fp8Linear.from_weight(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
        for _ in range(timing.copies(n * k, most=16))
    ]
    variants = {"fp8core": [partial(layer, x) for layer in layers]}
    if peers.vllm is not None:
        variants["vllm"] = [partial(vllm, peers.vllm, x, layer) for layer in layers]
    bad = [name for name, calls in variants.items() if wrong(calls[0](), x, layers[0])]
    times = timing.compare({name: calls for name, calls in variants.items() if name not in bad})
    floor = timing.Roofline(n * k + 2 * m * k + 2 * m * n, 2 * m * n * k).floor(BANDWIDTH)
    return {
        "bench": "linear",
        "m": m,
        "n": n,
        "k": k,
        "floor_us": floor,
        "us": {name: spent._asdict() for name, spent in times.items()},
        "wrong": bad,
    }


def main() -> None:
    """Time the cases, print a table, and append JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="a folder with the libraries of vLLM and SGLang")
    parser.add_argument("--json", type=Path, help="append one JSON object a case to this file")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--m", nargs="+", type=int, default=ROWS)
    chosen = parser.parse_args()
    peers = baselines.load(chosen.peers)
    table = Table("m x n x k", "floor us", "fp8core", "vllm", "above the floor", title=torch.cuda.get_device_name())
    for shape in chosen.shapes:
        n, k = (int(size) for size in shape.split("x"))
        for m in chosen.m:
            record = case(m, n, k, peers)
            ours, theirs = (record["us"].get(name, {}).get("median") for name in ("fp8core", "vllm"))
            table.add_row(
                f"{m} x {n} x {k}",
                f"{record['floor_us']:.1f}",
                "wrong" if ours is None else f"{ours:.2f}",
                "-" if theirs is None else f"{theirs:.2f}",
                "" if ours is None else f"{ours - record['floor_us']:+.2f}",
            )
            if chosen.json:
                with chosen.json.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
