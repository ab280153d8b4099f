"""Times RMS norm and SiLU fused with quantization, and compares them with their floor, a copy, and vLLM's kernels.

    python -m bench.fused [--baselines FOLDER] [--json FILE] [--kinds norm add+norm silu] [--shapes 1x4096 8192x8192]

Inputs are bfloat16, results float8_e4m3fn. Every result of fp8core is checked against PyTorch's arithmetic in fp32
before it is timed: at most one code in 500 may differ, by one step (the order of the sum and the last bits of exp are
not specified). Inputs and results rotate over more memory than L2 holds; variants are interleaved.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bench import baselines, log, timing
from bench.needs import require_gpu
from bench.roofline import Roofline
from fp8core.kernels.fused import NORM_QUANTIZE, SILU_QUANTIZE
from fp8core.problem import GROUP_128, PER_TENSOR, PER_TOKEN, GroupShape, NormQuantize, SiluQuantize
from fp8core.runtime import device
from fp8core.runtime.plans import Plan, RmsNormNumbers, SiluNumbers

SHAPES: Final = ("1x4096", "16x8192", "1024x8192", "4096x4096", "8192x8192", "16384x14336")
KINDS: Final = {"norm": 3, "add+norm": 7, "silu": 5}
"""By kind: the bytes that are read and written per element of the result."""
MODES: Final[dict[str, GroupShape]] = {"static": PER_TENSOR, "token": PER_TOKEN, "1x128": GROUP_128}
EPSILON: Final = 1e-6
MOST_OFF: Final = 1 / 500


class Case(NamedTuple):
    """A kind, a mode, and the shape of the result."""

    kind: str
    mode: str
    rows: int
    cols: int

    @property
    def roofline(self) -> Roofline:
        """The bytes of the elements and of the scales."""
        scale_rows, scale_cols = MODES[self.mode].scale_shape(self.rows, self.cols)
        return Roofline(KINDS[self.kind] * self.rows * self.cols + 4 * scale_rows * scale_cols)


class Operands(NamedTuple):
    """The operands of one call."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    data: torch.Tensor
    scale: torch.Tensor


def operands(case: Case) -> Operands:
    """Return new operands; the scale has a value that suits the static mode."""
    rows, cols = case.rows, case.cols
    x = torch.randn(rows, cols * (2 if case.kind == "silu" else 1), device="cuda").bfloat16()
    residual = torch.randn(rows if case.kind == "add+norm" else 0, cols, device="cuda").bfloat16()
    weight = (torch.rand(cols, device="cuda") + 0.5).bfloat16()
    data = torch.empty(rows, cols, dtype=baselines.FP8, device="cuda")
    scale = torch.full(MODES[case.mode].scale_shape(rows, cols), 0.02, device="cuda")
    return Operands(x, residual, weight, data, scale)


@cache
def bound(plan: Plan, numbers: tuple) -> Callable[..., None]:
    """Return a plan's launch, bound to some numbers."""
    return plan.bind(numbers)


def ours(case: Case) -> Callable[[Operands], None]:
    """Return a call of the fp8core kernel that the table chooses for the case."""
    group, static, target, fp8 = MODES[case.mode], case.mode == "static", device.target(0), "float8_e4m3fn"
    limits = (case.rows, float("inf"), 1e-10)
    if case.kind == "silu":
        silu = SILU_QUANTIZE.plan(
            SiluQuantize(target, "bfloat16", fp8, group, static, "float32", "k", False, case.cols, 16)
        )

        def run(o: Operands) -> None:
            launch = bound(silu, SiluNumbers(2 * case.cols, case.cols, *o.scale.stride(), *limits))
            launch(timing.stream(), o.x.data_ptr(), o.data.data_ptr(), o.scale.data_ptr(), 0)

        return run
    adds = case.kind == "add+norm"
    norm = NORM_QUANTIZE.plan(
        NormQuantize(target, "bfloat16", "bfloat16", fp8, group, static, "float32", "k", adds, False, case.cols, 16)
    )

    def run_norm(o: Operands) -> None:
        strides = case.cols, case.cols, EPSILON, case.cols, *o.scale.stride()
        launch = bound(norm, RmsNormNumbers(*strides, *limits))
        inputs = o.x.data_ptr(), o.weight.data_ptr(), o.residual.data_ptr() if adds else 0
        launch(timing.stream(), *inputs, o.data.data_ptr(), o.scale.data_ptr(), 0)

    return run_norm


