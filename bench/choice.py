"""Every able kernel and algorithm of many products, and what the choice without tuning loses to the best of them.

    python -m bench.choice [--json FILE] [--seconds 80] [--modes row block] [--judge FILE ...]

The products are of layers of real models, a few numbers of rows each. They are visited in an order that does not depend
on their shapes, so that what is measured within --seconds is a fair sample. Weights come from memory, activations from
L2. Each time is two medians, over the even and the odd turns of the same graphs: what is fastest by the one is judged
by the other, so that noise does not count as a gain of tuning. With --judge files of such records are judged, and
nothing is timed.
"""

import argparse
import hashlib
import json
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

from bench import results
from bench.__main__ import machine
from fp8core import timing
from fp8core.errors import BackendError
from fp8core.kernels.gemm.args import Matmul
from fp8core.kernels.gemm.blaslt import library, mapping, ordering, query
from fp8core.kernels.gemm.blaslt.rows import RELAYOUT_US
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.explain import explain_product
from fp8core.problem import Granularity, ScaledMm, Target
from fp8core.runtime import device
from fp8core.table import Choice, Kernel, Table, no_estimate

SHAPES: Final[dict[str, tuple[str, ...]]] = {
    "Llama 8B": ("6144x4096", "4096x4096", "28672x4096", "4096x14336"),
    "Llama 70B": ("10240x8192", "8192x8192", "57344x8192", "8192x28672"),
    "Llama 70B / 8": ("1280x8192", "8192x1024", "7168x8192", "8192x3584"),
    "Llama 405B / 8": ("2304x16384", "13312x16384", "16384x6656"),
    "Qwen3 8B": ("24576x4096", "4096x12288"),
    "Qwen3 32B": ("10240x5120", "5120x8192", "51200x5120", "5120x25600"),
    "DeepSeek-V3": ("2112x7168", "24576x1536", "32768x512", "7168x16384", "36864x7168", "7168x18432", "4096x7168"),
    "DeepSeek-V3 / 8": ("7168x2048", "4608x7168", "7168x2304"),
    "Gemma 3 27B": ("8192x5376", "5376x4096", "43008x5376", "5376x21504"),
    "Mistral Small 24B": ("6144x5120", "5120x4096", "65536x5120", "5120x32768"),
}
"""n x k of linear layers, those that read the same input fused."""
ROWS: Final = (
    *(1, 3, 8, 16, 24, 33, 48, 64, 72, 96, 128, 160, 200, 256, 300, 384),
    *(512, 768, 1000, 1024, 1536, 2048, 3000, 4096, 8192, 16384),
)
MODES: Final[dict[str, tuple[Granularity, Granularity]]] = {
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "block": ("group", "block"),
}
ROWS_A_WEIGHT: Final = 4
"""Numbers of rows of each weight and mode."""
MOST_OPERATIONS: Final = 4e12
"""Larger products are left out: they take milliseconds."""
MEDIAN_GOAL, WORST_GOAL = 0.03, 0.10
"""What tuning may gain: at the median and at worst."""
CLOSE: Final = 1.6
"""Candidates that take this many times the least at first sight are not timed closer."""
TURNS: Final = 8
STRETCH_MS: Final = 0.4
SPAN_US: Final = 300.0
"""Calls of a graph last about so long, but each weight is read at least once."""
FALLBACKS: Final = ("generic", "realigned")
"""How the names of rows begin that are for products that no other row takes."""
MOST_PANELS: Final = 128
"""More rows than that are not tried with kernels of few rows."""


MEASURED: Final = Target("cuda", 90, 0, 132, 32, 227 << 10)
"""The H200 that records in docs/results are of."""


