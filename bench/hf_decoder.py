"""Times a decoder of transformers with Qwen3-8B's layers, one token per sequence: bfloat16 and FP8, compiled and eager.

    python -m bench.hf_decoder [--json FILE] [--layers 4] [--batch 1 16]

Both models are `transformers.Qwen3Model` with the same random weights; `fp8core.torch.quantize_model_` quantizes one of
them, per token x per channel. "graph" is `torch.compile(fullgraph=True)` in a CUDA graph, "options" the same with
`fp8core.torch.compile_options(model)` for both; "eager" calls the models without compiling them, where the host takes
longer than the GPU. There is no KV cache: the benchmark times the arithmetic of the layers, independently of the length
of a context. FP8 results are compared with those of bfloat16 before anything is timed.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

import fp8core.torch
from bench import results, timing
from bench.errors import relative
from bench.needs import require_gpu
from fp8core.timing import interleaved

HIDDEN: Final = 4096
MLP: Final = 12288
HEADS: Final = 32
KEY_HEADS: Final = 8
DEVICE: Final = "cuda"
FAR: Final = 0.25
"""A relative error of the last hidden states above this is a mistake; four FP8 layers differ from bfloat16 by 0.14."""
WAYS: Final = ("graph", "options", "eager")
EAGER_TURNS: Final = 15
EAGER_MS: Final = 20.0

Run = Callable[[], object]


def decoder(layers: int) -> Any:
    """Return a bfloat16 model with random weights, without a head, and with a small embedding, which is not used."""
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=128,
        num_hidden_layers=layers,
        vocab_size=256,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Qwen3Model(config).to(torch.bfloat16)
    return model.eval().requires_grad_(False)


def measure(batch: int, models: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a record for each way of running the models: the error of FP8 relative to bfloat16, and both times."""
    x = torch.randn(batch, 1, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    wanted = models["bf16"](inputs_embeds=x, use_cache=False).last_hidden_state
    for way in WAYS:
        torch._dynamo.reset()
        runs = {name: _call(_made(model, way), x) for name, model in models.items()}
        yield record("hf_decoder", way, batch, runs, wanted, FAR)


def _made(model: Any, way: str) -> Any:
    """Return a model, compiled as the way of running it requires."""
    if way == "eager":
        return model
    options = fp8core.torch.compile_options(model) if way == "options" else None
    return torch.compile(model, fullgraph=True, dynamic=False, options=options)


def _call(model: Any, x: torch.Tensor) -> Run:
    return lambda: model(inputs_embeds=x, use_cache=False).last_hidden_state


def record(bench: str, way: str, m: int, runs: dict[str, Run], wanted: torch.Tensor, far: float) -> dict[str, Any]:
    """Return the record of one way of running models, without times if a result is further off than ``far``."""
    errors = {name: relative(run(), wanted) for name, run in runs.items()}
    times: dict[str, timing.Timing] = {}
    right = max(errors.values()) <= far
    if right and way != "eager":
        times = timing.compare({name: [run] for name, run in runs.items()}, least=1)
    elif right:
        calls = interleaved(runs, timing.elapsed, EAGER_TURNS, EAGER_MS)
        times = {name: timing.spread([1e3 * ms for ms in found]) for name, found in calls.items()}
    us = {name: spent._asdict() for name, spent in times.items()}
    return {"bench": bench, "mode": way, "m": m, "errors": errors, "us": us}


def main() -> None:
    """Time the models, print a table, and append JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append three JSON objects a batch to this file")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", nargs="+", type=int, default=(1, 16), help="sequences, with one token each")
    chosen = parser.parse_args()
    require_gpu(parser)
    models = {"bf16": decoder(chosen.layers), "fp8core": decoder(chosen.layers)}
    fp8core.torch.quantize_model_(models["fp8core"])
    title = f"{chosen.layers} layers of Qwen3-8B in transformers, {torch.cuda.get_device_name()}, us"
    table = Table("tokens", "way", "bf16", "fp8core", "ratio", "error", title=title)
    with torch.no_grad():
        for found in (found for batch in chosen.batch for found in measure(batch, models)):
            results.append(chosen.json, found)
            batch = found["m"]
            wide, ours = (results.us(found, name) for name in models)
            times = ("-", "-", "-") if not wide or not ours else (f"{wide:.1f}", f"{ours:.1f}", f"{ours / wide:.3f}")
            table.add_row(str(batch), found["mode"], *times, f"{found['errors']['fp8core']:.3f}")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
