"""Times quantization of odd shapes and of the aligned shape next to each, from bfloat16 and from float32.

    python -m bench.odd [--json FILE] [--modes token 1x128] [--types bfloat16]

The ratio scales the neighbour's time to the bytes of the odd shape. Both results are checked bit for bit against
PyTorch's arithmetic before they are timed. Buffers rotate over more memory than L2 holds; the two are interleaved.
"""

import argparse
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from bench import log, timing
from bench.needs import require_gpu
from bench.quantize import MODES, Case, check, ours
from bench.results import neighbour_time
from bench.roofline import Roofline

SHAPES: Final = {
    (4096, 5137): (4096, 5136),
    (83, 5137): (80, 5136),
    (1, 5137): (1, 5136),
    (8192, 1025): (8192, 1024),
    (83, 1025): (80, 1024),
    (16384, 576): (16384, 512),
    (3, 576): (4, 576),
    (4099, 8192): (4096, 8192),
    (4099, 5137): (4096, 5136),
    (83, 8192): (80, 8192),
    (3, 8192): (4, 8192),
}
"""The rows and columns of each odd shape, and those of its neighbour."""
TYPES: Final = ("bfloat16", "float32")


class Calls(NamedTuple):
    """Calls on sets of buffers, the bytes that one call moves, and the fault of the result, if any."""

    calls: list[Callable[[], object]]
    bytes: int
    fault: str | None


def calls(mode: str, rows: int, cols: int, x_type: str) -> Calls:
    """Return fp8core's calls on one shape."""
    case = Case(mode, rows, cols, x_type)
    inputs = case.inputs()
    outputs = [case.result(x) for x in inputs]
    run = ours(case)
    fault = check(case, "fp8core", run, inputs[0])
    pairs = zip(inputs, outputs, strict=True)
    return Calls([lambda x=x, r=r: run(x, r) for x, r in pairs], case.roofline.bytes, fault)  # type: ignore[misc]


def measure(mode: str, x_type: str, odd: tuple[int, int], near: tuple[int, int]) -> dict[str, Any]:
    """Return one record: the shape, its neighbour and their times, or the faults of their results."""
    mine, other = calls(mode, *odd, x_type), calls(mode, *near, x_type)
    record = {
        "bench": "odd",
        "mode": mode,
        "x": x_type,
        "rows": odd[0],
        "cols": odd[1],
        "neighbour": f"{near[0]}x{near[1]}",
        "floor_us": Roofline(mine.bytes).floor(),
        "neighbour_floor_us": Roofline(other.bytes).floor(),
    }
    faults = {name: c.fault for name, c in {"fp8core": mine, "neighbour": other}.items() if c.fault}
    if faults:
        return {**record, "wrong": faults}
    times = timing.compare({"fp8core": mine.calls, "neighbour": other.calls}, least=16)
    return {**record, "us": timing.fields(times)}


def main() -> None:
    """Time the cases, print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    log.options(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["static", "tensor", "token", "1x128"])
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    chosen = parser.parse_args()
    require_gpu(parser)
    there = log.Log(chosen)
    table = Table(title=torch.cuda.get_device_name(0))
    for column in ("mode", "from", "shape", "neighbour", "us", "neighbour's us", "ratio by bytes"):
        table.add_column(column, justify="right")
    for mode in chosen.modes:
        for x_type in chosen.types:
            for odd, near in SHAPES.items():
                if there.has({"mode": mode, "x": x_type, "rows": odd[0], "cols": odd[1]}):
                    continue
                record = measure(mode, x_type, odd, near)
                torch.cuda.empty_cache()
                there.append(record)
                table.add_row(mode, x_type, f"{odd[0]}x{odd[1]}", record["neighbour"], *cells(record))
    Console(width=150).print(table)


def cells(record: dict[str, Any]) -> list[str]:
    """Return the times of a record and their ratio."""
    if "wrong" in record:
        return [str(record["wrong"]), "-", "-"]
    mine, other = (record["us"][name]["median"] for name in ("fp8core", "neighbour"))
    return [f"{mine:.2f}", f"{other:.2f}", f"{mine / neighbour_time(record):.2f}"]


if __name__ == "__main__":
    main()
