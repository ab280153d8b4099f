"""What a call costs on the host: microseconds a step of the border, per framework, and a whole call beside the peers'.

    python -m bench.overhead [--peers FOLDER] [--json FILE]

The floor of a step is an empty call of a method from Python, which is timed in the same run. Arrays lie on a
GPU where there is one, else on the host. Whole calls are timed on a GPU alone, on sizes whose kernels take less time
than their calls, so that the queue never fills.
"""

import argparse
import json
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

import fp8core
from fp8core import arrays, device

if TYPE_CHECKING:
    from bench.baselines import Peers

REPEATS: Final = 7
SECONDS: Final = 0.05
"""Of each repeat."""


class Step(NamedTuple):
    """A thing done once or more a call."""

    framework: str
    name: str
    run: Callable[[], object]


def nothing() -> None:
    """Do nothing: the floor."""


def sample(framework: str) -> Any:
    """Return a 16 x 4096 bfloat16 array of ``framework``, or None if it is not installed or lacks the device."""
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
    """Yield what the border does for one operand and one result."""
    seen = arrays.view(x, "x")
    kind, target, stream = seen.framework, seen.target, arrays.stream_of(seen)
    shape = seen.shape
    yield Step(framework, "view", lambda: arrays.view(x, "x"))
    yield Step(framework, "stream_of", lambda: arrays.stream_of(seen))
    yield Step(framework, "empty bfloat16", lambda: kind.empty(shape, "bfloat16", target))
    yield Step(framework, "empty float8", lambda: kind.empty(shape, "float8_e4m3fn", target))
    yield Step(framework, "empty, strides", lambda: kind.empty((16, 32), "float32", target, (1, 16)))
    yield Step(framework, "scratch", lambda: kind.scratch(4096, target))
    yield Step(framework, "empty and give", lambda: kind.give(kind.empty(shape, "bfloat16", target).array, stream))


def calls(peers: "Peers") -> Iterator[Step]:
    """Yield whole calls on torch tensors, fp8core's and the peers'."""
    import torch

    fp8, n, k = torch.float8_e4m3fn, 1024, 1024
    x = torch.randn(16, k, device="cuda", dtype=torch.bfloat16)
    w = fp8core.quantize(torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
    data, scale = fp8core.quantize(x)
    weight, channels, out = w.data.t(), w.scale.t(), torch.empty(16, n, device="cuda", dtype=torch.bfloat16)
    one, layer = torch.ones(1, device="cuda"), fp8core.Fp8Linear(w.data, w.scale)
    many = torch.randn(80, k, device="cuda", dtype=torch.bfloat16)
    many_data, many_scale = fp8core.quantize(many)
    quantized = (data, scale)
    yield Step("fp8core", "quantize, out given", lambda: fp8core.quantize(x, out=quantized))
    yield Step("fp8core", "quantize", lambda: fp8core.quantize(x))
    yield Step(
        "fp8core", "scaled_mm m=16, out given", lambda: fp8core.scaled_mm(data, weight, scale, channels, out=out)
    )
    yield Step("fp8core", "scaled_mm m=16", lambda: fp8core.scaled_mm(data, weight, scale, channels))
    yield Step("fp8core", "scaled_mm m=80", lambda: fp8core.scaled_mm(many_data, weight, many_scale, channels))
    yield Step("fp8core", "linear m=16", lambda: fp8core.linear(x, w.data, w.scale))
    yield Step("fp8core", "Fp8Linear m=16", lambda: layer(x))
    yield Step("fp8core", "Fp8Linear m=80", lambda: layer(many))
    dtype = torch.bfloat16
    yield Step("torch", "_scaled_mm m=16", lambda: torch._scaled_mm(data, weight, one, one, out_dtype=dtype))
    yield Step("torch", "_scaled_mm m=80", lambda: torch._scaled_mm(many_data, weight, one, one, out_dtype=dtype))
    if peers.vllm is not None:
        quantize, product = peers.vllm.dynamic_per_token_scaled_fp8_quant, peers.vllm.cutlass_scaled_mm
        yield Step("vllm", "quantize, out given", lambda: quantize(data, x, scale, None))

        def both() -> object:
            codes = torch.empty(16, k, device="cuda", dtype=fp8)
            tokens = torch.empty(16, 1, device="cuda", dtype=torch.float32)
            quantize(codes, x, tokens, None)
            result = torch.empty(16, n, device="cuda", dtype=dtype)
            product(result, codes, weight, tokens, channels, None)
            return result

        yield Step("vllm", "scaled_mm m=16, out given", lambda: product(out, data, weight, scale, channels, None))
        yield Step("vllm", "quantize + scaled_mm m=16", both)


def measured(run: Callable[[], object]) -> float:
    """Return the microseconds of one ``run``: the least of several repeats, which others disturb least."""
    timer = timeit.Timer(run)
    once = timer.timeit(20) / 20
    number = max(1, int(SECONDS / max(once, 1e-9)))
    return min(timer.repeat(REPEATS, number)) / number * 1e6


def main() -> None:
    """Time the steps, print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one JSON object a step to this file")
    parser.add_argument("--peers", type=Path, help="a folder with the libraries of vLLM and SGLang")
    chosen = parser.parse_args()
    floor = measured(nothing)
    where = str(device.target(device.current())) if device.count() else f"host ({device.why_none()})"
    table = Table("framework", "step", "us", title=f"host time of the border, {where}; floor {floor:.3f} us")
    table.columns[2].justify = "right"
    lines = []
    for framework in MAKERS:
        x = sample(framework)
        if x is None:
            table.add_row(framework, "not here", "")
            continue
        for step in steps(framework, x):
            spent = measured(step.run)
            table.add_row(step.framework, step.name, f"{spent:.2f}")
            lines.append({"bench": "overhead", "where": where, "framework": framework, "step": step.name, "us": spent})
    if device.count() and sample("torch") is not None:
        from bench import baselines

        for step in calls(baselines.load(chosen.peers)):
            spent = measured(step.run)
            table.add_row(step.framework, step.name, f"{spent:.2f}")
            lines.append(
                {"bench": "calls", "where": where, "framework": step.framework, "step": step.name, "us": spent}
            )
    Console().print(table)
    if chosen.json:
        with chosen.json.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
