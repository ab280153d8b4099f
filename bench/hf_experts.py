"""Times the experts of one layer of Qwen3-30B-A3B in transformers: bfloat16, and FP8 expert by expert and grouped.

    python -m bench.hf_experts [--json FILE] [--tokens 1 16 128 1024]

All have the same random weights. "bf16" is transformers' module with its grouped products, "loop" is
`fp8core.transformers.Experts`, which calls the layers of one expert after the other and waits for the routing, and
"fp8core" is `GroupedExperts`, both per token x per channel. "eager" calls the modules, where the host may take longer
than the GPU; "graph" records these calls in a CUDA graph, which "loop" cannot be; "compiled" is
`torch.compile(fullgraph=True)` in a CUDA graph. FP8 results are compared with those of bfloat16 before they are timed.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from bench import results
from bench.hf_decoder import Run, record
from bench.labels import EXPERTS as NAMES
from bench.needs import require_gpu

HIDDEN: Final = 2048
INNER: Final = 768
EXPERTS: Final = 128
EACH: Final = 8
DEVICE: Final = "cuda"
FAR: Final = 0.1
"""A relative error above this is a mistake."""
WAYS: Final = ("eager", "graph", "compiled")


def modules() -> dict[str, Any]:
    """Return the same experts in bfloat16, as FP8 layers in a loop, and grouped."""
    from transformers import Qwen3MoeConfig, Qwen3MoeModel

    from fp8core.torch import quantize_model_
    from fp8core.transformers import group_experts_, split_experts_

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_experts_per_tok=EACH,
        num_hidden_layers=1,
        vocab_size=256,
        dtype=torch.bfloat16,
        experts_implementation="grouped_mm",
    )
    made = {}
    for name in NAMES:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = Qwen3MoeModel(config).to(torch.bfloat16).eval().requires_grad_(False)
        if name != "bf16":
            split_experts_(model)
            quantize_model_(model, include=["*.experts.*"])
        if name == "fp8core":
            group_experts_(model)
        made[name] = model.layers[0].mlp.experts
    return made


def routed(tokens: int) -> tuple[torch.Tensor, ...]:
    """Return tokens, the experts of each, all equally likely, and their weights."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    weights, index = torch.rand(tokens, EXPERTS, device=DEVICE).topk(EACH)
    return x, index, (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16)


def measure(tokens: int, experts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a record for each way of calling the experts: errors relative to bfloat16, and times."""
    inputs = routed(tokens)
    wanted = experts["bf16"](*inputs)
    for way in WAYS:
        torch._dynamo.reset()
        calls = {
            name: _call(module, way, inputs) for name, module in experts.items() if way == "eager" or name != "loop"
        }
        yield record("hf_experts", way, tokens, calls, wanted, FAR)


def _call(module: Any, way: str, inputs: tuple[torch.Tensor, ...]) -> Run:
    made = torch.compile(module, fullgraph=True, dynamic=False) if way == "compiled" else module
    return lambda: made(*inputs)


def main() -> None:
    """Time the experts, print a table, and append JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append three JSON objects a number of tokens to this file")
    parser.add_argument("--tokens", nargs="+", type=int, default=(1, 16, 128, 1024))
    chosen = parser.parse_args()
    require_gpu(parser)
    experts = modules()
    title = f"experts of a layer of Qwen3-30B-A3B in transformers, {torch.cuda.get_device_name()}, us"
    table = Table("tokens", "way", *NAMES.values(), "error", title=title)
    with torch.no_grad():
        for found in (found for tokens in chosen.tokens for found in measure(tokens, experts)):
            results.append(chosen.json, found)
            us = [results.us(found, name) for name in NAMES]
            cells = ["-" if spent is None else f"{spent:.1f}" for spent in us]
            table.add_row(str(found["m"]), found["mode"], *cells, f"{found['errors']['fp8core']:.3f}")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
