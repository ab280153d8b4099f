"""Times decoder layers of Llama 8B under jax.jit, in FP8 and bfloat16, and single calls in a program and eagerly.

    python -m bench.jax_layer [--json FILE] [--m 1 16 64]

One program runs the linear path of four layers, each with its own weights: RMS norm, fused q, k and v; the output
projection; residual, RMS norm, gate and up; SiLU and down. Attention is left out, so the output projection takes the
first columns of q, k, v. FP8 is per token x per channel by this library; bfloat16 is jax.numpy, compiled by XLA. Both
results are compared before they are timed. The time of a program is the average over many that are started one after
the other.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import fp8core
import fp8core.jax
from bench import results
from bench.needs import require_gpu

HIDDEN: Final = 4096
QKV: Final = 6144
MLP: Final = 14336
SIZES: Final = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * MLP, HIDDEN), "down": (HIDDEN, MLP)}
EPSILON: Final = 1e-5
LAYERS: Final = 4
FAR: Final = 0.15
"""A relative error of four layers above this is a mistake."""
ROUNDS: Final = 7
CHAIN: Final = 64
"""The number of 256 x 256 layers in a program, each of which takes the result of the one before."""
SMALL: Final = 256


class Weights(NamedTuple):
    """The weights of a layer, as arrays or as FP8 layers."""

    norms: Any
    qkv: Any
    o: Any
    gate_up: Any
    down: Any


def made(key: Any) -> Weights:
    """Return a layer's weights in bfloat16."""
    keys = jax.random.split(key, len(SIZES))
    each = {
        name: jax.random.normal(one, (n, k), jnp.bfloat16) * k**-0.5
        for one, (name, (n, k)) in zip(keys, SIZES.items(), strict=True)
    }
    return Weights(jnp.ones((2, HIDDEN), jnp.bfloat16), **each)


def in_bfloat16(x: Any, layers: list[Weights]) -> Any:
    """Return the result of layers by jax.numpy."""

    def norm(x: Any, weight: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + EPSILON)).astype(x.dtype) * weight

    for layer in layers:
        qkv = norm(x, layer.norms[0]) @ layer.qkv.T
        x = x + qkv[:, :HIDDEN] @ layer.o.T
        gate, up = jnp.split(norm(x, layer.norms[1]) @ layer.gate_up.T, 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ layer.down.T
    return x


def in_fp8(x: Any, layers: list[Weights]) -> Any:
    """Return the result of layers by this library."""
    for layer in layers:
        qkv = layer.qkv(fp8core.rms_norm_quant(x, layer.norms[0], EPSILON))
        o = layer.o(qkv[:, :HIDDEN])
        q, x = fp8core.jax.rms_norm_quant(o, layer.norms[1], EPSILON, residual=x)
        x = x + layer.down(fp8core.silu_and_mul_quant(layer.gate_up(q)))
    return x


def us(call: Callable[[], Any], calls: int) -> dict[str, float]:
    """Return the median and the least time of a call, in rounds of ``calls`` that are started one after the other."""
    times = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls * 1e6)
    kept = sorted(times[1:])  # in the first round, XLA records command buffers
    return {"median": kept[len(kept) // 2], "min": kept[0]}


def layer(m: int, calls: int = 30) -> dict[str, Any]:
    """Return one record: the time of a layer in both dtypes, and the relative error."""
    wide = [made(key) for key in jax.random.split(jax.random.key(0), LAYERS)]
    narrow = [Weights(one.norms, *[fp8core.jax.Fp8Linear.from_weight(weight) for weight in one[1:]]) for one in wide]
    x = jax.random.normal(jax.random.key(1), (m, HIDDEN), jnp.bfloat16)
    programs = {"bf16": (jax.jit(in_bfloat16), wide), "fp8": (jax.jit(in_fp8), narrow)}
    wanted, found = (function(x, layers).astype(jnp.float32) for function, layers in programs.values())
    error = float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))
    if not error < FAR:
        raise SystemExit(f"the results are {error:.2f} apart")
    times = {
        name: {of: spent / LAYERS for of, spent in us(lambda f=function, w=layers: f(x, w), calls).items()}
        for name, (function, layers) in programs.items()
    }
    return {"bench": "jax_layer", "m": m, "us": times, "error": error}


def calls_of(count: int = 20) -> dict[str, Any]:
    """Return one record: the time of a layer in a chain with one token, in FP8 and bfloat16, and of eager calls."""
    weight = jax.random.normal(jax.random.key(0), (SMALL, SMALL), jnp.bfloat16) / 16
    small = fp8core.jax.Fp8Linear.from_weight(weight)
    x = jax.random.normal(jax.random.key(1), (1, SMALL), jnp.bfloat16)

    def chain(x: Any, of: Any, step: Callable[[Any, Any], Any]) -> Any:
        for _ in range(CHAIN):
            x = step(x, of)
        return x

    fp8 = jax.jit(lambda x, of: chain(x, of, lambda x, of: of(x)))
    bf16 = jax.jit(lambda x, of: chain(x, of, lambda x, of: x @ of.T))
    return {
        "bench": "jax_layer",
        "m": 0,
        "us": {
            "fp8, one in a chain": {of: t / CHAIN for of, t in us(lambda: fp8(x, small), count).items()},
            "bf16, one in a chain": {of: t / CHAIN for of, t in us(lambda: bf16(x, weight), count).items()},
            "quantize, eager": us(lambda: fp8core.quantize(x).data, 10 * count),
            "linear, eager": us(lambda: small(x), 10 * count),
        },
    }


def main() -> None:
    """Time the layers, print a table, and append JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one JSON object a case to this file")
    parser.add_argument("--m", nargs="+", type=int, default=(1, 16, 64))
    chosen = parser.parse_args()
    require_gpu(parser, "jax")
    place = jax.devices()[0].device_kind
    table = Table("m", "bf16 us", "fp8 us", "of bf16", "error", title=f"decoder layer of Llama 8B under jit, {place}")
    for m in chosen.m:
        record = layer(m)
        results.append(chosen.json, record)
        bf16, fp8 = (record["us"][name]["median"] for name in ("bf16", "fp8"))
        table.add_row(str(m), f"{bf16:.1f}", f"{fp8:.1f}", f"{fp8 / bf16:.2f}", f"{record['error']:.3f}")
    calls = calls_of()
    results.append(chosen.json, calls)
    console = Console(width=120)
    console.print(table)
    for name, times in calls["us"].items():
        console.print(f"{name}: {times['median']:.1f} us")


if __name__ == "__main__":
    main()
