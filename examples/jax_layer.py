"""Decoder layers in JAX with FP8 weights; the same code runs on a CPU and on a GPU.

    python examples/jax_layer.py [--hidden 256] [--layers 4] [--tokens 16]

A model with random weights runs in bfloat16 and in FP8, each under one ``jax.jit`` with a ``jax.lax.scan`` over its
layers. The norms, the residual and SiLU are fused with the quantization of their results. The program prints the
relative distance of the two results, the bytes of the weights, and the time of a run. On a CPU the library runs on
NumPy, which is made to be right rather than fast; on a GPU its kernels are recorded into XLA's command buffers.
"""

import argparse
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import fp8core
import fp8core.jax
from fp8core.jax import Fp8Linear

HEAD = 64
EPSILON = 1e-6


class Layer(NamedTuple):
    """A decoder layer; its matrices are arrays or, once it is quantized, FP8 layers."""

    norms: Any
    qkv: Any
    o: Any
    gate_up: Any
    down: Any


def random_layers(key: Any, count: int, hidden: int) -> Layer:
    """Return ``count`` layers with random bfloat16 weights, stacked."""
    shapes = {"qkv": (3 * hidden, hidden), "o": (hidden, hidden), "gate_up": (8 * hidden, hidden)}
    shapes["down"] = hidden, 4 * hidden
    keys = jax.random.split(key, len(shapes))
    weights = {
        name: jax.random.normal(one, (count, n, k), jnp.bfloat16) * k**-0.5
        for one, (name, (n, k)) in zip(keys, shapes.items(), strict=True)
    }
    return Layer(jnp.ones((count, 2, hidden), jnp.bfloat16), **weights)


def quantized(layers: Layer) -> Layer:
    """Return layers whose matrices are FP8, with one scale for each output channel."""
    return Layer(layers.norms, *[jax.vmap(Fp8Linear.from_weight)(weight) for weight in layers[1:]])


def attention(qkv: Any) -> Any:
    """Return causal attention of one sequence ``[tokens, 3 * hidden]``."""
    q, k, v = (x.reshape(x.shape[0], -1, HEAD) for x in jnp.split(qkv, 3, -1))
    return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True).reshape(qkv.shape[0], -1)


def in_bfloat16(x: Any, layers: Layer) -> Any:
    """Run the layers in bfloat16, with jax.numpy."""

    def norm(x: Any, weight: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + EPSILON)).astype(x.dtype) * weight

    def step(x: Any, layer: Layer) -> tuple[Any, None]:
        x = x + attention(norm(x, layer.norms[0]) @ layer.qkv.T) @ layer.o.T
        gate, up = jnp.split(norm(x, layer.norms[1]) @ layer.gate_up.T, 2, -1)
        return x + (jax.nn.silu(gate) * up) @ layer.down.T, None

    return jax.lax.scan(step, x, layers)[0]


def in_fp8(x: Any, layers: Layer) -> Any:
    """Run the layers in FP8."""

    def step(x: Any, layer: Layer) -> tuple[Any, None]:
        qkv = layer.qkv(fp8core.rms_norm_quant(x, layer.norms[0], EPSILON))
        o = layer.o(attention(qkv))
        q, x = fp8core.jax.rms_norm_quant(o, layer.norms[1], EPSILON, residual=x)
        return x + layer.down(fp8core.silu_and_mul_quant(layer.gate_up(q))), None

    return jax.lax.scan(step, x, layers)[0]


def nbytes(layers: Layer) -> int:
    """Return the bytes of all arrays of layers."""
    return sum(x.nbytes for x in jax.tree.leaves(layers))


def main() -> None:
    """Run the model in both dtypes, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256, help=f"a multiple of {HEAD}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16)
    chosen = parser.parse_args()
    for name, step in {"hidden": HEAD, "layers": 1, "tokens": 1}.items():
        given, wanted = getattr(chosen, name), "whole number" if step == 1 else f"multiple of {step}"
        if given < 1 or given % step:
            parser.error(f"argument --{name}: needs a positive {wanted}, got {given}")
    layers = random_layers(jax.random.key(0), chosen.layers, chosen.hidden)
    x = jax.random.normal(jax.random.key(1), (chosen.tokens, chosen.hidden), jnp.bfloat16)
    runs = {"bfloat16": (jax.jit(in_bfloat16), layers), "FP8": (jax.jit(in_fp8), quantized(layers))}
    made = {}
    for name, (run, weights) in runs.items():
        made[name] = jax.block_until_ready(run(x, weights)).astype(jnp.float32)
        start = time.perf_counter()
        jax.block_until_ready(run(x, weights))
        spent = (time.perf_counter() - start) * 1e3
        print(f"{name:8}  {nbytes(weights) / 1e6:8.2f} MB of weights  {spent:8.2f} ms a run")
    apart = jnp.linalg.norm(made["FP8"] - made["bfloat16"]) / jnp.linalg.norm(made["bfloat16"])
    print(f"relative distance of the results: {float(apart):.3f} on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
