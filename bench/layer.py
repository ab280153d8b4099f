"""Times the linear path of decoder layers inside a CUDA graph; compares it with its floor, vLLM and torch.

    python -m bench.layer [--baselines FOLDER] [--json FILE] [--models Llama-8B] [--m 1 16 64]
    python -m bench.layer --calls [--models Llama-70B/8] [--m 16 64]

The path consists of residual and RMS norm; q, k and v; the output projection; residual and RMS norm; gate and up; SiLU
and down (see `bench.decoder`). The floor is the sum of the launches' floors. Scales are per token x per channel, for
DeepSeek-V3 1x128 x 128x128. Weights rotate over more memory than L2 holds; layers share the memory of their
activations. "plain" lets the library allocate results and passes `Quantized` on, "preallocated" gives memory for every
result, vLLM's kernels write to given memory, and torch multiplies in bfloat16. Every variant is checked against float64
arithmetic before it is timed.

With --calls it times the layer's first call, the first two calls, and so on, and prints how much each call adds: its
cost in place, which includes its overlap with the calls next to it.
"""

import argparse
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

import fp8core
from bench import baselines, decoder, labels, log, results, timing
from bench.decoder import MODELS, Memory, Weights
from bench.errors import relative
from bench.needs import require_gpu

ROWS: Final = (1, 4, 16, 64, 256, 1024, 4096)
FAR: Final = 0.1
"""A relative error above this is a mistake. A code that rounds differently changes codes in later quantizations, so
that two correct layers differ by up to 0.06."""
LONG_US: Final = 1000.0
"""For layers with a larger floor, graphs have fewer layers and are replayed less often."""


def measure(name: str, m: int, weights: list[Weights], loaded: baselines.Loaded) -> dict[str, Any]:
    """Return one record: the model, the rows, the floor, and each variant's time or error."""
    memory, floor = Memory(MODELS[name], m), MODELS[name].floor(m)
    calls, wrong = {}, {}
    for variant, run in decoder.runs(tuple(labels.LAYER), loaded.vllm).items():
        memory.reset()
        reference = decoder.want(weights[0], memory)
        try:
            found = run(weights[0], memory)
        except (RuntimeError, AttributeError, fp8core.Fp8Error) as error:
            wrong[variant] = str(error).splitlines()[0][:100]
            continue
        error_of = relative(found, reference)
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


def added(name: str, m: int, weights: list[Weights]) -> list[float]:
    """Return the microseconds that each of `decoder.CALLS` adds to the calls before it."""
    memory = Memory(MODELS[name], m)
    first = {
        str(count): [lambda count=count, w=w: decoder.plain(w, memory, count) for w in weights]  # type: ignore[misc]
        for count in range(1, len(decoder.CALLS) + 1)
    }
    timing.rest()
    times = [spent.median for spent in timing.compare(first, least=16).values()]
    return [time - before for time, before in zip(times, [0.0, *times], strict=False)]


def print_calls(models: list[str], rows: list[int]) -> None:
    """Time the calls of layers, and print a table with their floors."""
    table = Table("model", "m", *decoder.CALLS, "all", title=torch.cuda.get_device_name())
    for name in models:
        weights = [Weights(MODELS[name], wide=False) for _ in range(timing.copies(MODELS[name].weight_bytes, least=2))]
        for m in rows:
            times, floors = added(name, m, weights), MODELS[name].call_floors(m)
            cells = [f"{time:.2f} ({floor:.2f})" for time, floor in zip(times, floors, strict=True)]
            table.add_row(name, str(m), *cells, f"{sum(times):.2f} ({sum(floors):.2f})")
        del weights
        torch.cuda.empty_cache()
    Console(width=150).print(table)


def main() -> None:
    """Time the layers, print a table, and append JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baselines", type=Path, help="a folder with the library of vLLM")
    log.options(parser)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--m", nargs="+", type=int, default=ROWS)
    parser.add_argument("--calls", action="store_true", help="time what each call adds, of fp8core only")
    chosen = parser.parse_args()
    require_gpu(parser)
    if chosen.calls:
        print_calls(chosen.models, chosen.m)
        return
    there = log.Log(chosen)
    loaded = baselines.load(chosen.baselines)
    names = tuple(labels.LAYER)
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
