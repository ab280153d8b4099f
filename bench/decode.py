"""Times products of few rows, and compares them with their floor, torch, cuBLASLt and the baselines' kernels.

    python -m bench.decode [--baselines FOLDER] [--json FILE] [--modes row block] [--shapes 6144x4096] [--m 1 16 64]

A shape is n x k. CUDA graphs have 64 calls; weights rotate over more memory than L2 holds, activations stay warm. Every
variant's output is checked against float64 before it is timed. Records name the tile or algorithm that ran, like those
of `bench.choice`. Scales: "tensor" is one for each operand, "row" per token x per channel, "block" 1x128 x 128x128
(m-major, which the baselines require).
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bench import baselines, block_baselines, labels, log, results, timing
from bench.algorithms import described
from bench.choice_cases import MODES
from bench.errors import relative
from bench.needs import require_gpu
from bench.roofline import Roofline
from fp8core.errors import Fp8Error
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.example_problems import example_product
from fp8core.problem import ScaledMm
from fp8core.runtime import device
from fp8core.table import Choice, Kernel

SHAPES: Final = (
    *("6144x4096", "4096x4096", "28672x4096", "4096x14336", "8192x8192", "7168x16384", "2112x7168"),
    *("1024x4096", "3584x4096", "4096x1792", "5120x5120", "37888x3584", "3584x18944", "13312x16384", "8192x3584"),
    *("5376x21504", "43008x5376", "57344x8192"),
)
"""Weights of Llama 8B, 70B and 405B, Qwen2.5, Gemma 3 and DeepSeek-V3, whole and split over GPUs."""
OURS: Final = (labels.DECODE, labels.BLOCK, labels.LIBRARY)
"""Prefixes of the names of rows in fp8core's table; for each, the row that the table prefers is timed."""
FAR: Final = 4e-3
"""A relative error above this is a mistake."""
FEW: Final = 64
LONG: Final = 100e6
"""The check in float64 lowers the GPU's clock, to which products with at most `FEW` rows and more than `LONG` bytes are
sensitive: the GPU rests before they are timed."""

Call = Callable[["Operands"], torch.Tensor]


class Operands(NamedTuple):
    """The operands of one call: e4m3 a [m, k] and weight [n, k], scales as matrices, and the bfloat16 result."""

    a: torch.Tensor
    weight: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    out: torch.Tensor


