"""The linear path of decoder layers inside a CUDA graph, beside the sum of its launches' floors, vLLM and torch.

    python -m bench.layer [--baselines FOLDER] [--json FILE] [--models Llama-8B] [--m 1 16 64]

Residual and RMS norm; q, k and v; the output projection; residual and RMS norm; gate and up; SiLU and down (see
`bench.decoder`). Scales are per token x per channel, of DeepSeek-V3 1x128 x 128x128. Weights rotate over more memory
than L2 holds; layers share the memory of what they compute. "plain" lets the library allocate and passes
`Quantized` on, "preallocated" gives every result memory, vLLM's kernels write to given memory, and torch multiplies in
bfloat16. Every variant is checked against float64 arithmetic before it is timed.
"""

import argparse
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

import fp8core
from bench import baselines, decoder, log, results, timing
from bench.decoder import MODELS, Memory, Weights

ROWS: Final = (1, 4, 16, 64, 256, 1024, 4096)
FAR: Final = 0.1
"""A relative error that is a mistake. A code that rounds the other way changes codes of the quantizations after it, so
that two right layers are up to 0.06 apart."""
LONG_US: Final = 1000.0
"""From this floor on fewer layers make a graph, and it is replayed fewer times."""


def measure(name: str, m: int, weights: list[Weights], loaded: baselines.Loaded) -> dict[str, Any]:
    """Return one record: the model, the rows, the floor, and each variant's time or what kept it from having one."""
    memory, floor = Memory(MODELS[name], m), MODELS[name].floor(m)
    calls, wrong = {}, {}
    for variant, run in decoder.runs(tuple(results.LAYER), loaded.vllm).items():
        memory.reset()
        reference = decoder.want(weights[0], memory)
        try:
            found = run(weights[0], memory).double()
        except (RuntimeError, AttributeError, fp8core.Fp8Error) as error:
            wrong[variant] = str(error).splitlines()[0][:100]
            continue
        error_of = float((found - reference).norm() / reference.norm())
        if error_of <= FAR:
            calls[variant] = [lambda run=run, w=w: run(w, memory) for w in weights]  # type: ignore[misc]
        else:
            wrong[variant] = f"error {error_of:.1e}"
    memory.reset()
    replays, least = (7, 4) if floor > LONG_US else (timing.REPLAYS, 16)
    timing.rest()
    times = timing.compare(calls, replays, least)
    return {
        "bench": "layer",
        "model": name,
        "m": m,
        "floor_us": floor,
        "us": {variant: spent._asdict() for variant, spent in times.items()},
        "wrong": wrong,
    }


def main() -> None:
    """Time the layers, print a table, and append JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baselines", type=Path, help="a folder with the library of vLLM")
    log.options(parser)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--m", nargs="+", type=int, default=ROWS)
    chosen = parser.parse_args()
    there = log.Log(chosen)
    loaded = baselines.load(chosen.baselines)
    names = tuple(results.LAYER)
    table = Table("model", "m", "floor us", *names, "of the floor", title=torch.cuda.get_device_name())
    for name in chosen.models:
        rows = [m for m in chosen.m if not there.has({"bench": "layer", "model": name, "m": m})]
        if not rows:
            continue
        copies = timing.copies(MODELS[name].weight_bytes, least=2)
        weights = [Weights(MODELS[name], wide=True) for _ in range(copies)]
        for m in rows:
            record = measure(name, m, weights, loaded)
            there.append(record)
            cells = [f"{us:.2f}" if (us := results.us(record, x)) else record["wrong"].get(x, "-") for x in names]
            mine = results.us(record, "plain")
            share = "-" if mine is None else f"{mine / record['floor_us']:.3f}"
            table.add_row(name, str(m), f"{record['floor_us']:.2f}", *cells, share)
            torch.cuda.empty_cache()
        del weights
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
