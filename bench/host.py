"""Measures host time in microseconds: of each public function, of the steps of interop, and of the baselines' calls.

    python -m bench.host [--baselines FOLDER] [--json FILE]

Each public function is called with and without given results, on torch tensors (`bench.calls`) and some on CuPy arrays.
Calls are interleaved, and a ratio is the median of the rounds' ratios. If there is a GPU, arrays are on it, with sizes
whose kernels take less time than their calls, so that the queue never fills. Otherwise only the steps of interop are
timed, as calls of the host engine are mostly computation. `python -m bench host --against CHECKOUT` compares the public
functions with those of another checkout.
"""

import argparse
import timeit
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

import fp8core
from bench import results
from fp8core import interop
from fp8core.core import signature
from fp8core.kernels.quantize import QUANTIZE
from fp8core.runtime import device
from fp8core.runtime.plans import QuantizeNumbers
from fp8core.timing import interleaved

if TYPE_CHECKING:
    from bench.baselines import Loaded

TURNS: Final = 41
STRETCH_MS: Final = 2.0
"""The length of each turn."""
CALLS_A_TURN: Final = 200
"""The most calls in a turn, so that the device's queue never fills."""

RATIOS: Final = (
    ("quantize, out given", "vllm", "quantize, out given"),
    ("quantize", "vllm", "quantize"),
    ("rms_norm_quant, out given", "vllm", "rms_norm_quant, out given"),
    ("scaled_mm m=16, out given", "vllm", "scaled_mm m=16, out given"),
    ("scaled_mm m=16", "torch", "_scaled_mm m=16"),
    ("scaled_mm m=80", "torch", "_scaled_mm m=80"),
    ("Fp8Linear m=16", "vllm", "quantize + scaled_mm m=16"),
    ("Fp8Linear m=80", "vllm", "quantize + scaled_mm m=80"),
)
"""A call of fp8core, and the baseline and its call that do the same."""


class Step(NamedTuple):
    """A call, or a step that calls consist of."""

    framework: str
    name: str
    run: Callable[[], object]


def nothing() -> None:
    """Do nothing: the time of an empty call is the floor."""


def sample(framework: str) -> Any:
    """Return a 16 x 4096 bfloat16 array of ``framework``, or None if it is not installed or cannot use the device."""
    try:
        return MAKERS[framework](device.count() > 0)
    except (ImportError, RuntimeError, ValueError):
        return None


def _torch(gpu: bool) -> Any:
    import torch

    return torch.ones(16, 4096, dtype=torch.bfloat16, device="cuda" if gpu else "cpu")


def _jax(gpu: bool) -> Any:
    import jax

    place = jax.local_devices(backend="gpu" if gpu else "cpu")[0]
    return jax.device_put(jax.numpy.ones((16, 4096), jax.numpy.bfloat16), place)


def _cupy(gpu: bool) -> Any:
    import ml_dtypes

    return device.cupy().ones((16, 4096), ml_dtypes.bfloat16) if gpu else None


def _numpy(_: bool) -> Any:
    import ml_dtypes
    import numpy as np

    return np.ones((16, 4096), ml_dtypes.bfloat16)


MAKERS: Final[dict[str, Callable[[bool], Any]]] = {"torch": _torch, "cupy": _cupy, "jax": _jax, "numpy": _numpy}


def steps(framework: str, x: Any) -> Iterator[Step]:
    """Yield the steps of interop for one operand and one result."""
    seen = interop.view(x, "x")
    kind, target, stream = seen.framework, seen.target, interop.stream_of(seen)
    shape = seen.shape
    yield Step(framework, "view", lambda: interop.view(x, "x"))
    yield Step(framework, "stream_of", lambda: interop.stream_of(seen))
    yield Step(framework, "empty bfloat16", lambda: kind.empty(shape, "bfloat16", target))
    yield Step(framework, "empty float8", lambda: kind.empty(shape, "float8_e4m3fn", target))
    yield Step(framework, "empty, strides", lambda: kind.empty((16, 32), "float32", target, (1, 16)))
    yield Step(framework, "scratch", lambda: kind.scratch(4096, target))
    yield Step(framework, "empty and wrap", lambda: kind.wrap(kind.empty(shape, "bfloat16", target).array, stream))


def parts(x: Any, data: Any, scale: Any) -> Iterator[Step]:
    """Yield the single steps of a repeated `quantize` of ``x`` into ``data`` and ``scale``."""
    seen = interop.view(x, "x")
    (rows, cols), target = seen.shape, seen.target
    plan = QUANTIZE.plan(fp8core.explain(fp8core.quantize, x).problem)
    launch = plan.bind(QuantizeNumbers(cols, cols, 1, 1, rows, rows, inf, 1e-10))
    stream, (x_at, data_at, scale_at) = interop.stream_of(seen), signature.signature((x, data, scale))[0]
    recognize = None if seen.framework.address is None else seen.framework.guard((x, data, scale))
    key = "float8_e4m3fn", fp8core.PER_TOKEN, False, None, "float32", "k", 1e-10, None
    known, same = {key: None}, (*key[:-1], None)
    yield Step("fp8core", "of it: signature of three", lambda: signature.signature((x, data, scale)))
    if recognize is not None:
        yield Step("fp8core", "of it: recognizing three", lambda: recognize(x, data, scale))
    yield Step("fp8core", "of it: key", lambda: known.get(same))
    yield Step("fp8core", "of it: stream", seen.framework.stream_getter(target))
    yield Step("fp8core", "of it: launch", lambda: launch(stream, x_at, data_at, scale_at, 0))
    yield Step(
        "fp8core", "a result of 16 x 1024", partial(seen.framework.allocator((rows, cols), "bfloat16", target), None)
    )