class Case(NamedTuple):
    """A product: a mode of scales, rows, and a weight."""

    mode: str
    m: int
    n: int
    k: int

    @property
    def half(self) -> str:
        """Which half of the list it is in, by its weight: "fit" or "judge"."""
        return ("fit", "judge")[number(f"{self.n}x{self.k}") % 2]

    def problem(self, target: int | str | Target | None = None) -> ScaledMm:
        """Return the case as the table of kernels has it."""
        scale_a, scale_b = MODES[self.mode]
        made = explain_product(self.m, self.n, self.k, scale_a=scale_a, scale_b=scale_b, target=target).problem
        assert isinstance(made, ScaledMm)
        return made._replace(prefetch_weight=True)


def number(text: str) -> int:
    """Return a number that says nothing of the text, and is the same everywhere."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def cases(modes: Iterable[str] = tuple(MODES)) -> list[Case]:
    """Return the list of products, in an order that does not depend on their shapes."""
    found = []
    for shape in dict.fromkeys(shape for shapes in SHAPES.values() for shape in shapes):
        n, k = map(int, shape.split("x"))
        for mode in modes:
            fitting = [m for m in ROWS if 2 * m * n * k <= MOST_OPERATIONS]
            some = sorted(fitting, key=lambda m: number(f"{mode} {m} {shape}"))[:ROWS_A_WEIGHT]
            found += [Case(mode, m, n, k) for m in some]
    return sorted(found, key=lambda case: number(str(case)))


def candidates(p: ScaledMm) -> list[Choice]:
    """Return what may run a product, the choice without tuning first; what is hopeless is left out."""
    found = SCALED_MM.candidates(p)
    hopeless = FALLBACKS if p.m <= MOST_PANELS else (*FALLBACKS, "sm90_decode")
    if any(choice.kernel == "cublaslt" for choice in found):
        hopeless = (*hopeless, "cublaslt_relayout", "cublaslt_epilogue")  # the same, and launches beside it
    return [choice for choice in found if not choice.kernel.startswith(hopeless)]


_ATTRIBUTES: Final = {"id": (0, 4), "custom": (5, 4), "stages": (6, 4), "inner": (7, 2), "reduction": (3, 4)}


def about(p: ScaledMm, choice: Choice) -> dict[str, Any]:
    """Return what is known of an algorithm of the library; nothing of other kernels."""
    if choice.kernel not in ("cublaslt", "cublaslt_relayout", "cublaslt_epilogue"):
        return {}
    product = mapping.accumulation(p) if choice.kernel.endswith("epilogue") else mapping.product(p)
    offer = query.algorithms(product)[choice.algorithm]
    found = library.find("cuda")
    assert isinstance(found, library.Library)
    config = ordering.Config.of(found, offer.algorithm)
    other = {name: ordering.attribute(found, offer.algorithm, at) for name, at in _ATTRIBUTES.items()}
    return {**config._asdict(), **other, "waves": round(offer.waves, 3), "workspace": offer.workspace_bytes}


def times(p: ScaledMm, launches: Sequence[Matmul]) -> list[tuple[float, float] | None]:
    """Return two medians of the microseconds of each launch; None of one that fails or is far behind."""
    cuda = device.cupy().cuda
    operands = timing.Operands(p, max(launch.scratch_bytes for launch in launches))
    cuda.runtime.deviceSynchronize()
    stream, begin, end = cuda.Stream(non_blocking=True), cuda.Event(), cuda.Event()

    def elapsed(run: timing.Run, rounds: int = 1) -> float:
        begin.record(stream)
        for _ in range(rounds):
            run()
        end.record(stream)
        end.synchronize()
        return float(cuda.get_elapsed_time(begin, end)) / rounds

    first: dict[int, float] = {}
    for i, launch in enumerate(launches):
        once = partial(operands.run, launch, stream.ptr, operands.weights[0])
        try:
            once()
        except BackendError:
            continue
        first[i] = min(elapsed(once) for _ in range(2))
    least = min(first.values())
    close = {i: ms for i, ms in first.items() if ms <= CLOSE * max(timing.LAUNCH_MS, least)}
    copies = len(operands.weights)
    calls = copies * max(1, round(SPAN_US / (1e3 * least * copies)))

    def recorded(launch: Matmul) -> timing.Run:
        def work() -> None:
            for i in range(calls):
                operands.run(launch, stream.ptr, operands.weights[i % copies])

        return partial(timing.captured(stream, work).launch, stream)

    runs = {i: recorded(launches[i]) for i in close}
    turns = TURNS if least < 1.0 else TURNS // 2
    found = timing.interleaved(runs, elapsed, turns, STRETCH_MS)
    per_call = {i: [1e3 * ms / calls for ms in taken] for i, taken in found.items()}
    return [
        (round(median(per_call[i][::2]), 3), round(median(per_call[i][1::2]), 3)) if i in per_call else None
        for i in range(len(launches))
    ]


def measure(case: Case) -> dict[str, Any]:
    """Return one record: a case, and the times and the kind of each candidate."""
    p = case.problem(0)
    choices = candidates(p)
    taken = times(p, [SCALED_MM.planned(p, choice) for choice in choices])
    rows = [
        {"kernel": choice.kernel, "algorithm": choice.algorithm, "us": list(us), **about(p, choice)}
        for choice, us in zip(choices, taken, strict=True)
        if us is not None
    ]
    return {"bench": "choice", **case._asdict(), "half": case.half, "first": list(choices[0]), "rows": rows}


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the records of files; of two about one product the later one."""
    lines = (line for file in files for line in file.read_text(encoding="utf-8").splitlines())
    found = (record for record in map(json.loads, lines) if record["bench"] == "choice")
    return list({tuple(record[name] for name in Case._fields): record for record in found}.values())


