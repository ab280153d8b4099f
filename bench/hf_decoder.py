"""A decoder of transformers, Qwen3-8B's layers, one token a sequence: bfloat16 beside FP8, compiled and as it is.

    python -m bench.hf_decoder [--json FILE] [--layers 4] [--batch 1 16]

Both models are `transformers.Qwen3Model` with the same random weights; of one of them `fp8core.torch.quantize_model_`
makes FP8, per token x per channel. "graph" is `torch.compile(fullgraph=True)` in a CUDA graph; "eager" calls the model
without compiling it, where the host takes longer than the GPU. There is no cache of keys and values: what is timed is
the layers' arithmetic, not the length of a context. Before anything is timed, results of FP8 are compared with those
of bfloat16.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

import fp8core.torch
from bench import results, timing
from fp8core.timing import interleaved

HIDDEN: Final = 4096
MLP: Final = 12288
HEADS: Final = 32
KEY_HEADS: Final = 8
DEVICE: Final = "cuda"
FAR: Final = 0.15
"""A relative error of the last hidden states that is a mistake: layers of FP8 are 0.04 from those of bfloat16."""
EAGER_TURNS: Final = 15
EAGER_MS: Final = 20.0

Run = Callable[[], object]


def decoder(layers: int) -> Any:
    """Return a model in bfloat16 with random weights, without a head and with a small embedding, which is not used."""
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


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error of one result against another."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def measure(batch: int, models: dict[str, Any]) -> dict[str, Any]:
    """Return one record: how far FP8 is from bfloat16, and the times of both, in a graph and eager."""
    x = torch.randn(batch, 1, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():

        def call(model: Any) -> Run:
            return lambda: model(inputs_embeds=x, use_cache=False).last_hidden_state

        eager: dict[str, Run] = {name: call(model) for name, model in models.items()}
        torch._dynamo.reset()
        compiled = {name: call(torch.compile(model, fullgraph=True, dynamic=False)) for name, model in models.items()}
        wanted = eager["bf16"]()
        errors = {
            "fp8 eager": distance(eager["fp8"](), wanted),
            "fp8 graph": distance(compiled["fp8"](), wanted),
            "bf16 graph": distance(compiled["bf16"](), wanted),
        }
        record: dict[str, Any] = {"bench": "hf_decoder", "batch": batch, "errors": errors}
        if max(errors.values()) > FAR:
            return {**record, "us": {}}
        graphs = timing.compare({f"{name} graph": [run] for name, run in compiled.items()}, least=1)
        calls = interleaved(eager, timing.elapsed, EAGER_TURNS, EAGER_MS)
    times = graphs | {f"{name} eager": timing.spread([1e3 * ms for ms in found]) for name, found in calls.items()}
    return {**record, "us": {name: spent._asdict() for name, spent in times.items()}}


def main() -> None:
    """Time the models, print a table, and append JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one JSON object a batch to this file")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", nargs="+", type=int, default=(1, 16), help="sequences, with one token each")
    chosen = parser.parse_args()
    models = {"bf16": decoder(chosen.layers), "fp8": decoder(chosen.layers)}
    fp8core.torch.quantize_model_(models["fp8"])
    title = f"{chosen.layers} layers of Qwen3-8B in transformers, {torch.cuda.get_device_name()}, us"
    table = Table("tokens", "bf16 graph", "fp8 graph", "ratio", "bf16 eager", "fp8 eager", "ratio", title=title)
    for batch in chosen.batch:
        record = measure(batch, models)
        results.append(chosen.json, record)
        cells = [str(batch)]
        for way in ("graph", "eager"):
            pair = [results.us(record, f"{name} {way}") for name in models]
            wrong = [f"error {record['errors'][f'fp8 {way}']:.1e}", "-", "-"]
            cells += [f"{pair[0]:.1f}", f"{pair[1]:.1f}", f"{pair[1] / pair[0]:.3f}"] if None not in pair else wrong
        table.add_row(*cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
