"""Time every able kernel and algorithm on many products, and report what the choice without tuning loses to the best.

    python -m bench.choice [--json FILE] [--list sixth --half judge] [--wide] [--seconds 80] [--judge FILE ...]

The lists are those of `bench.choice_cases`. Products are visited in an order that does not depend on their shapes, so
that what is measured within --seconds is a fair sample. Weights come from memory, activations from L2. Each time is two
medians, over the even and the odd turns of the same graphs: what is fastest by the one is judged by the other, so that
noise does not count as a gain of tuning. With --judge files of such records are judged, and nothing is timed. Products
of a blind half are never named.
"""

import argparse
import math
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final
from unittest.mock import patch

from bench import results
from bench.__main__ import machine
from bench.algorithms import described, name_of
from bench.choice_cases import LISTS, MODES, MOST_ROWS, Case, cases
from bench.choice_records import CLOSE, PARTS, gains, gains_today, noise, read, report
from bench.needs import require_gpu
from fp8core import timing
from fp8core.kernels.gemm.sm90 import tiled
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import ScaledMm
from fp8core.table import Choice

SAMPLING: Final = timing.Sampling(turns=8, stretch_ms=0.4, span_us=300.0, hopeless=CLOSE)
FALLBACKS: Final = ("generic", "realigned")
"""Prefixes of the names of kernels for products that no other kernel takes."""
ODD: Final = (
    *("realigned", "generic_decode", "generic_mma", "sm90_decode_unaligned", "cublaslt_pad_m", "cublaslt_split_m"),
)
"""The kernels that are timed on the list "odd"."""
MOST_PANELS: Final = 128
"""Kernels for few rows are not timed with more rows than this."""
TIMES: Final = 2
"""The number of times of a candidate in a record, each the median of its own turns."""
LARGE: Final = 1e12
"""Products of more operations than this are timed in half as many turns, but at least one for each of `TIMES`."""
TILES_TIMED: Final = 6
"""The number of tiles timed with --wide. (32 algorithms of cuBLASLt instead of 8 gave no more for 221 products.)"""


def candidates(p: ScaledMm, only: tuple[str, ...] = ()) -> list[Choice]:
    """Return the candidates for a product without hopeless ones; the choice without tuning comes first.

    ``only``: the kernels to return, or empty for all.
    """
    found = SCALED_MM.candidates(p)
    if only:
        return [c for c in found if c.kernel in only and (p.m <= MOST_PANELS or c.kernel != "generic_decode")]
    hopeless = FALLBACKS if p.m <= MOST_PANELS else (*FALLBACKS, "sm90_decode")
    if any(choice.kernel == "cublaslt" for choice in found):
        hopeless = (*hopeless, "cublaslt_relayout", "cublaslt_epilogue")  # the same algorithms and further launches
    some = [choice for choice in found if choice is found[0] or not choice.kernel.startswith(hopeless)]
    return some or [choice for choice in found if p.m <= MOST_PANELS or choice.kernel != "generic_decode"]


def wide() -> AbstractContextManager[object]:
    """Let more tiles be candidates than `fp8core.tune` times, within the block."""
    return patch.object(tiled, "ALGORITHMS", TILES_TIMED)