def gain(us: Sequence[Sequence[float]], chosen: int) -> float:
    """Return how much slower the chosen one is than what tuning by one half of the turns finds, by the other half."""
    found = []
    for known, judged in ((0, 1), (1, 0)):
        best = min(range(len(us)), key=lambda i: us[i][known])
        found.append(us[chosen][judged] / us[best][judged] - 1)
    return sum(found) / 2


def gains(records: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Give each record and what tuning gains, as measured: the choice is the one of the time of the measurement."""
    for record in records:
        names = [[row["kernel"], row["algorithm"]] for row in record["rows"]]
        if record["first"] in names:
            yield record, gain([row["us"] for row in record["rows"]], names.index(record["first"]))


def gains_today(records: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Give each record and what tuning gains, if the table chose as this checkout does: on any machine."""
    for record in map(still, records):
        chosen = chosen_today(record) if record["rows"] else None
        if chosen is not None:
            yield record, gain([row["us"] for row in record["rows"]], chosen)


def estimate(record: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Return the estimate for an algorithm of the library, of which the record says enough."""
    if row["kernel"] not in ("cublaslt", "cublaslt_relayout") or not row["channels"]:
        return None
    config = ordering.Config(*(row[name] for name in ordering.Config._fields))
    work = ordering.Work(record["m"], record["n"], record["k"], record["mode"] == "block", 2, MEASURED.multiprocessors)
    more = RELAYOUT_US if row["kernel"].endswith("_relayout") else 0.0
    return ordering.us(work, config, row["workspace"]) + more


def still(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without rows that the table of this checkout does not have."""
    names = {kernel.name for kernel in SCALED_MM.kernels}
    return {**record, "rows": [row for row in record["rows"] if row["kernel"] in names]}


def chosen_today(record: dict[str, Any]) -> int | None:
    """Return which row of a record the table of this checkout chooses, or None if that was not measured."""
    rows = record["rows"]
    problem = Case(*(record[name] for name in Case._fields)).problem(MEASURED)
    best: dict[str, int] = {}
    for i, row in enumerate(rows):
        other = best.setdefault(row["kernel"], i)
        mine, least = estimate(record, row), estimate(record, rows[other])
        if mine is not None and least is not None and mine < least:
            best[row["kernel"]] = i

    def measured(kernel: Kernel) -> Kernel:
        """Return a row of the table that is able, and knows what the library offered where it was measured."""
        row = rows[best[kernel.name]]
        made = kernel._replace(requires=())
        return made if estimate(record, row) is None else made._replace(us=lambda _: estimate(record, row))

    own = (kernel for kernel in SCALED_MM.kernels if kernel.us is not no_estimate and "blaslt" not in kernel.name)
    others = {kernel.name for kernel in own}  # of our own, and new since the measurement
    able = [
        measured(kernel) if kernel.name in best else kernel
        for kernel in SCALED_MM.kernels
        if kernel.name in best or kernel.name in others
    ]
    choice = Table("measured", ScaledMm, *able).choice(problem)
    return None if choice is None else best.get(choice.kernel)


def report(found: Iterable[tuple[dict[str, Any], float]]) -> None:
    """Print the gains of each half and mode, and the worst products."""
    pairs = list(found)
    for half in ("fit", "judge"):
        for mode in ("all", *MODES):
            part = sorted(g for r, g in pairs if r["half"] == half and mode in ("all", r["mode"]))
            if len(part) > 1:
                p90 = quantiles(part, n=10)[-1]
                line = f"median {median(part):.1%}, 90 % {p90:.1%}, worst {part[-1]:.1%}"
                print(f"{half:>5} {mode:>6}: {len(part)} products, {line}", flush=True)
    for record, lost in sorted(pairs, key=lambda pair: -pair[1])[:12]:
        best = min(record["rows"], key=lambda row: sum(row["us"]))
        print(
            f"{lost:6.1%} {record['mode']} {record['m']}x{record['n']}x{record['k']}: {record['first']}"
            f" in place of {best['kernel']} {best['algorithm']}",
            flush=True,
        )


def compile_ahead(problems: Sequence[ScaledMm]) -> None:
    """Compile the kernels of our own on all cores."""
    pairs = [(p, c) for p in problems for c in candidates(p) if c.kernel.startswith("sm90")]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda pair: SCALED_MM.planned(*pair), pairs))


