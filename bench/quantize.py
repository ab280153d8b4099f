"""Times quantization; compares it with its floor, a copy, Triton, torch.compile and the kernels of vLLM and SGLang.

    python -m bench.quantize [--baselines FOLDER] [--json FILE] [--modes token 1x128] [--shapes 1x4096 8192x8192]

Every variant's result is checked against PyTorch's arithmetic before it is timed; codes of baselines, which treat
corner cases differently, may differ by one step. Inputs and results rotate over more memory than L2 holds; variants are
interleaved.
"""

import argparse
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import fp8core
from bench import baselines, log, timing
from bench.baselines import Baseline, Result
from bench.needs import require_gpu
from bench.roofline import Roofline
from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.quantize import QUANTIZE
from fp8core.problem import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, GroupShape
from fp8core.runtime.plans import QuantizeNumbers

SHAPES: Final = ("1x4096", "16x8192", "1024x8192", "4096x4096", "8192x8192", "16384x14336", "65536x8192")
MODES: Final[dict[str, GroupShape]] = {
    "static": PER_TENSOR,
    "tensor": PER_TENSOR,
    "token": PER_TOKEN,
    "1x128": GROUP_128,
    "1x128 mn": GROUP_128,
    "128x128": BLOCK_128,
}


class Case(NamedTuple):
    """A mode, a shape and an input dtype; results are float8_e4m3fn."""

    mode: str
    rows: int
    cols: int
    x: str = "bfloat16"

    @property
    def base(self) -> str:
        """The mode without its scale layout."""
        return self.mode.split()[0]

    @property
    def roofline(self) -> Roofline:
        """The bytes that are read and written per element, and the bytes of the scales."""
        scale_rows, scale_cols = MODES[self.mode].scale_shape(self.rows, self.cols)
        return Roofline((ITEMSIZE[self.x] + 1) * self.rows * self.cols + 4 * scale_rows * scale_cols)

    def key(self) -> dict[str, object]:
        """Return the fields of a record that distinguish the case from others."""
        return {"mode": self.mode, "rows": self.rows, "cols": self.cols}

    def inputs(self) -> list[torch.Tensor]:
        """Return matrices to rotate over, whose magnitudes differ from row to row."""
        count, x_type = timing.copies(self.roofline.bytes), getattr(torch, self.x)
        spread = torch.linspace(-4, 4, self.rows, device="cuda").exp().unsqueeze(1)
        return [(torch.randn(self.rows, self.cols, device="cuda") * spread).to(x_type) for _ in range(count)]

    def result(self, x: torch.Tensor) -> Result:
        """Return an empty result; in the static mode it has the scale of x."""
        shape = MODES[self.mode].scale_shape(self.rows, self.cols)
        scale = (
            torch.empty(shape, device="cuda") if self.mode != "1x128 mn" else torch.empty(shape[::-1], device="cuda").T
        )
        if self.mode == "static":
            scale.copy_(baselines.scales(x, "static"))
        return Result(torch.empty(x.shape, dtype=baselines.FP8, device="cuda"), scale)


def ours(case: Case) -> Baseline:
    """Return a call of the fp8core kernel that the table chooses for the case."""
    x = torch.empty(case.rows, case.cols, dtype=getattr(torch, case.x), device="cuda")
    options = {"group_shape": MODES[case.mode], "scale_layout": "mn" if case.mode.endswith("mn") else "k"}
    given = {"scale": torch.ones(1, device="cuda")} if case.mode == "static" else {}
    plan = QUANTIZE.plan(fp8core.explain(fp8core.quantize, x, **options, **given).problem)

    @cache
    def bound(strides: tuple[int, int]) -> Callable[..., None]:
        return plan.bind(QuantizeNumbers(case.cols, case.cols, *strides, case.rows, case.rows, float("inf"), 1e-10))

    def run(x: torch.Tensor, r: Result) -> None:
        bound(tuple(r.scale.stride()))(timing.stream(), x.data_ptr(), r.data.data_ptr(), r.scale.data_ptr(), 0)

    return run