class Case(NamedTuple):
    """A mode of scales and a shape."""

    mode: str
    m: int
    n: int
    k: int

    @property
    def roofline(self) -> Roofline:
        """The bytes of the weight, a and out, each once, and the operations."""
        moved = self.n * self.k + self.m * self.k + 2 * self.m * self.n
        return Roofline(moved, 2 * self.m * self.n * self.k)

    def operands(self) -> list[Operands]:
        """Return sets of operands that differ in their weights only."""
        m, n, k = self[1:]
        blocks, tiles = -(-k // 128), -(-n // 128)
        shapes = {"tensor": ((1, 1), (1, 1)), "row": ((m, 1), (n, 1)), "block": ((m, blocks), (tiles, blocks))}
        scale_a, scale_b = (torch.rand(shape, device="cuda") + 0.5 for shape in shapes[self.mode])
        if self.mode == "block":
            scale_a = scale_a.T.contiguous().T
        a = torch.randn(m, k, device="cuda").to(baselines.FP8)
        first = torch.randn(n, k, device="cuda").to(baselines.FP8)
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        weights = [first, *(first.clone() for _ in range(timing.copies(n * k, 3) - 1))]
        return [Operands(a, weight, scale_a, scale_b, out) for weight in weights]

    def problem(self) -> ScaledMm:
        """Return the case as a problem for the table of kernels."""
        made = example_product(device.target(0), *MODES[self.mode], m=self.m, n=self.n, k=self.k)
        strides = (1 if self.m > 1 else 0, self.m) if self.mode == "block" else made.scale_a_strides
        return made._replace(scale_a_strides=strides, alignment=16, prefetch_weight=True)


def want(case: Case, o: Operands) -> torch.Tensor:
    """Return the result in float64."""
    a, weight = o.a.double(), o.weight.double()
    if case.mode != "block":
        return (a @ weight.T) * o.scale_a.double() * o.scale_b.double().reshape(1, -1)
    a *= o.scale_a.double().repeat_interleave(128, 1)[:, : case.k]
    weight *= o.scale_b.double().repeat_interleave(128, 1)[:, : case.k].repeat_interleave(128, 0)[: case.n]
    return a @ weight.T


def rows(problem: ScaledMm) -> dict[str, Kernel]:
    """Return the kernel that runs a problem without tuning, and the preferred kernel of each of `OURS`, by name."""
    ranking = list(SCALED_MM.ranking(problem))
    wanted = [kernel for kernel in ranking if kernel is ranking[0] or kernel.reservation(problem) is None]
    found: dict[str, Kernel] = {}
    for kernel in wanted:
        name = next((name for name in OURS if kernel.name.startswith(name)), kernel.name)
        if name not in found and (name in OURS or kernel is ranking[0]):
            found[name] = kernel
    return found


def launched(launch: Any) -> Call:
    """Return a call that launches a plan with the addresses of the operands."""
    scratch = torch.empty(launch.scratch_bytes + 256, dtype=torch.uint8, device="cuda")

    def run(o: Operands) -> torch.Tensor:
        places = (x.data_ptr() for x in (o.a, o.weight, o.scale_a, o.scale_b))
        launch(timing.stream(), *places, 0, o.out.data_ptr(), 0, 0, -(-scratch.data_ptr() // 256) * 256)
        return o.out

    return run


def _torch(o: Operands) -> torch.Tensor:
    scale_b = o.scale_b.T if o.scale_b.numel() > 1 else o.scale_b
    tensor = o.scale_a.numel() == 1 and o.scale_b.numel() == 1
    scales = (o.scale_a.reshape(()), o.scale_b.reshape(())) if tensor else (o.scale_a, scale_b)
    return torch._scaled_mm(o.a, o.weight.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=True)


def _vllm(ops: Any, o: Operands) -> torch.Tensor:
    ops.cutlass_scaled_mm(o.out, o.a, o.weight.T, o.scale_a, o.scale_b.T, None)
    return o.out


def _sgl(ops: Any, o: Operands) -> torch.Tensor:
    found: torch.Tensor = ops.fp8_scaled_mm(o.a, o.weight.T, o.scale_a, o.scale_b, torch.bfloat16, None)
    return found


def variants(
    case: Case, loaded: baselines.Loaded, blocks: Mapping[str, block_baselines.Call]
) -> Iterator[tuple[str, Call]]:
    """Yield the baselines that can run the case, by name."""
    if case.mode != "block":
        yield "torch", _torch
    if loaded.vllm is not None:
        yield "vllm", partial(_vllm, loaded.vllm)
    if loaded.sgl is not None and case.mode == "row":
        yield "sgl", partial(_sgl, loaded.sgl)
    if case.mode == "block":
        yield from blocks.items()


def measure(
    case: Case, loaded: baselines.Loaded, blocks: Mapping[str, block_baselines.Call], replays: int
) -> dict[str, Any]:
    """Return one record: the case, its floor, and each variant's time or error."""
    operands = case.operands()
    reference = want(case, operands[0])
    calls: dict[str, list[Callable[[], object]]] = {}
    wrong: dict[str, str] = {}
    problem = case.problem()
    own = rows(problem)
    runs = {name: launched(kernel.plan(problem)) for name, kernel in own.items()}
    for name, run in (*runs.items(), *variants(case, loaded, blocks)):
        operands[0].out.fill_(float("nan"))
        try:
            result = run(operands[0])
        except (RuntimeError, Fp8Error) as error:
            wrong[name] = str(error).splitlines()[0][:60]
            continue
        error_of = relative(result, reference)
        if error_of <= FAR:
            calls[name] = [partial(run, o) for o in operands]
        else:
            wrong[name] = f"error {error_of:.1e}"
    del reference
    if case.m <= FEW and case.roofline.bytes > LONG:
        timing.rest()
    times = timing.compare(calls, replays)
    return {
        **case._asdict(),
        "runs": next(iter(own)),
        "ran": {name: described(problem, Choice(kernel.name)) for name, kernel in own.items()},
        "floor_us": case.roofline.floor(),
        "us": timing.fields(times),
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baselines", type=Path, help="a folder with the libraries of vLLM and SGLang")
    parser.add_argument(
        "--deep-gemm",
        action="store_true",
        help="time that folder's kernels for 1x128 scales, too; they compile for a while",
    )
    log.options(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["row", "block"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--m", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--replays", type=int, default=timing.REPLAYS)
    arguments = parser.parse_args()
    require_gpu(parser)
    there = log.Log(arguments)
    asked = arguments.deep_gemm and arguments.baselines
    blocks = dict(block_baselines.load(arguments.baselines)) if asked else {}
    loaded = baselines.load(arguments.baselines)
    console, table = Console(width=150), Table(title=torch.cuda.get_device_name(0))
    names = [*OURS, "torch", "vllm", "sgl", *blocks]
    for column in ("mode", "m x n x k", "floor us", *names, "above floor"):
        table.add_column(column, justify="right")
    for shape in arguments.shapes:
        n, k = map(int, shape.split("x"))
        for mode in arguments.modes:
            for case in (Case(mode, m, n, k) for m in arguments.m):
                if there.has(case._asdict()):
                    continue
                record = measure(case, loaded, blocks, arguments.replays)
                there.append(record)
                cells = [
                    f"{record['us'][name]['median']:.2f}" if name in record["us"] else record["wrong"].get(name, "-")
                    for name in names
                ]
                mine = results.own(record) or float("nan")
                floor = record["floor_us"]
                table.add_row(mode, f"{case.m}x{n}x{k}", f"{floor:.2f}", *cells, f"{mine - floor:+.2f}")
        torch.cuda.empty_cache()
    console.print(table)


if __name__ == "__main__":
    main()
