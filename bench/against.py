"""Times public calls of this checkout and of another alternately: on the GPU inside CUDA graphs, and on the host.

    python -m bench.against CHECKOUT [--json FILE] [--kinds gpu host] [--short] [--dry-run]

Each checkout runs in its own process. Only one runs at a time, and both use the same core, as two cores of a machine
may differ by half; every turn times the two in random order. On the GPU, weights, inputs and results rotate over more
memory than L2 holds. A ratio is the median, over the turns, of this checkout's time divided by the other's. Only public
functions are called, so the other checkout may be any version from 0.1 on. --dry-run makes every call once in both and
times nothing; without a GPU it runs them on the host engine.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench import calls, results, timing
from fp8core.timing import interleaved

ROOT: Final = Path(__file__).resolve().parent.parent
KINDS: Final = ("gpu", "host")
TURNS: Final = {"gpu": 15, "host": 41}
STRETCH_MS: Final = {"gpu": 0.4, "host": 1.0}
"""A timed stretch lasts at least this long; on the host it is so short that the device's queue never fills."""
NOISE: Final = {"gpu": 0.02, "host": 0.05}
"""Ratios that exceed 1 by more than this are marked as slower."""


class Checkout:
    """A process that makes and times the calls of one checkout."""

    def __init__(self, path: Path) -> None:
        self.path = path
        command = [sys.executable, str(ROOT / "bench" / "served.py"), str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, **request: Any) -> None:
        """Send a request."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Return the answer to the oldest request that has none yet.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.path}: its process ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ms(self, rounds: int) -> float:
        """Return the milliseconds of one run of the last prepared calls, averaged over ``rounds`` runs.

        Raises:
            RuntimeError: the call failed, or the process has ended.
        """
        self.send(do="time", rounds=rounds)
        answer = self.receive()
        if "error" in answer:
            raise RuntimeError(f"{self.path}: {answer['error']}")
        return float(answer["ms"])


def share_a_core() -> None:
    """Pin this process, and the processes that it starts from now on, to one core, if the system supports it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


@contextmanager
def started(paths: dict[str, Path]) -> Iterator[dict[str, Checkout]]:
    """Start a process for each checkout, and wait until all are ready for requests; they end with the block."""
    found = {name: Checkout(path) for name, path in paths.items()}
    try:
        for checkout in found.values():
            checkout.receive()
        yield found
    finally:
        for checkout in found.values():
            assert checkout.process.stdin is not None
            checkout.process.stdin.close()
            checkout.process.wait()


def prepared(sides: dict[str, Checkout], kind: str, case: int, short: bool) -> dict[str, dict[str, Any]]:
    """Prepare a call in all checkouts at once; return their answers: the number of calls in a run, or the error."""
    for side in sides.values():
        side.send(do="prepare", kind=kind, case=case, short=short)
    return {name: side.receive() for name, side in sides.items()}


def measure(sides: dict[str, Checkout], kind: str, name: str, case: int, short: bool, dry: bool) -> dict[str, Any]:
    """Return one record: the call, both times and their ratio, or the errors."""
    record: dict[str, Any] = {"bench": "against", "kind": kind, "case": name}
    answers = prepared(sides, kind, case, short)
    wrong = {side: answer["error"] for side, answer in answers.items() if "error" in answer}
    if not wrong and not dry:
        milliseconds = {side: checkout.ms for side, checkout in sides.items()}
        found = interleaved(milliseconds, lambda ms, rounds: ms(rounds), TURNS[kind], STRETCH_MS[kind])
        times = {side: [1e3 * ms / answers[side]["calls"] for ms in turns] for side, turns in found.items()}
        ratio = timing.spread([now / before for before, now in zip(times["before"], times["now"], strict=True)])
        record["us"] = {side: timing.spread(turns)._asdict() for side, turns in times.items()}
        record |= {"ratio": ratio.median, "low": ratio.low, "high": ratio.high}
    for side in sides.values():
        side.send(do="drop")
    for side in sides.values():
        side.receive()
    return {**record, "wrong": wrong} if wrong else record


def cells(record: dict[str, Any]) -> list[str]:
    """Return the cells of a record in the table."""
    if "ratio" not in record:
        said = "; ".join(f"{side}: {why}" for side, why in record.get("wrong", {}).items()) or "runs in both"
        return [record["case"], "-", "-", "-", "-", said]
    before, now = (f"{record['us'][side]['median']:.2f}" for side in ("before", "now"))
    ratio, quartiles = f"{record['ratio']:.3f}", f"{record['low']:.3f} to {record['high']:.3f}"
    slower = record["ratio"] > 1 + NOISE[record["kind"]]
    return [record["case"], before, now, ratio, quartiles, "slower" if slower else ""]


def main() -> int:
    """Time the calls, print tables, and append JSON lines if asked; the exit status is 1 if a call failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the root of another checkout of fp8core")
    parser.add_argument("--json", type=Path, help="append one JSON object a call to this file")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--short", action="store_true", help="small operands, to see that it works")
    parser.add_argument("--dry-run", action="store_true", help="make each call once in both, time nothing")
    chosen = parser.parse_args()
    gpu_times = calls.DEVICE == "cuda" or chosen.dry_run
    failed = False
    share_a_core()
    with started({"before": chosen.checkout.resolve(), "now": ROOT}) as sides:
        for kind in chosen.kinds:
            if kind == "gpu" and not gpu_times:
                print("gpu: skipped, there is none (--dry-run makes the calls on the host engine)")
                continue
            names = [call.name for call in calls.calls_of(kind, chosen.short)]
            table = Table("call", "before, us", "now, us", "now / before", "quartiles", "", title=f"{kind} times")
            for case, name in enumerate(names):
                record = measure(sides, kind, name, case, chosen.short, chosen.dry_run)
                failed = failed or "wrong" in record
                results.append(chosen.json, record)
                table.add_row(*cells(record))
            Console(width=150).print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
