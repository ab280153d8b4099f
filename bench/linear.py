"""Times whole linear layers, quantization and product, inside a CUDA graph: each row of the table, and vLLM's kernels.

    python -m bench.linear [--baselines FOLDER] [--json FILE] [--shapes 6144x4096] [--m 1 16 64]

A shape is n x k; scales are per token x per channel. A graph holds 64 calls; weights rotate over more memory than L2
holds; activations stay warm. "fp8core" is the layer called through the public `Fp8Linear`; then every row of the table
that can run the layer follows by name, whether or not it is the one chosen. Each result is checked against the product
of the dequantized operands before anything is timed. "product" is the product alone, with codes that are computed
before. The floor counts weight, activations and result; "more_us" is the median, over the turns, of the layer's time
minus the product's.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

import fp8core
from bench import baselines, decode, log, timing
from bench.errors import relative
from bench.needs import require_gpu
from bench.roofline import Roofline
from fp8core.core.scaling import EPS
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.linear.table import LINEAR
from fp8core.problem import Linear
from fp8core.runtime.plans import QuantizeNumbers
from fp8core.table import Kernel

SHAPES: Final = (
    *("4096x4096", "6144x4096", "8192x8192", "28672x4096", "7168x16384", "43008x5376", "57344x8192", "13312x16384"),
)
ROWS: Final = (1, 16, 64)
FAR: Final = 4e-3
"""A relative error above this is a mistake."""


def vllm(ops: object, x: torch.Tensor, layer: fp8core.Fp8Linear) -> torch.Tensor:
    """Return the result of vLLM's kernels, including the allocation of their outputs."""
    quantize, product = ops.dynamic_per_token_scaled_fp8_quant, ops.cutlass_scaled_mm
    data = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty(len(x), 1, device=x.device, dtype=torch.float32)
    quantize(data, x, scale, None)
    out = torch.empty(len(x), len(layer.weight), device=x.device, dtype=x.dtype)
    product(out, data, layer.weight.t(), scale, layer.weight_scale.t(), None)
    return out


def problem_of(layer: fp8core.Fp8Linear, x: torch.Tensor) -> Linear:
    """Return the problem of a layer whose weight may be prefetched."""
    told = layer.explain(x)
    found = next(step.problem for step in (*told.before, told) if isinstance(step.problem, Linear))
    return found._replace(product=found.product._replace(prefetch_weight=True))


def by_row(row: Kernel, layer: fp8core.Fp8Linear, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call of the layer by one row of the table, with its own result."""
    problem = problem_of(layer, x)
    m, k = x.shape
    quantize, product = row.plan(problem)
    codes, scale = torch.empty(m * k, dtype=torch.uint8, device="cuda"), torch.empty(m, device="cuda")
    out = torch.empty(m, len(layer.weight), dtype=x.dtype, device="cuda")
    a, launch = x, None
    if quantize is not None:
        strides = x.stride(0), k, *problem.product.scale_a_strides
        a, launch = codes, quantize.bind(QuantizeNumbers(*strides, m, m, problem.scale_ub, EPS))

    def run() -> torch.Tensor:
        stream, scale_at = timing.stream(), scale.data_ptr()
        if launch is not None:
            launch(stream, x.data_ptr(), codes.data_ptr(), scale_at, 0)
        weight = layer.weight.data_ptr(), scale_at, layer.weight_scale.data_ptr()
        product(stream, a.data_ptr(), *weight, 0, out.data_ptr(), 0, 0, 0)
        return out

    return run


def product_alone(layer: fp8core.Fp8Linear, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call of the layer's product with existing codes, by the kernel that `scaled_mm` chooses."""
    product = SCALED_MM.plan(problem_of(layer, x).product)
    data, scale = fp8core.quantize(x)
    out = torch.empty(len(x), len(layer.weight), dtype=x.dtype, device="cuda")
    return partial(decode.launched(product), decode.Operands(data, layer.weight, scale, layer.weight_scale, out))


def wrong(got: torch.Tensor, x: torch.Tensor, layer: fp8core.Fp8Linear) -> bool:
    """Return whether a result is far from the product of the dequantized operands."""
    data, scale = fp8core.quantize(x)
    wide = fp8core.dequantize(data, scale).double() @ fp8core.dequantize(layer.weight, layer.weight_scale).double().t()
    return relative(got, wide) > FAR


def case(m: int, n: int, k: int, loaded: baselines.Loaded) -> dict[str, object]:
    """Return the record of one shape."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    layers: Sequence[fp8core.Fp8Linear] = [
        fp8core.Fp8Linear.from_weight(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
        for _ in range(timing.copies(n * k, most=16))
    ]
    variants = {"fp8core": [partial(layer, x) for layer in layers]}
    for row in LINEAR.kernels:
        if row.refusal(problem_of(layers[0], x)) is None:
            variants[row.name] = [by_row(row, layer, x) for layer in layers]
    variants["product"] = [product_alone(layer, x) for layer in layers]
    if loaded.vllm is not None:
        variants["vllm"] = [partial(vllm, loaded.vllm, x, layer) for layer in layers]
    bad = [name for name, calls in variants.items() if wrong(calls[0](), x, layers[0])]
    timing.rest()
    times = timing.turns({name: calls for name, calls in variants.items() if name not in bad})
    floor = Roofline(n * k + 2 * m * k + 2 * m * n, 2 * m * n * k).floor()
    # Differences within a turn: between turns, changes of the clock may exceed the difference.
    more = [layer - alone for layer, alone in zip(times.get("fp8core", ()), times.get("product", ()), strict=False)]
    return {
        "bench": "linear",
        "m": m,
        "n": n,
        "k": k,
        "floor_us": floor,
        "us": {name: timing.spread(spent)._asdict() for name, spent in times.items()},
        "more_us": timing.spread(more)._asdict() if more else None,
        "wrong": bad,
    }


def main() -> None:
    """Time the cases, print a table, and append JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baselines", type=Path, help="a folder with the libraries of vLLM and SGLang")
    log.options(parser)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--m", nargs="+", type=int, default=ROWS)
    chosen = parser.parse_args()
    require_gpu(parser)
    there = log.Log(chosen)
    loaded = baselines.load(chosen.baselines)
    names = ("fp8core", *(row.name for row in LINEAR.kernels), "product", "vllm")
    table = Table("m x n x k", "floor us", *names, "above the floor", title=torch.cuda.get_device_name())
    for shape in chosen.shapes:
        n, k = (int(size) for size in shape.split("x"))
        for m in chosen.m:
            if there.has({"bench": "linear", "m": m, "n": n, "k": k}):
                continue
            record = case(m, n, k, loaded)
            spent = {name: found["median"] for name, found in record["us"].items()}
            cells = [
                f"{spent[name]:.2f}" if name in spent else "wrong" if name in record["wrong"] else "-" for name in names
            ]
            above = f"{spent['fp8core'] - record['floor_us']:+.2f}" if "fp8core" in spent else ""
            table.add_row(f"{m} x {n} x {k}", f"{record['floor_us']:.1f}", *cells, above)
            there.append(record)
    Console().print(table)


if __name__ == "__main__":
    main()
