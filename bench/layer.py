"""The linear path of a decoder layer of Llama 8B inside a CUDA graph, beside its floor and the kernels of vLLM.

    python -m bench.layer [--baselines FOLDER] [--json FILE] [--m 1 16 64]

RMS norm, fused q, k and v; the output projection; residual, RMS norm, gate and up; SiLU and down: 218 MB of weights,
per token x per channel. "preallocated" gives every producer and layer memory of the caller, "plain" lets the library
allocate and passes `Quantized` on; vLLM's kernels write to memory of the caller. Attention is left out, so the output
projection takes the first columns of q, k, v. Every variant is checked against float64 arithmetic before it is timed.
The floor counts what each launch has to read and write, weights and results of one launch that the next reads alike.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

import fp8core
from bench import baselines, results, timing
from bench.roofline import Roofline

HIDDEN: Final = 4096
QKV: Final = 6144
MLP: Final = 14336
SIZES: Final = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * MLP, HIDDEN), "down": (HIDDEN, MLP)}
EPSILON: Final = 1e-5
COPIES: Final = 4
"""Layers in a graph, each with weights of its own."""
DEVICE: Final = "cuda"
FAR: Final = 0.1
"""A relative error that is a mistake. A code that rounds the other way changes codes of the quantizations after it, so
that two right layers are up to 0.06 apart."""


class DecoderLayer:
    """The weights of a layer, and memory for what it computes."""

    def __init__(self, m: int) -> None:
        self.layers, self.data, self.scale, self.out = {}, {}, {}, {}
        for name, (n, k) in SIZES.items():
            q = fp8core.quantize(torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) / k**0.5)
            self.data[name] = torch.empty(m, k, device=DEVICE, dtype=torch.float8_e4m3fn)
            self.scale[name] = torch.empty(m, 1, device=DEVICE)
            self.out[name] = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
            self.layers[name] = (
                fp8core.Fp8Linear(q.data, q.scale),
                fp8core.Fp8Linear(q.data, q.scale, input_scale=self.scale[name]),
            )
        self.norms = [torch.rand(HIDDEN, device=DEVICE, dtype=torch.bfloat16) + 0.5 for _ in range(2)]
        self.x = torch.randn(m, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        self.silu = torch.empty(m, MLP, device=DEVICE, dtype=torch.bfloat16)

    def plain(self) -> torch.Tensor:
        """Run the layer with memory of the library."""
        residual = self.x
        qkv = self.layers["qkv"][0](fp8core.rms_norm_quant(self.x, self.norms[0], EPSILON))
        o = self.layers["o"][0](qkv[:, :HIDDEN])
        h = self.layers["gate_up"][0](fp8core.rms_norm_quant(o, self.norms[1], EPSILON, residual=residual))
        return self.layers["down"][0](fp8core.silu_and_mul_quant(h))

    def preallocated(self) -> torch.Tensor:
        """Run the layer with memory of its own."""

        def into(name: str) -> tuple[Any, Any]:
            return self.data[name], self.scale[name]

        def multiply(name: str) -> torch.Tensor:
            return self.layers[name][1](self.data[name], out=self.out[name])

        fp8core.rms_norm_quant(self.x, self.norms[0], EPSILON, out=into("qkv"))
        qkv = multiply("qkv")
        o = self.layers["o"][0](qkv[:, :HIDDEN], out=self.out["o"])
        fp8core.rms_norm_quant(o, self.norms[1], EPSILON, residual=self.x, out=into("gate_up"))
        fp8core.silu_and_mul_quant(multiply("gate_up"), out=into("down"))
        return multiply("down")

    def vllm(self, ops: Any) -> torch.Tensor:
        """Run the layer with vLLM's kernels: SiLU and its quantization per token are two of them."""
        data, scale, out = self.data, self.scale, self.out

        def multiply(name: str) -> torch.Tensor:
            layer = self.layers[name][0]
            ops.cutlass_scaled_mm(out[name], data[name], layer.weight.T, scale[name], layer.weight_scale.T, None)
            return out[name]

        ops.rms_norm_dynamic_per_token_quant(data["qkv"], self.x, self.norms[0], scale["qkv"], EPSILON, None, None)
        qkv = multiply("qkv")
        ops.dynamic_per_token_scaled_fp8_quant(data["o"], qkv[:, :HIDDEN], scale["o"], None)
        ops.rms_norm_dynamic_per_token_quant(
            data["gate_up"], multiply("o"), self.norms[1], scale["gate_up"], EPSILON, None, self.x
        )
        ops.silu_and_mul(self.silu, multiply("gate_up"))
        ops.dynamic_per_token_scaled_fp8_quant(data["down"], self.silu, scale["down"], None)
        return multiply("down")

    def want(self) -> torch.Tensor:
        """Return the result by PyTorch's arithmetic in float64, quantized where the layer is."""

        def norm(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return h / torch.sqrt(h.square().mean(1, keepdim=True) + EPSILON) * weight.double()

        def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
            found = x.float()
            scale = baselines.scales(found, "token")
            codes = baselines.codes(found, scale, "token").double() * scale.double()
            layer = self.layers[name][0]
            weight = layer.weight.double() * layer.weight_scale.double()
            return (codes @ weight.T).bfloat16().double()

        x = self.x.double()
        qkv = multiply("qkv", norm(x, self.norms[0]))
        h = x + multiply("o", qkv[:, :HIDDEN])
        gate, up = multiply("gate_up", norm(h, self.norms[1])).chunk(2, 1)
        return multiply("down", gate / (1 + torch.exp(-gate)) * up)


def roofline(m: int) -> Roofline:
    """Return what a layer has to read and write if products, norms, SiLU and the one quantization are a launch each."""
    products = sum(n * k + m * k + 2 * m * n for n, k in SIZES.values())
    norm, quantize, add_norm, silu = 3 * HIDDEN, 3 * HIDDEN, 7 * HIDDEN, 5 * MLP
    moved = products + 2 * 2 * HIDDEN + m * (norm + quantize + add_norm + silu)
    return Roofline(moved, sum(2 * m * n * k for n, k in SIZES.values()))


def measure(m: int, loaded: baselines.Loaded) -> dict[str, Any]:
    """Return one record: the rows, the floor, and each variant's time or what kept it from having one."""
    layers = [DecoderLayer(m) for _ in range(COPIES)]
    first = layers[0]
    runs: dict[str, Callable[[DecoderLayer], torch.Tensor]] = {
        "preallocated": DecoderLayer.preallocated,
        "plain": DecoderLayer.plain,
    }
    if loaded.vllm is not None:
        runs["vllm"] = lambda layer: layer.vllm(loaded.vllm)
    given, calls, wrong = first.x.clone(), {}, {}
    for name, run in runs.items():
        first.x.copy_(given)  # it is the residual, which is written
        reference = first.want()
        try:
            result = run(first).double()
        except (RuntimeError, AttributeError, fp8core.Fp8Error) as error:
            wrong[name] = str(error).splitlines()[0][:100]
            continue
        error_of = float((result - reference).norm() / reference.norm())
        if error_of <= FAR:
            calls[name] = [lambda run=run, layer=layer: run(layer) for layer in layers]  # type: ignore[misc]
        else:
            wrong[name] = f"error {error_of:.1e}"
    for layer in layers:
        layer.x.copy_(given)
    times = timing.compare(calls)
    return {
        "bench": "layer",
        "m": m,
        "floor_us": roofline(m).floor(),
        "us": {name: spent._asdict() for name, spent in times.items()},
        "wrong": wrong,
    }


def main() -> None:
    """Time the layer, print a table, and append JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baselines", type=Path, help="a folder with the library of vLLM")
    parser.add_argument("--json", type=Path, help="append one JSON object a case to this file")
    parser.add_argument("--m", nargs="+", type=int, default=(1, 16, 64))
    chosen = parser.parse_args()
    loaded = baselines.load(chosen.baselines)
    names = ("preallocated", "plain", "vllm")
    table = Table("m", "floor us", *names, title=f"decoder layer of Llama 8B, {torch.cuda.get_device_name()}")
    for m in chosen.m:
        record = measure(m, loaded)
        results.append(chosen.json, record)
        cells = [
            f"{record['us'][name]['median']:.2f}" if name in record["us"] else record["wrong"].get(name, "-")
            for name in names
        ]
        table.add_row(str(m), f"{record['floor_us']:.2f}", *cells)
        torch.cuda.empty_cache()
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
