"""Selects the records in docs/results that the pages show: runs are never edited, rules leave records out."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bench import results
from bench.results import Part, Record, Results, Run, kind_of
from bench.roofline import H200

WHOLE: Final = frozenset((("accuracy", "2026-11-22T22:24:32Z"),))
"""Subjects that failed after all of their records were written, with the start of the run: docs/results/README.md."""

PARTIAL: Final = frozenset(
    (
        ("accuracy", "2026-11-22T23:04:06Z"),
        ("products", "2026-11-28T03:16:12Z"),
        ("products", "2026-11-29T07:47:13Z"),
    )
)
"""Subjects that succeeded without all that the page shows, with the start of the run: docs/results/README.md."""


class Rule(NamedTuple):
    """A rule that leaves out records of runs, and the reason."""

    name: str
    why: str
    leaves_out: Callable[[Run, Part, Record], bool]


RULES: Final = (
    Rule(
        "short runs",
        "`--short` times a few cases of each subject, as a check",
        lambda run, _part, _record: bool(run.machine.get("short")),
    ),
    Rule(
        "unfinished subjects",
        "if no line says that a subject ended well, some of its cases may be missing",
        lambda run, part, _record: part.status != 0 and (part.subject, run.machine.get("started")) not in WHOLE,
    ),
    Rule(
        "parts of subjects",
        "the page also shows products of real weights, or kernels of FlashInfer and sgl-deep-gemm, which these runs "
        "did not have",
        lambda run, part, _record: (part.subject, run.machine.get("started")) in PARTIAL,
    ),
    Rule(
        "tensors timed as rows",
        "runs of format 1 timed dynamic quantization per tensor of 5137 and 1025 columns as rows with gaps between "
        "them; a call on a tensor without gaps takes a faster path",
        lambda run, _part, record: (
            run.machine.get("format", 1) < results.FORMAT
            and kind_of(record) == "odd"
            and record["mode"] == "tensor"
            and record["cols"] in (5137, 1025)
        ),
    ),
)


def rules_of(gpu: str) -> Sequence[Rule]:
    """Return the rules of the page about a GPU, of which the first leaves out all other GPUs."""
    why = f"the page is about one kind of GPU, {gpu}"
    return Rule("other GPUs", why, lambda run, _part, _record: run.machine.get("device") != gpu), *RULES


LATEST: Final = """For each subject the page shows the latest run, as a whole: its times come from one machine and one
time. [docs/results](../results/README.md) describes the contents of each file."""


class Shown(NamedTuple):
    """The records that pages show, the runs that contain them, and how many records each rule left out."""

    found: Results
    runs: Sequence[Run]
    left_out: dict[Rule, int]


def started(run: Run) -> str:
    """Return the start of a run as text that sorts by time; runs of format 1 have only the day."""
    return str(run.machine.get("started") or run.machine.get("date", ""))


def select(runs: Iterable[Run], gpu: str = H200) -> Shown:
    """Return the records of a GPU that no rule leaves out, for each subject from its latest run."""
    left_out = dict.fromkeys(rules_of(gpu), 0)
    latest: dict[str, tuple[Run, Part]] = {}
    for run in sorted(runs, key=started):
        for part in run.parts:
            kept = []
            for record in part.records:
                why = next((rule for rule in left_out if rule.leaves_out(run, part, record)), None)
                if why is None:
                    kept.append(record)
                else:
                    left_out[why] += 1
            if kept:
                latest[part.subject] = run, part._replace(records=kept)
    used = {id(run): run for run, _ in latest.values()}
    shown = [
        run._replace(parts=[part for owner, part in latest.values() if owner is run])
        for run in sorted(used.values(), key=started)
    ]
    return Shown(results.collect(shown), shown, left_out)


def shown(folder: Path, gpu: str = H200) -> Shown | None:
    """Return the records of a GPU to show from the runs in a folder, or None if there are none."""
    found = select((run for path in sorted(folder.glob("*.jsonl")) for run in results.runs(path)), gpu)
    return found if found.runs else None