def main() -> None:
    """Measure, or judge what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one line a product to this file")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--skip", type=int, default=0, help="leave out so many products at the beginning of the list")
    parser.add_argument("--count", type=int, default=None, help="time so many products, and leave out those after them")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no further product after so long")
    parser.add_argument("--judge", type=Path, nargs="+", help="files of such records, to judge without timing anything")
    arguments = parser.parse_args()
    records: list[dict[str, Any]]
    if arguments.judge:
        records = read(arguments.judge)
        print("as it was measured:")
        report(gains(records))
        print("as this checkout chooses:")
        report(gains_today(records))
        return
    alone = arguments.json is not None and not arguments.json.exists()
    if alone:  # else `python -m bench` writes the lines about the run
        asked = argparse.Namespace(
            subjects=["choice"], against=None, baselines=None, deep_gemm=False, compile=False, short=False, note=""
        )
        how = ["python", "-m", "bench.choice", "--skip", str(arguments.skip), "--seconds", f"{arguments.seconds:g}"]
        how += ["--count", str(arguments.count)] if arguments.count is not None else []
        results.append(arguments.json, {**machine(asked), "command": shlex.join([*how, "--modes", *arguments.modes])})
    begun = time.monotonic()
    wanted = cases(arguments.modes)[arguments.skip :][: arguments.count]
    compile_ahead([case.problem(0) for case in wanted])
    print(f"{len(wanted)} products, compiled after {time.monotonic() - begun:.1f} s", flush=True)
    records = []
    for case in wanted:
        if time.monotonic() - begun > arguments.seconds:
            print(f"stopped after {len(records)} of {len(wanted)} products", flush=True)
            break
        records.append(measure(case))
        results.append(arguments.json, records[-1])
    if alone:
        seconds = round(time.monotonic() - begun, 1)
        results.append(arguments.json, {"bench": "subject", "subject": "choice", "status": 0, "seconds": seconds})
    report(gains(records))


if __name__ == "__main__":
    main()