def vllm(case: Case, ops: Any) -> Iterator[Callable[[Operands], object]]:
    """Yield vLLM's kernel for the case, if it has one."""
    match case.kind, case.mode:
        case "norm", "static":
            yield lambda o: ops.rms_norm_static_fp8_quant(o.data, o.x, o.weight, o.scale, EPSILON)
        case "add+norm", "static":
            yield lambda o: ops.fused_add_rms_norm_static_fp8_quant(o.data, o.x, o.residual, o.weight, o.scale, EPSILON)
        case "norm", "token":
            yield lambda o: ops.rms_norm_dynamic_per_token_quant(o.data, o.x, o.weight, o.scale, EPSILON, None, None)
        case "add+norm", "token":
            yield lambda o: ops.rms_norm_dynamic_per_token_quant(
                o.data, o.x, o.weight, o.scale, EPSILON, None, o.residual
            )
        case "silu", "static":
            yield lambda o: ops.silu_and_mul_quant(o.data, o.x, o.scale)


def produced(case: Case, o: Operands) -> torch.Tensor:
    """Return the values to be quantized, computed by PyTorch in fp32."""
    if case.kind == "silu":
        gate, up = o.x.float().chunk(2, 1)
        return (gate.double() / (1 + torch.exp(-gate.double()))).float() * up
    h = o.x.float() + o.residual.float() if case.kind == "add+norm" else o.x.float()  # the sum is not rounded
    mean = h.double().square().mean(1, keepdim=True).float()
    return h * (torch.ones((), device="cuda") / torch.sqrt(mean + EPSILON)) * o.weight.float()


def check(case: Case, run: Callable[[Operands], object]) -> str | None:
    """Return how the result of fp8core's kernel is wrong, or None."""
    o = operands(case)
    o.data.view(torch.uint8).fill_(0x5A)
    values, total = produced(case, o), o.x + o.residual if case.kind == "add+norm" else o.residual
    run(o)
    if not torch.equal(o.residual, total):
        return "residual is not the sum"
    want = o.scale if case.mode == "static" else baselines.scales(values, case.mode)
    apart = ((o.scale - want).abs() / want).max().item()
    codes = baselines.codes(values, want, case.mode).view(torch.uint8)
    steps = (o.data.view(torch.uint8).int() - codes.int()).abs()
    off = (steps > 0).float().mean().item()
    if not (apart <= 1e-6 and off <= MOST_OFF and steps.max().item() <= 1):  # a NaN is wrong
        return f"scales off by {apart:.1e}, {off:.1e} of the codes by up to {steps.max().item()}"
    return None


def measure(case: Case, loaded: baselines.Loaded) -> dict[str, Any]:
    """Return one record: the case, its floor, and each variant's time or error."""
    runs: dict[str, Callable[[Operands], object]] = {"fp8core": ours(case)}
    wrong = {name: fault for name, run in runs.items() if (fault := check(case, run))}
    if loaded.vllm is not None:
        runs.update(("vllm", run) for run in vllm(case, loaded.vllm))
    sets = [operands(case) for _ in range(timing.copies(case.roofline.bytes))]
    calls: dict[str, list[Callable[[], object]]] = {
        name: [lambda run=run, o=o: run(o) for o in sets]  # type: ignore[misc]
        for name, run in runs.items()
        if name not in wrong
    }
    calls["copy"] = [baselines.copy(case.roofline.bytes) for _ in sets]
    times = timing.compare(calls, least=min(64, max(4, len(sets))))
    return {
        **case._asdict(),
        "floor_us": case.roofline.floor(),
        "us": timing.fields(times),
        "wrong": wrong,
    }


def main() -> None:
    """Time the cases, print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baselines", type=Path, help="a folder with the libraries of vLLM and SGLang")
    log.options(parser)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    chosen = parser.parse_args()
    require_gpu(parser)
    loaded = baselines.load(chosen.baselines)
    names = ("copy", "fp8core", "vllm")
    table = Table("kind", "mode", "shape", "floor us", *names, "of copy", title=torch.cuda.get_device_name(0))
    cases = [
        Case(kind, mode, *map(int, shape.split("x")))
        for kind, mode, shape in product(chosen.kinds, chosen.modes, chosen.shapes)
    ]
    for case, record in log.Log(chosen).measured(cases, Case._asdict, partial(measure, loaded=loaded)):
        torch.cuda.empty_cache()
        times, wrong = record["us"], record["wrong"]
        cells = [f"{times[n]['median']:.2f}" if n in times else wrong.get(n, "-") for n in names]
        share = times["copy"]["median"] / times["fp8core"]["median"] if "fp8core" in times else float("nan")
        shape = f"{case.rows}x{case.cols}"
        table.add_row(case.kind, case.mode, shape, f"{record['floor_us']:.2f}", *cells, f"{share:.2f}")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