def variants_of(case: Case, loaded: baselines.Loaded, compile_too: bool) -> dict[str, Baseline]:
    """Return fp8core's kernel and the baselines by name."""
    found = {
        "fp8core": ours(case),
        **dict(loaded.quantizers(case.mode)),
        **dict(baselines.triton(case.mode, case.cols)),
    }
    if compile_too and case.mode != "1x128 mn":
        found["torch.compile"] = baselines.compiled(case.base)
    return found


def check(case: Case, name: str, run: Baseline, x: torch.Tensor) -> str | None:
    """Return how the result of a variant is wrong, or None."""
    result = case.result(x)
    result.data.view(torch.uint8).fill_(0x5A)
    if case.mode != "static":
        result.scale.fill_(-1.0)
    returned = run(x, result)
    data, scale = returned if isinstance(returned, tuple) else result
    want = result.scale if case.mode == "static" else baselines.scales(x, case.base)
    steps = (
        (data.view(torch.uint8).int() - baselines.codes(x, want, case.base).view(torch.uint8).int()).abs().max().item()
    )
    if name == "fp8core" and (steps or not torch.equal(scale, want)):
        return f"codes differ by {steps}, scales by {(scale - want).abs().max().item()}"
    return f"codes differ by {steps}" if steps > 1 else None


def measure(case: Case, loaded: baselines.Loaded, compile_too: bool) -> dict[str, object]:
    """Return one record: the case, its floor, and each variant's time or error."""
    inputs = case.inputs()
    outputs = [case.result(x) for x in inputs]
    calls: dict[str, list[Callable[[], object]]] = {}
    wrong: dict[str, str] = {}
    for name, run in variants_of(case, loaded, compile_too).items():
        fault = check(case, name, run, inputs[0])
        if fault:
            wrong[name] = fault
        else:
            calls[name] = [lambda run=run, x=x, r=r: run(x, r) for x, r in zip(inputs, outputs, strict=True)]  # type: ignore[misc]
    calls["copy"] = [baselines.copy(case.roofline.bytes) for _ in inputs]
    times = timing.compare(calls, least=min(64, max(4, len(inputs))))
    return {
        **case.key(),
        "floor_us": case.roofline.floor(),
        "us": timing.fields(times),
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baselines", type=Path, help="a folder with the libraries of vLLM and SGLang")
    log.options(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--compile", action="store_true", help="time torch.compile, too (it compiles for a while)")
    arguments = parser.parse_args()
    require_gpu(parser)
    loaded = baselines.load(arguments.baselines)
    console, table = Console(width=150), Table(title=torch.cuda.get_device_name(0))
    names = ["copy", "fp8core", "vllm", "sgl", "triton", *(["torch.compile"] if arguments.compile else [])]
    for column in ("mode", "shape", "floor us", *names, "of floor", "of copy"):
        table.add_column(column, justify="right")
    cases = [Case(mode, *map(int, shape.split("x"))) for mode, shape in product(arguments.modes, arguments.shapes)]
    measuring = partial(measure, loaded=loaded, compile_too=arguments.compile)
    for _, record in log.Log(arguments).measured(cases, Case.key, measuring):
        torch.cuda.empty_cache()
        table.add_row(*row_of(record, names))
    console.print(table)


def row_of(record: dict[str, object], names: list[str]) -> list[str]:
    """Return the cells of a record in the table."""
    times, wrong, floor = record["us"], record["wrong"], record["floor_us"]
    assert isinstance(times, dict)
    assert isinstance(wrong, dict)
    assert isinstance(floor, float)
    cells = [f"{times[n]['median']:.2f}" if n in times else wrong.get(n, "-") for n in names]
    mine = times["fp8core"]["median"] if "fp8core" in times else float("nan")
    shares = [f"{floor / mine:.2f}", f"{times['copy']['median'] / mine:.2f}"]
    return [str(record["mode"]), f"{record['rows']}x{record['cols']}", f"{floor:.2f}", *cells, *shares]


if __name__ == "__main__":
    main()
