"""A mixture of experts with FP8 weights in two grouped products, compared with the same layer in float64.

    python examples/mixture_of_experts.py [--framework numpy|cupy|torch|jax] [--tokens 64] [--experts 8] [--each 2]

Each token is routed to some of the experts. It is quantized, and its rows are sorted by expert; one grouped product
multiplies them with the gate and up projections of all experts, SiLU is fused with the quantization of its result,
and another grouped product multiplies with the down projections, whose rows are summed for each token. The program
prints how many rows each expert got, the kernels, and the relative error. NumPy runs on the CPU, CuPy on a GPU, and
PyTorch and JAX on a GPU if there is one.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import fp8core
from fp8core import BLOCK_128, GROUP_128


class Experts(NamedTuple):
    """The weights of all experts: ``[experts, 2 * inner, hidden]`` and ``[experts, hidden, inner]``, wide or FP8."""

    gate_up: Any
    down: Any


class Framework(NamedTuple):
    """What the layer needs of a framework of arrays."""

    array: Callable[[np.ndarray], Any]
    numpy: Callable[[Any], np.ndarray]
    device: str


def framework(name: str) -> Framework:
    """Return a framework by its name; PyTorch and JAX on a GPU if there is one."""
    if name == "torch":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        return Framework(lambda x: torch.from_numpy(x).to(device), lambda x: x.cpu().numpy(), device)
    if name == "cupy":
        import cupy

        return Framework(cupy.asarray, cupy.asnumpy, "cuda")
    if name == "jax":
        import jax

        return Framework(jax.numpy.asarray, np.asarray, jax.default_backend())
    return Framework(np.asarray, np.asarray, "cpu")


def sorted_rows(x: Any, chosen: Any, experts: Experts) -> fp8core.Permuted[Any, Any]:
    """Return the tokens in FP8, a row for each choice, sorted by expert."""
    return fp8core.moe_permute(fp8core.quantize(x, group_shape=GROUP_128), chosen, len(experts.down.data))


def in_fp8(x: Any, shares: Any, chosen: Any, experts: Experts) -> Any:
    """Return the weighted sums of the experts' results; ``shares [tokens, each]`` are the weights."""
    a, offs, inverse = sorted_rows(x, chosen, experts)
    gate_up = fp8core.grouped_scaled_mm_nt(a, experts.gate_up, offs=offs, out_dtype="float16")
    h = fp8core.silu_and_mul_quant(gate_up, group_shape=GROUP_128)
    y = fp8core.grouped_scaled_mm_nt(h, experts.down, offs=offs, out_dtype="float32")
    return fp8core.moe_unpermute(y, inverse, shares)


def in_float64(x: np.ndarray, shares: np.ndarray, chosen: np.ndarray, experts: Experts) -> np.ndarray:
    """Return the same sums in float64, expert by expert."""
    out = np.zeros(x.shape)
    for at, (gate_up, down) in enumerate(zip(*experts, strict=True)):
        token, choice = np.nonzero(chosen == at)
        gate, up = np.split(x[token].astype(np.float64) @ gate_up.T, 2, axis=1)
        out[token] += shares[token, choice, None] * ((gate / (1 + np.exp(-gate)) * up) @ down.T)
    return out


def main() -> None:
    """Run the layer in both precisions, and print how far they are apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("numpy", "cupy", "torch", "jax"), default="numpy")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--each", type=int, default=2, help="experts of a token")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 128, so that no block crosses experts")
    parser.add_argument("--inner", type=int, default=128, help="a multiple of 64")
    chosen = parser.parse_args()
    for name, step in {"tokens": 1, "experts": 1, "each": 1, "hidden": 128, "inner": 64}.items():
        given, wanted = getattr(chosen, name), "whole number" if step == 1 else f"multiple of {step}"
        if given < 1 or given % step:
            parser.error(f"argument --{name}: needs a positive {wanted}, got {given}")
    if chosen.each > chosen.experts:
        parser.error(f"argument --each: needs at most as many as --experts, {chosen.experts}, got {chosen.each}")
    of = framework(chosen.framework)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((chosen.tokens, chosen.hidden), np.float32)
    wide = Experts(
        rng.standard_normal((chosen.experts, 2 * chosen.inner, chosen.hidden), np.float32) * chosen.hidden**-0.5,
        rng.standard_normal((chosen.experts, chosen.hidden, chosen.inner), np.float32) * chosen.inner**-0.5,
    )
    logits = rng.standard_normal((chosen.tokens, chosen.experts), np.float32)
    best = np.ascontiguousarray(np.argsort(-logits, axis=1)[:, : chosen.each])
    shares = np.exp(np.take_along_axis(logits, best, 1))
    shares /= shares.sum(1, keepdims=True)

    experts = Experts(*[fp8core.quantize(of.array(weight), group_shape=BLOCK_128) for weight in wide])
    made = of.numpy(in_fp8(of.array(x), of.array(shares), of.array(best), experts))
    exact = in_float64(x, shares, best, wide)

    a, offs, _ = sorted_rows(of.array(x), of.array(best), experts)
    print("rows of each expert:", *np.diff(of.numpy(offs), prepend=0))
    print(fp8core.explain(fp8core.grouped_scaled_mm_nt, a, experts.gate_up, offs=offs).short)
    error = np.linalg.norm(made - exact) / np.linalg.norm(exact)
    print(f"relative error with {chosen.framework} on {of.device}: {error:.4f}")


if __name__ == "__main__":
    main()
