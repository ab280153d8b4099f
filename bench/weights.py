"""Times the operations on weights (dequantize, requantize, normalize); compares them with their floor and a copy.

    python -m bench.weights [--json FILE] [--shapes 6144x4096 57344x8192]

Every result is checked bit for bit against PyTorch's arithmetic before it is timed. Buffers rotate over more memory
than L2 holds; variants are interleaved.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bench import baselines, results, timing
from bench.needs import require_gpu
from bench.roofline import Roofline
from fp8core.kernels.weights import DEQUANTIZE, NORMALIZE, REQUANTIZE
from fp8core.problem import BLOCK_128, PER_CHANNEL, Dequantize, GroupShape, Normalize, Requantize
from fp8core.runtime import device
from fp8core.runtime.plans import DequantizeNumbers, NormalizeNumbers, RequantizeNumbers

SHAPES: Final = ("6144x4096", "8192x8192", "28672x4096", "57344x8192")
FP8: Final = "float8_e4m3fn"
FLOATS: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Case(NamedTuple):
    """An operation on a weight: its bytes, and functions that make buffers, call it, and return the right result."""

    name: str
    bytes: int
    buffers: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    run: Callable[[torch.Tensor, torch.Tensor], None]
    want: Callable[[torch.Tensor], torch.Tensor]


def codes(rows: int, cols: int) -> torch.Tensor:
    """Return random codes, none of them NaN."""
    found = torch.randint(0, 256, (rows, cols), device="cuda", dtype=torch.uint8)
    return torch.where(found & 0x7F == 0x7F, 0x30, found)


def dequantize(rows: int, cols: int, out: str, group: GroupShape) -> Case:
    """Return dequantization with one scale a group."""
    shape = group.scale_shape(rows, cols)
    scale = torch.rand(shape, device="cuda")
    strides = [0 if extent == 1 else step for extent, step in zip(shape, scale.stride(), strict=True)]
    plan = DEQUANTIZE.plan(Dequantize(device.target(0), FP8, out, group, "float32", cols, 16))
    height, width = rows // shape[0], cols // shape[1]

    launch = plan.bind(DequantizeNumbers(cols, *strides, cols, rows))

    def run(q: torch.Tensor, result: torch.Tensor) -> None:
        launch(timing.stream(), q.data_ptr(), scale.data_ptr(), result.data_ptr())

    def want(q: torch.Tensor) -> torch.Tensor:
        spread = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
        return (q.view(baselines.FP8).float() * spread).to(FLOATS[out])

    size = rows * cols * (1 + FLOATS[out].itemsize)
    return Case(
        f"dequantize to {out}, {shape[0]}x{shape[1]} scales",
        size,
        lambda: (codes(rows, cols), torch.empty(rows, cols, dtype=FLOATS[out], device="cuda")),
        run,
        want,
    )


def requantize(rows: int, cols: int) -> Case:
    """Return requantization of three shards at their largest scale, into another array."""
    widths = (rows // 2, rows // 4, rows - rows // 2 - rows // 4)
    scales = torch.tensor((0.011, 0.013, 0.007), device="cuda")
    largest = torch.empty(1, device="cuda")
    plan = REQUANTIZE.plan(Requantize(device.target(0), FP8, len(widths), cols, 16))

    launch = plan.bind(RequantizeNumbers(cols, scales.numel(), widths, cols))

    def run(weight: torch.Tensor, result: torch.Tensor) -> None:
        launch(timing.stream(), weight.data_ptr(), scales.data_ptr(), result.data_ptr(), largest.data_ptr())

    def want(weight: torch.Tensor) -> torch.Tensor:
        spread = scales.repeat_interleave(torch.tensor(widths, device="cuda")).unsqueeze(1)
        values = weight.view(baselines.FP8).float() * spread * (torch.ones((), device="cuda") / scales.max())
        return values.clamp(-448, 448).to(baselines.FP8).view(torch.uint8)

    return Case(
        "requantize, 3 shards",
        2 * rows * cols,
        lambda: (codes(rows, cols), torch.empty(rows, cols, dtype=torch.uint8, device="cuda")),
        run,
        want,
    )


def normalize(rows: int, cols: int) -> Case:
    """Return the conversion from e4m3fn to e4m3fnuz, with one scale for each row, into another array."""
    scales = torch.rand(rows, device="cuda")
    doubled = torch.empty_like(scales)
    plan = NORMALIZE.plan(Normalize(device.target(0), FP8, 16))

    launch = plan.bind(NormalizeNumbers(rows * cols, rows, 0))

    def run(weight: torch.Tensor, result: torch.Tensor) -> None:
        places = weight.data_ptr(), result.data_ptr(), scales.data_ptr(), doubled.data_ptr(), 0, 0
        launch(timing.stream(), *places)

    return Case(
        "normalize fn to fnuz",
        2 * rows * cols + 8 * rows,
        lambda: (codes(rows, cols), torch.empty(rows, cols, dtype=torch.uint8, device="cuda")),
        run,
        lambda weight: torch.where(weight == 0x80, 0, weight),
    )


def cases(rows: int, cols: int) -> Iterator[Case]:
    """Yield the cases of one shape."""
    yield dequantize(rows, cols, "bfloat16", PER_CHANNEL)
    yield dequantize(rows, cols, "bfloat16", BLOCK_128)
    yield dequantize(rows, cols, "float32", PER_CHANNEL)
    yield requantize(rows, cols)
    yield normalize(rows, cols)


def measure(case: Case, rows: int, cols: int) -> dict[str, Any]:
    """Return one record: the case, its floor and its times, or the fault of its result."""
    sets = [case.buffers() for _ in range(timing.copies(case.bytes))]
    weight, result = sets[0]
    result.view(torch.uint8).fill_(0x5A)
    case.run(weight, result)
    record = {"case": case.name, "rows": rows, "cols": cols, "floor_us": Roofline(case.bytes).floor()}
    if not torch.equal(result, case.want(weight)):
        return {**record, "wrong": "differs from PyTorch's arithmetic"}
    calls: dict[str, list[Callable[[], object]]] = {
        "fp8core": [lambda pair=pair: case.run(*pair) for pair in sets],  # type: ignore[misc]
        "copy": [baselines.copy(case.bytes) for _ in sets],
    }
    times = timing.compare(calls, least=min(64, max(4, len(sets))))
    return {**record, "us": timing.fields(times)}


def main() -> None:
    """Time the cases, print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one line a case to this file")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    chosen = parser.parse_args()
    require_gpu(parser)
    table = Table("kernel", "shape", "floor us", "copy", "fp8core", "of copy", title=torch.cuda.get_device_name(0))
    for shape in chosen.shapes:
        rows, cols = map(int, shape.split("x"))
        for case in cases(rows, cols):
            record = measure(case, rows, cols)
            torch.cuda.empty_cache()
            results.append(chosen.json, record)
            if "wrong" in record:
                table.add_row(case.name, shape, f"{record['floor_us']:.2f}", "-", record["wrong"], "-")
                continue
            mine, copy = (record["us"][name]["median"] for name in ("fp8core", "copy"))
            cells = [f"{us:.2f}" for us in (record["floor_us"], copy, mine, copy / mine)]
            table.add_row(case.name, shape, *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