def measure(case: Case, how: timing.Sampling, *, more: bool, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the record of a case: the description and the times of each candidate."""
    p = case.problem(0)
    if case.operations > LARGE:
        how = how._replace(turns=max(TIMES, how.turns // TIMES))
    narrow = [(choice.kernel, name_of(p, choice)) for choice in candidates(p, only)]
    with wide() if more else nullcontext():
        choices = candidates(p, only)
        names = [(choice.kernel, name_of(p, choice)) for choice in choices]
        taken = timing.samples(p, [SCALED_MM.planned(p, choice) for choice in choices], how)
        rows = [
            {
                **described(p, choice),
                "tuned": name in narrow,
                "us": [round(median(us[turn::TIMES]), 3) for turn in range(TIMES)],
            }
            for choice, name, us in zip(choices, names, taken, strict=True)
            if us
        ]
    return {
        "bench": "choice",
        **case._asdict(),
        "half": case.half,
        "first": [
            narrow[0][0],
            next((c.algorithm for c, name in zip(choices, names, strict=True) if name == narrow[0]), 0),
        ],
        "only": list(only),
        "far": [name for name, us in zip(names, taken, strict=True) if not us],
        **({} if how.stretch_ms == SAMPLING.stretch_ms else {"stretch_ms": how.stretch_ms}),
        "rows": rows,
    }


def compile_ahead(pairs: Iterable[tuple[ScaledMm, Choice]]) -> None:
    """Compile the kernels of products in parallel, except those that call cuBLASLt."""
    own = [pair for pair in pairs if "blaslt" not in pair[1].kernel]
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda pair: SCALED_MM.planned(*pair), own))


def judge(files: Sequence[Path]) -> None:
    """Print the gain of tuning over the choices at the time of measurement, and over the choices of this checkout."""
    records = read(files)
    apart = quantiles(noise(records), n=100)
    said = ", ".join(f"{apart[percent - 1]:.1%} at {percent} %" for percent in (50, 90, 99))
    print(f"the two times of a candidate lie apart by {said} of them; as it was measured:")
    report(gains(records))
    print("as this checkout chooses:")
    report(gains_today(records))


def main() -> None:
    """Measure, or judge what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one line a product to this file")
    parser.add_argument("--list", choices=LISTS, default=LISTS[0], help="which products")
    parser.add_argument("--half", choices=PARTS, help="this half of them only")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--least", type=int, default=1, help="leave out products of fewer rows")
    parser.add_argument("--up-to", type=int, default=MOST_ROWS, help="leave out products of more rows")
    parser.add_argument("--most", type=float, default=0.0, help="leave out products of more operations, if not 0")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many products at the beginning of the list")
    parser.add_argument("--count", type=int, default=None, help="time so many products, and leave out those after them")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no further product after so long")
    parser.add_argument("--turns", type=int, default=SAMPLING.turns, help="timed turns of each candidate")
    parser.add_argument(
        "--stretch",
        type=float,
        default=SAMPLING.stretch_ms,
        help="a timed stretch lasts at least this many ms; from about 60 on, the clock is that of long work",
    )
    parser.add_argument("--kernels", nargs="+", help="time these kernels only")
    parser.add_argument("--wide", action="store_true", help="more tiles than tune times")
    parser.add_argument("--judge", type=Path, nargs="+", help="files of such records, to judge without timing anything")
    arguments = parser.parse_args()
    if arguments.judge:
        judge(arguments.judge)
        return
    require_gpu(parser, "cupy")
    alone = arguments.json is not None and not arguments.json.exists()
    if alone:  # else `python -m bench` writes the lines about the run
        asked = argparse.Namespace(
            subjects=["choice"],
            against=None,
            baselines=None,
            deep_gemm=False,
            compile=False,
            short=False,
            note="",
            go_on=False,
        )
        results.append(
            arguments.json,
            {**machine(asked), "command": shlex.join(["python", "-m", "bench.choice", *said(arguments)])},
        )
    begun = time.monotonic()
    every = cases(arguments.list, arguments.modes)
    rows = range(arguments.least, arguments.up_to + 1)
    some = [case for case in every if arguments.half in (None, case.half) and case.m in rows]
    if arguments.most:
        some = [case for case in some if case.operations <= arguments.most]
    only = tuple(arguments.kernels or (ODD if arguments.list == "odd" else ()))
    wanted = some[arguments.skip :][: arguments.count]
    with wide() if arguments.wide else nullcontext():
        compile_ahead((p, c) for p in (case.problem(0) for case in wanted) for c in candidates(p, only))
    print(f"{len(wanted)} products, compiled after {time.monotonic() - begun:.1f} s", flush=True)
    records: list[dict[str, Any]] = []
    how = SAMPLING._replace(turns=arguments.turns, stretch_ms=arguments.stretch)
    if only == ODD:
        how = how._replace(hopeless=math.inf)
    for case in wanted:
        if time.monotonic() - begun > arguments.seconds:
            print(f"stopped after {len(records)} of {len(wanted)} products", flush=True)
            break
        if not candidates(case.problem(0), only):
            continue
        records.append({**measure(case, how, more=arguments.wide, only=only), "list": arguments.list})
        results.append(arguments.json, records[-1])
    if alone:
        seconds = round(time.monotonic() - begun, 1)
        results.append(arguments.json, {"bench": "subject", "subject": "choice", "status": 0, "seconds": seconds})
    report(gains(records))


def said(arguments: argparse.Namespace) -> Iterator[str]:
    """Give the words of a command line that asks for the same products."""
    limits = "least", "up_to", "most", "skip", "count", "seconds"
    for name in ("list", "half", "modes", *limits, "turns", "stretch", "kernels"):
        value = getattr(arguments, name)
        if value is not None:
            yield from (f"--{name.replace('_', '-')}", *(value if isinstance(value, list) else [f"{value}"]))
    if arguments.wide:
        yield "--wide"


if __name__ == "__main__":
    main()
