"""Writes results as Markdown tables."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from bench import labels, results
from bench.labels import BASELINES, BLOCK, DECODE, LABELS, LIBRARY, MODES, PRODUCTS
from bench.report import checks, claims
from bench.results import Record, Results, us

GROUPED: Final = """The experts of a layer in one launch; each token is routed to random experts, all equally likely.
n x k are those of gate and up together, or of down. DeepSeek-V3/8 has an eighth of the experts, Qwen3-235B/8 an eighth
of each expert's channels. The floor reads every weight that is used once. Baselines get what they need: vLLM gets sizes
that were computed before, DeepGEMM rows laid out as its kernels expect them. The last column is the fastest baseline's
time as a multiple of fp8core's."""

MOE: Final = """`moe_permute` sorts the choices of experts and copies the tokens' FP8 rows with 1x128 scales. SGLang
does that in three calls, into given memory; its order of the rows of an expert is not fixed. `moe_unpermute` is the
weighted sum of bfloat16 results. The floor moves each token's row, and those of all its choices, once. The last column
is the faster baseline's time as a multiple of fp8core's."""

EXPERTS: Final = """What a model of transformers calls between router and residual: sorting by expert, quantization, two
products and SiLU, and the weighted sum, with scales per token x per channel. "Grouped" is what `from_pretrained` makes.
Layers that run one by one wait for the routing, and can neither be recorded nor compiled as one graph. "bfloat16" is
transformers' module with torch's grouped products."""

INVARIANCE: Final = """With `batch_invariant=True` a row has the same bits for any m: k is divided and summed as for 64
rows, and more than 64 rows run as products of 64 rows, each of which reads the weight."""

ENDING: Final = """Products with an activation or beta in the same launch, for every timed kernel; results are
bfloat16, beta is 1. "After" is a PyTorch kernel launched after the plain product: it reads a rounded result and rounds
again. A star marks the kernel that a call gets without tuning."""

PRODUCT: Final = """`sm90_decode` and `sm90_tiled` are kernels of fp8core. The last column is the time above the floor
for the kernel that a call gets; it is negative if memory is read faster than a copy reads and writes it."""

ODD_PRODUCTS: Final = """A list of odd shapes, then products that were drawn at random; each beside the
product with the next multiples of 16 for n and k, aligned addresses and the same ending. `@4` stands for operands at
multiples of 4 bytes. The last column is the aligned product with a bfloat16 result, without beta and amax."""