def calls(loaded: "Loaded") -> Iterator[Step]:
    """Yield whole calls on torch tensors and CuPy arrays, and those of the baselines."""
    import torch

    from bench import calls as public

    for call in public.host_calls():
        yield Step("fp8core", call.name, call.make())
    fp8, n, k, dtype = torch.float8_e4m3fn, 1024, 1024, torch.bfloat16
    x, many = public.normal(16, k), public.normal(80, k)
    w = fp8core.quantize(public.normal(n, k))
    (data, scale), (many_data, _) = fp8core.quantize(x), fp8core.quantize(many)
    weight, channels, out = w.data.t(), w.scale.t(), public.normal(16, n)
    one, gain = torch.ones(1, device="cuda"), public.normal(1, k)[0].contiguous()
    yield from parts(x, data, scale)
    theirs = sample("cupy")
    if theirs is not None:
        there = fp8core.quantize(theirs)
        yield Step("fp8core", "quantize of CuPy, out given", partial(fp8core.quantize, theirs, out=there))
        yield Step("fp8core", "quantize of CuPy", partial(fp8core.quantize, theirs))
    multiply = torch._scaled_mm
    yield Step("torch", "_scaled_mm m=16", partial(multiply, data, weight, one, one, out_dtype=dtype))
    yield Step("torch", "_scaled_mm m=80", partial(multiply, many_data, weight, one, one, out_dtype=dtype))
    if loaded.vllm is None:
        return
    quantize, product = loaded.vllm.dynamic_per_token_scaled_fp8_quant, loaded.vllm.cutlass_scaled_mm

    def two(x: torch.Tensor, rows: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        def quantized() -> tuple[torch.Tensor, torch.Tensor]:
            codes = torch.empty(rows, k, device="cuda", dtype=fp8)
            tokens = torch.empty(rows, 1, device="cuda", dtype=torch.float32)
            quantize(codes, x, tokens, None)
            return codes, tokens

        def both() -> torch.Tensor:
            codes, tokens = quantized()
            result = torch.empty(rows, n, device="cuda", dtype=dtype)
            product(result, codes, weight, tokens, channels, None)
            return result

        return quantized, both

    quantized, both = two(x, 16)
    norm = loaded.vllm.rms_norm_dynamic_per_token_quant
    yield Step("vllm", "quantize, out given", partial(quantize, data, x, scale, None))
    yield Step("vllm", "rms_norm_quant, out given", partial(norm, data, x, gain, scale, 1e-6, None, None))
    yield Step("vllm", "quantize", quantized)
    yield Step("vllm", "scaled_mm m=16, out given", partial(product, out, data, weight, scale, channels, None))
    yield Step("vllm", "quantize + scaled_mm m=16", both)
    yield Step("vllm", "quantize + scaled_mm m=80", two(many, 80)[1])


def by_turns(steps: Sequence[Step]) -> list[list[float]]:
    """Return the microseconds of each step in each turn; steps are interleaved, so that drift affects all alike."""
    timers = {place: timeit.Timer(step.run) for place, step in enumerate(steps)}
    for timer in timers.values():
        timer.timeit(20)  # compiles kernels and fills caches

    def elapsed(timer: timeit.Timer, rounds: int) -> float:
        count = min(rounds, CALLS_A_TURN)
        if device.count():
            device.cupy().cuda.runtime.deviceSynchronize()
        return timer.timeit(count) / count * 1e3

    found = interleaved(timers, elapsed, TURNS, STRETCH_MS)
    return [[1e3 * ms for ms in found[place]] for place in timers]


def report(
    table: Table, steps: Sequence[Step], bench: str, where: str
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Time steps, add them to a table, and return their records, and their times by framework and name."""
    times = by_turns(steps)
    records = []
    for step, spent in zip(steps, times, strict=True):
        low, middle, high = quantiles(spent, n=4, method="inclusive")
        table.add_row(step.framework, step.name, f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
        record = {"bench": bench, "where": where, "framework": step.framework, "step": step.name}
        records.append({**record, "us": middle, "low": low, "high": high})
    return records, {f"{step.framework} {step.name}": spent for step, spent in zip(steps, times, strict=True)}


def main() -> None:
    """Time the steps, print tables, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one JSON object a step to this file")
    parser.add_argument("--baselines", type=Path, help="a folder with the libraries of vLLM and SGLang")
    chosen = parser.parse_args()
    where = str(device.target(device.current())) if device.count() else f"host ({device.why_none()})"
    table = Table("framework", "step", "us", "quartiles", title=f"host time, {where}")
    table.columns[2].justify = "right"
    lines, _ = report(table, [Step("python", "an empty call", nothing)], "overhead", where)
    samples = {framework: sample(framework) for framework in MAKERS}
    for framework, x in samples.items():
        if x is None:
            table.add_row(framework, "not here", "", "")
        else:
            lines += report(table, list(steps(framework, x)), "overhead", where)[0]
    against = Table("call", "beside", "ratio", "quartiles", title="of the turns")
    if device.count() and samples["torch"] is not None:
        from bench import baselines

        records, turns = report(table, list(calls(baselines.load(chosen.baselines))), "calls", where)
        lines += records
        for name, whose, theirs in RATIOS:
            if f"{whose} {theirs}" in turns:
                pairs = zip(turns[f"fp8core {name}"], turns[f"{whose} {theirs}"], strict=True)
                low, middle, high = quantiles([ours / other for ours, other in pairs], n=4, method="inclusive")
                against.add_row(name, f"{whose} {theirs}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
    console = Console()
    console.print(table)
    if against.row_count:
        console.print(against)
    results.append(chosen.json, *lines)


if __name__ == "__main__":
    main()
