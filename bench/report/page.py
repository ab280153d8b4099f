"""The text of a page of docs/performance, from the runs that it shows."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from bench import results
from bench.labels import BLOCK, DECODE, KINDS, LABELS, MODES, PRODUCTS
from bench.report import rules, tables
from bench.report.goals import Judged, judge
from bench.results import Record, Results
from bench.roofline import H100, H200


class Page(NamedTuple):
    """A page: its GPU, its file, its title, and the folder of its plots as seen from docs."""

    gpu: str
    file: str
    title: str
    images: str


PAGES: Final = (
    Page(H200, "index.md", "Performance", "images"),
    Page(H100, "h100.md", "Performance on an H100", "images/h100"),
)
HOW: Final = """This page compares the times of fp8core with other libraries and with the least time that the hardware
allows. Times are microseconds per call, medians of interleaved variants; [method](method.md) explains cold and warm,
the floor and the copy, and how to measure again. Compare only within a table: machines differ by more than kernels do.
[Goals](#goals) lists the project's goals, and which of them are missed."""
MORE: Final = {
    H100: """The goals were set for an [H200](index.md), whose memory is faster; floors and copies are those of this
GPU.""",
}
"""By GPU: what the introduction of its page says beside `HOW`."""

REPRODUCE: Final = """```console
$ python3 -m venv .venv
$ .venv/bin/pip install --editable '.[cuda13,test,demo]' 'torch==2.11.0'
$ .venv/bin/python -m bench.fetch BASELINES
$ .venv/bin/python -m bench --baselines BASELINES --deep-gemm
$ .venv/bin/python docs/make_performance.py
```

The first two lines install fp8core and the torch that the baselines' kernels are built for. The third downloads those
kernels; you can leave it out together with `--baselines BASELINES --deep-gemm`. The fourth writes a new file to
`docs/results`, named by the date and the GPU, and the last writes this page from those files. `python -m bench --help`
lists the subjects, `--plan` the cases of a run."""


ABOUT: Final = {
    "Quantization": "bfloat16 to float8_e4m3fn. The last column is the speed as a fraction of the copy's.",
    "Quantization of odd sizes": """Odd numbers of rows and columns, each beside a similar aligned size. The ratio is
to the neighbour's time, scaled to as many bytes.""",
    "Fused producers": "A norm or SiLU fused with the quantization, in one launch; bfloat16 to float8_e4m3fn.",
    "Weights": "Operations on a stored weight: dequantization, requantization, other formats and scales.",
    "Host time": """The time until a call returns; no call waits for the GPU. The second table has the steps of a
call, for arrays of each framework.""",
    "The host engine": "NumPy arrays on a CPU, beside a copy of as many bytes.",
}
"""By section: the introduction of its table, if the table has none of its own."""
FAILED: Final = """A variant whose result fails the check is not timed, and the tables show "wrong" for it. The check
allows products a relative error of 4e-3 against float64: fast accumulation exceeds that if k is large
([accuracy](accuracy.md))."""


def goal_row(judged: Judged, by_run: Sequence[Results]) -> list[str]:
    """Return the cells of a goal: subject, bound, source, verdict, the hardest case, and the runs."""
    goal, checks = judged
    if not checks:
        return [goal.what, goal.bound, goal.source, "not measured", "-", "-"]
    met = sum(check.met for check in checks)
    worst = max(checks, key=lambda check: check.used)
    verdict = f"{'met' if met == len(checks) else '**not met**'}, {met} of {len(checks)}"
    of = [str(at) for at, own in enumerate(by_run, 1) if any(goal.checks(own, goal.threshold))]
    return [goal.what, goal.bound, goal.source, verdict, f"{worst.text} ({worst.case})", ", ".join(of)]


def goals(found: Results, by_run: Sequence[Results]) -> list[str]:
    """Return the lines of the section on goals."""
    said = "The hardest case has the least margin to the bound, or exceeds it most. [Runs](#runs) has the runs' files."
    head = ["subject", "goal", "compared with", "verdict", "hardest case", "run"]
    return [said, "", *tables.table(head, [goal_row(judged, by_run) for judged in judge(found)], words=6)]


def each_run(shown: rules.Shown) -> list[Results]:
    """Return, for each run, those of its records that the page shows."""
    kept = {id(record) for records in shown.found[1:] for record in records}
    return [
        results.collect(
            [run._replace(parts=[p._replace(records=[r for r in p.records if id(r) in kept]) for p in run.parts])]
        )
        for run in shown.runs
    ]


def whence(records: Sequence[Record], shown: rules.Shown, by_run: Sequence[Results]) -> list[str]:
    """Return the paragraph that names the runs of a table's records."""
    named = {id(record) for record in records}
    of = [
        f"[{at}](#runs), {rules.started(run).replace('T', ' ').replace('Z', ' UTC')}"
        for at, (run, own) in enumerate(zip(shown.runs, by_run, strict=True), 1)
        if any(id(record) in named for kind in own[1:] for record in kind)
    ]
    return [f"Run {'; '.join(of)}.", ""] if of else []


def runs(shown: rules.Shown) -> list[str]:
    """Return the tables of the runs that the page shows, and of the records that it leaves out."""
    rows = []
    for at, run in enumerate(shown.runs, 1):
        file = f"[{run.file}](../results/{run.file})"
        command = run.machine["command"] if run.machine.get("format", 1) > 1 else "-"
        subjects = ", ".join(part.subject for part in run.parts)
        rows.append([str(at), file, subjects, f"`{command}`" if command != "-" else "-"])
    lines = [*rules.LATEST.splitlines(), ""]
    lines += tables.table(["run", "file", "subjects", "command"], rows, words=4)
    counted = [[rule.name, rule.why, str(count)] for rule, count in shown.left_out.items()]
    return lines + tables.table(["left out", "why", "lines"], counted, words=2)


def machine(found: Results) -> list[str]:
    """Return a table of the device, the versions and the date."""
    about: dict[str, Any] = dict(found.machine)
    facts = [
        ("GPU", about.get("device")),
        ("CUDA driver, runtime", ", ".join(_cuda(about[key]) for key in ("driver", "runtime") if key in about)),
        ("processor", about.get("cpu")),
        ("Python", about.get("python")),
        ("fp8core", about.get("fp8core")),
        *about.get("versions", {}).items(),
        ("baselines found", ", ".join(about.get("baselines", []))),
        ("note", about.get("note")),
        ("date", about.get("date")),
    ]
    return tables.table(["measured on", ""], [[str(name), str(fact)] for name, fact in facts if fact], words=2)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def faults(found: Results) -> list[str]:
    """Return a table of variants whose results failed the check, and a list of subjects that did not run."""
    failed: dict[tuple[str, str], list[str]] = {}
    for kind in ("quantize", "odd", "fused", "weights", "decode", "ending", "invariance", "layer", "against"):
        for r in getattr(found, kind):
            wrong = r.get("wrong") or {}
            named = {"fp8core": wrong} if isinstance(wrong, str) else wrong
            where = " ".join(str(r[key]) for key in ("kind", "mode", "case") if key in r)
            for name, why in named.items():
                shown = f"`{name}`" if name in (DECODE, BLOCK) else LABELS.get(name, name)
                failed.setdefault((f"{where} {results.shape(r)}".strip(), why), []).append(shown)
    rows = [[where, ", ".join(sorted(names)), why] for (where, why), names in failed.items()]
    lines = [*FAILED.splitlines(), "", *tables.table(["case", "variants", "why"], rows, words=3)] if rows else []
    for r in found.subject:
        if r.get("skipped") or r.get("status"):
            why = f"skipped, {r['skipped']}" if r.get("skipped") else f"ended with status {r['status']}"
            lines.append(f"- {r['subject']}: {why}")
    return lines


def page(shown: rules.Shown, pictures: Sequence[str], about: Page) -> str:
    """Return the text of a page."""
    found = shown.found
    few = [r for r in found.decode if r["m"] <= 64]
    many = [r for r in found.decode if r["m"] > 64]
    by_run = each_run(shown)
    sections: list[tuple[str, Sequence[str], Sequence[Record], Sequence[str]]] = [
        ("Decoder layer", ["decoder-layer"], found.layer, tables.layer(found) if found.layer else []),
        (
            "Quantization",
            ["quantize"],
            found.quantize,
            _of(found.quantize, "groups", lambda r: MODES.get(r["mode"], r["mode"])),
        ),
        ("Quantization of odd sizes", [], found.odd, tables.odd(found.odd) if found.odd else []),
        (
            "Fused producers",
            ["fused"],
            found.fused,
            _of(
                found.fused,
                "producer",
                lambda r: f"{KINDS.get(r['kind'], r['kind'])}, {MODES.get(r['mode'], r['mode'])}",
            ),
        ),
        ("Weights", [], found.weights, _of(found.weights, "kernel", lambda r: r["case"])),
        (
            "Products of up to 64 rows",
            [f"products-{mode}" for mode in PRODUCTS],
            few,
            tables.products(few) if few else [],
        ),
        (
            "Products of more than 64 rows",
            ["crossover"],
            many,
            tables.products(many) if many else [],
        ),
        ("Odd products", [], found.odd_products, tables.odd_products(found) if found.odd_products else []),
        ("Grouped products", [], found.grouped, tables.grouped(found) if found.grouped else []),
        ("Routing of mixtures of experts", [], found.moe, tables.moe(found) if found.moe else []),
        ("Experts in transformers", [], found.hf_experts, tables.experts(found) if found.hf_experts else []),
        ("How products end", [], found.ending, tables.ending(found) if found.ending else []),
        ("Batch invariance", [], found.invariance, tables.invariance(found) if found.invariance else []),
        ("Host time", [], [*found.calls, *found.overhead], tables.calls(found)),
        ("The host engine", [], found.engine, tables.engine(found) if found.engine else []),
        ("Beside an older checkout", [], found.against, tables.against(found) if found.against else []),
        ("Goals", [], [], goals(found, by_run)),
        ("Not timed", [], [], [*faults(found), ""] if faults(found) else []),
        ("Runs", [], [], runs(shown)),
        ("How to measure it again", [], [], REPRODUCE.splitlines()),
    ]
    more = [*MORE[about.gpu].splitlines(), ""] if about.gpu in MORE else []
    lines = [f"# {about.title}", "", *HOW.splitlines(), "", *more, *machine(found)]
    for title, images, records, body in sections:
        shown_here = [f"![{title}](../{about.images}/{name}.png)\n" for name in images if name in pictures]
        if body:
            begin = [*ABOUT[title].splitlines(), ""] if title in ABOUT else []
            lines += [f"## {title}", "", *whence(records, shown, by_run), *begin, *shown_here, *body]
    return "\n".join(lines) + "\n"


def _of(records: Sequence[Record], first: str, label: Callable[[Record], str]) -> list[str]:
    return tables.beside_copy(records, first, label) if records else []