LAYER: Final = """The linear path of decoder layers: residuals, RMS norms, SiLU, quantization and the four products,
with weights that come from memory; scales are per token x per channel, for DeepSeek-V3 1x128 x 128x128. The floor is
the sum of the launches' floors. In plain calls the library allocates the results; the last column is their time as a
multiple of the floor."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> list[str]:
    """Return a Markdown table; the first ``words`` columns are left-aligned, the others right-aligned."""
    rule = ["---" if place < words else "--:" for place in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)] + [""]


def number(found: float | None, digits: int = 2) -> str:
    """Return a number as text, or a dash for None."""
    return "-" if found is None else f"{found:,.{digits}f}"


def timed(record: Record, names: Sequence[str]) -> list[str]:
    """Return the cells of a record: the shape, the floor and the times of the variants."""
    wrong = record.get("wrong") or {}
    faults = dict.fromkeys(names, wrong) if isinstance(wrong, str) else wrong
    cells = [number(us(record, name)) if us(record, name) else "wrong" if name in faults else "-" for name in names]
    return [results.shape(record), number(record["floor_us"]), *cells]


def beside_copy(records: Sequence[Record], first: str, label: Callable[[Record], str]) -> list[str]:
    """Return a table of kernels, with the copy of as many bytes."""
    names = results.names(records, ("copy", "fp8core", "vllm", "sgl", "triton", "torch.compile"))
    head = [first, "shape", "floor", *(LABELS[name] for name in names), "of the copy"]
    rows = [[label(r), *timed(r, names), number(results.of_copy(r), 3)] for r in records]
    return table(head, rows)


def odd(records: Sequence[Record]) -> list[str]:
    """Return a table of odd shapes, with their aligned neighbours."""
    head = ["groups", "from", "shape", "fp8core", "neighbour", "neighbour, us", "ratio by bytes"]
    rows = []
    for r in records:
        mine, near = us(r, "fp8core"), results.neighbour_time(r)
        times = [number(mine), r["neighbour"], number(us(r, "neighbour"))]
        rows.append(
            [MODES[r["mode"]], r["x"], results.shape(r), *times, number(mine / near if mine and near else None)]
        )
    return table(head, rows, words=2)


def products(records: Sequence[Record]) -> list[str]:
    """Return a table of products."""
    names = results.names(records, (DECODE, BLOCK, LIBRARY, *BASELINES))
    head = ["scales", "m x n x k", "floor", *(_own_name(name) for name in names), "above the floor"]
    rows = []
    for r in sorted(records, key=lambda r: (list(PRODUCTS).index(r["mode"]), r["n"] * r["k"], r["n"], r["m"])):
        mine = results.own(r)
        rows.append([PRODUCTS[r["mode"]], *timed(r, names), number(None if mine is None else mine - r["floor_us"])])
    return [*PRODUCT.splitlines(), "", *table(head, rows)]


def _own_name(name: str) -> str:
    return f"fp8core `{name}`" if name in (DECODE, BLOCK) else LABELS[name]


def odd_products(found: Results) -> list[str]:
    """Return a table of products of odd shapes, with the next aligned products."""
    rows = []
    for r in found.odd_products:
        kernels = [f"`{r['kernels'][name]}`" for name in ("fp8core", "neighbour")]
        times = [number(us(r, name)) for name in ("fp8core", "neighbour")]
        numbers = [number(results.of_neighbour(r)), number(us(r, "plain"))]
        rows.append(
            [results.shape(r), r["scales"], r["ending"] or "-", *kernels, number(r["floor_us"]), *times, *numbers]
        )
    head = [
        "m x n x k",
        "scales",
        "ending",
        "kernel",
        "neighbour's",
        "floor",
        "us",
        "neighbour",
        "ratio",
        "bfloat16 neighbour",
    ]
    return [*ODD_PRODUCTS.splitlines(), "", *table(head, rows, words=5)]


def grouped(found: Results) -> list[str]:
    """Return a table of grouped products, with the baselines."""
    rows = []
    for r in found.grouped:
        mine, best = us(r, "fp8core"), checks.fastest(r, labels.GROUPED[1:])
        sizes = [str(r["tokens"]), str(r["rows"]), f"{r['n']}x{r['k']}"]
        times = timed(r, labels.GROUPED)[1:]
        rows.append([r["model"], PRODUCTS[r["mode"]], *sizes, *times, number(best / mine if best and mine else None)])
    head = ["model", "scales", "tokens", "rows", "n x k", "floor", *(LABELS[name] for name in labels.GROUPED), "ratio"]
    return [*GROUPED.splitlines(), "", *table(head, rows, words=2)]


def moe(found: Results) -> list[str]:
    """Return a table of the routing of mixtures of experts, with the baselines."""
    rows = []
    for r in found.moe:
        mine, best = us(r, "fp8core"), checks.fastest(r, labels.MOE[1:])
        times = timed(r, labels.MOE)[1:]
        ratio = number(best / mine if best and mine else None)
        rows.append([labels.OPERATIONS[r["mode"]], r["model"], str(r["tokens"]), str(r["rows"]), *times, ratio])
    head = ["operation", "model", "tokens", "rows", "floor", *(LABELS[name] for name in labels.MOE), "ratio"]
    return [*MOE.splitlines(), "", *table(head, rows, words=2)]


def experts(found: Results) -> list[str]:
    """Return a table of the experts of a layer in transformers."""
    rows = [[str(r["m"]), r["mode"], *(number(us(r, name), 1) for name in labels.EXPERTS)] for r in found.hf_experts]
    return [*EXPERTS.splitlines(), "", *table(["tokens", "called", *labels.EXPERTS.values()], rows)]


def invariance(found: Results) -> list[str]:
    """Return a table of products with and without batch invariance."""
    rows = []
    for r in found.invariance:
        free, invariant = us(r, "free"), us(r, "invariant")
        more = None if free is None or invariant is None else invariant - free
        kernels = [LABELS.get(r["kernels"][name], r["kernels"][name]) for name in ("free", "invariant")]
        rows.append([PRODUCTS[r["mode"]], *kernels, *timed(r, ("free", "invariant")), number(more)])
    head = ["scales", "free", "invariant", "m x n x k", "floor", "free, us", "invariant, us", "more"]
    said = claims.invariance(found.invariance)
    return [*INVARIANCE.splitlines(), *([f"{said}."] if said else []), "", *table(head, rows, words=3)]


def ending(found: Results) -> list[str]:
    """Return a table of products with endings: a line for each kernel, with PyTorch's kernels for comparison."""
    rows = []
    for r in found.ending:
        endings = list(r["chosen"])
        timed = dict.fromkeys(name.split()[0] for name in r["us"] if not name.startswith("torch "))
        for row in timed:
            stars = [" *" if r["chosen"][ending] == row else "" for ending in endings]
            times = [us(r, f"{row} {ending}") for ending in endings]
            cells = [number(time) + (star if time else "") for time, star in zip(times, stars, strict=True)]
            plain = row == r["chosen"]["plain"]
            behind = [number(us(r, f"torch {kernel}") if plain else None) for kernel in ("silu", "add")]
            rows.append([PRODUCTS[r["mode"]], results.shape(r), f"`{row}`", *cells, *behind])
    names = list(found.ending[0]["chosen"]) if found.ending else []
    head = ["scales", "m x n x k", "kernel", *names, "silu after", "add after"]
    return [*ENDING.splitlines(), "", *table(head, rows, words=3)]


