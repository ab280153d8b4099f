"""The linear path of a decoder layer of Llama 8B inside a CUDA graph, and the host's time of its calls outside of one.

    python -m bench.layer [--json FILE] [--m 1 16 64] [--host]

RMS norm, fused q, k and v; the output projection; residual, RMS norm, gate and up; SiLU and down: 218 MB of weights,
per token x per channel. "preallocated" gives every producer and layer memory of the caller, "plain" lets the library
allocate and passes `Quantized` on. Attention is left out, so the output projection takes the first columns of q, k, v.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

import fp8core
from bench import results, timing

HIDDEN: Final = 4096
QKV: Final = 6144
MLP: Final = 14336
SIZES: Final = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * MLP, HIDDEN), "down": (HIDDEN, MLP)}
EPSILON: Final = 1e-5
COPIES: Final = 4
"""Layers in a graph, each with weights of its own."""
HOST_CALLS: Final = 2000


class DecoderLayer:
    """The weights of a layer, and memory for what it computes."""

    def __init__(self, m: int) -> None:
        self.layers, self.data, self.scale, self.out = {}, {}, {}, {}
        for name, (n, k) in SIZES.items():
            q = fp8core.quantize(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5)
            self.data[name] = torch.empty(m, k, device="cuda", dtype=torch.float8_e4m3fn)
            self.scale[name] = torch.empty(m, 1, device="cuda")
            self.out[name] = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            self.layers[name] = (
                fp8core.Fp8Linear(q.data, q.scale),
                fp8core.Fp8Linear(q.data, q.scale, input_scale=self.scale[name]),
            )
        self.norms = [torch.rand(HIDDEN, device="cuda", dtype=torch.bfloat16) + 0.5 for _ in range(2)]
        self.x = torch.randn(m, HIDDEN, device="cuda", dtype=torch.bfloat16)

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


def host_us(call: Callable[[], object]) -> float:
    """Return the microseconds of the host for a call, the least of ten stretches."""
    call()
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS // 10):
            call()
        best = min(best, (time.perf_counter() - start) / (HOST_CALLS // 10))
    return best * 1e6


def host(m: int) -> dict[str, float]:
    """Return the host's microseconds of single calls."""
    x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
    q, w = fp8core.quantize(x), fp8core.quantize(torch.randn(512, 512, device="cuda", dtype=torch.bfloat16))
    layer = fp8core.Fp8Linear(w.data, w.scale)
    out, weight = torch.empty(m, 512, device="cuda", dtype=torch.bfloat16), torch.ones(512, device="cuda")
    calls = {
        "quantize": lambda: fp8core.quantize(x),
        "quantize out": lambda: fp8core.quantize(x, out=(q.data, q.scale)),
        "rms_norm_quant": lambda: fp8core.rms_norm_quant(x, weight, EPSILON),
        "scaled_mm_nt": lambda: fp8core.scaled_mm_nt(q.data, w.data, q.scale, w.scale),
        "Fp8Linear": lambda: layer(x),
        "Fp8Linear out": lambda: layer(x, out=out),
    }
    return {name: host_us(call) for name, call in calls.items()}


def main() -> None:
    """Time the layer, or the host's part of single calls, and print or append JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one JSON object a case to this file")
    parser.add_argument("--m", nargs="+", type=int, default=(1, 16, 64))
    parser.add_argument("--host", action="store_true", help="time single calls on the host instead")
    parser.add_argument("--ways", nargs="+", default=("preallocated", "plain"))
    chosen = parser.parse_args()
    for m in chosen.m:
        if chosen.host:
            record = {"bench": "layer host", "m": m, "us": host(m)}
        else:
            layers = [DecoderLayer(m) for _ in range(COPIES)]
            variants = {way: [getattr(layer, way) for layer in layers] for way in chosen.ways}
            spent = timing.compare(variants)
            record = {"bench": "layer", "m": m, "us": {way: us._asdict() for way, us in spent.items()}}
        print(record, flush=True)
        results.append(chosen.json, record)


if __name__ == "__main__":
    main()