def layer(found: Results) -> list[str]:
    """Return a table of decoder layers, with their floors and the baselines."""
    rows = []
    for r in found.layer:
        plain = us(r, "plain")
        times = [number(us(r, name)) for name in labels.LAYER]
        rows.append(
            [r["model"], f"m = {r['m']}", number(r["floor_us"]), *times, number(plain and plain / r["floor_us"], 3)]
        )
    head = ["model", "rows", "floor", *labels.LAYER.values(), "of the floor"]
    return [*LAYER.splitlines(), "", *table(head, rows, words=2)]


def against(found: Results) -> list[str]:
    """Return a table of public calls of two checkouts."""
    head = ["call", "of the", "before, us", "now, us", "now / before", "quartiles"]
    rows = [
        [
            r["case"],
            "GPU" if r["kind"] == "gpu" else r["kind"],
            number(us(r, "before")),
            number(us(r, "now")),
            number(r["ratio"], 3),
            f"{r['low']:.3f} to {r['high']:.3f}",
        ]
        for r in found.against
        if "ratio" in r
    ]
    return [f"{claims.against(found)}.", "", *table(head, rows, words=2)]


def calls(found: Results) -> list[str]:
    """Return a table of the host times of whole calls, and one of the steps of interop."""
    lines = table(["call on torch tensors", "by", "us"], _steps(found.calls), words=2) if found.calls else []
    return lines + (
        table(["step of interop", "framework", "us"], _steps(found.overhead), words=2) if found.overhead else []
    )


def _steps(records: Sequence[Record]) -> list[list[str]]:
    return [[r["step"], LABELS.get(r["framework"], r["framework"]), number(float(r["us"]))] for r in records]


def engine(found: Results) -> list[str]:
    """Return a table of the host engine."""
    rows = [
        [r["mode"], number(r["copy_s"] * 1e3), number(r["s"] * 1e3), number(r["rate"], 0), r["unit"]]
        for r in found.engine
    ]
    return table(["host engine", "copy, ms", "ms", "rate", ""], rows)
