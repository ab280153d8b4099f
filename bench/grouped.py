"""Times grouped products of mixtures of experts, and compares them with their floor and with other libraries' kernels.

    python -m bench.grouped [--baselines FOLDER] [--deep-gemm] [--json FILE] [--models Qwen3-30B] [--tokens 1 128]

Each token is routed to random experts, all equally likely but with `--skew`. Every result is checked against PyTorch in
fp32. The floor reads the weights of the experts that have tokens once. Baselines get what they need: DeepGEMM groups
that begin at multiples of 128 rows ("contiguous"), or as many rows for each expert ("masked"); vLLM sizes that were
computed before.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import fp8core
from bench import baselines, block_baselines, decode, log, timing
from bench.grouped_cases import ALL, MODELS, MODES, TOKENS, Case, drawn, listed
from bench.labels import GROUPED
from bench.needs import require_gpu
from bench.roofline import Roofline
from fp8core.kernels.grouped import sm90
from fp8core.problem import BLOCK

FP8: Final = baselines.FP8
WRONG: Final = 5e-3
SWAPPED_ROWS: Final = 64
"""Up to so many rows vLLM's kernel takes sizes with m and n exchanged."""
Way = Callable[[], tuple[Callable[[], object], float]]
"""Tries a way to make a result: returns the function to time, and the relative error of what it has made."""


class Operands(NamedTuple):
    """The operands of one call."""

    a: torch.Tensor
    scale_a: torch.Tensor
    weight: torch.Tensor
    scale_b: torch.Tensor
    offs: torch.Tensor
    counts: list[int]
    out: torch.Tensor


class Variant(NamedTuple):
    """A way to make the product of a case's operands."""

    run: Callable[[], torch.Tensor]
    rows: Callable[[torch.Tensor], torch.Tensor] = lambda result: result
    """Returns the rows of the result in the order of those of a."""


def codes(*shape: int) -> torch.Tensor:
    """Return random FP8 numbers."""
    made = torch.empty(shape, dtype=FP8, device="cuda")
    for part in made.view(-1, shape[-1]).split(1 << 16):
        part.copy_(torch.randn(part.shape, device="cuda"))
    return made


def operands(case: Case) -> Operands:
    """Return the operands of a case; equal cases have equal routing."""
    model, blocks = ALL[case.model], -(-case.k // BLOCK)
    torch.manual_seed(case.tokens)
    whole = model.experts * model.share
    chances = torch.rand(case.tokens, whole, device="cuda")
    if case.skew:
        shape = torch.full((whole,), case.skew**-2, device="cuda")
        chances = chances ** (1 / torch._standard_gamma(shape))
    chosen = chances.topk(model.each, 1).indices.flatten()
    counts = torch.bincount(chosen, minlength=whole)[: model.experts]
    rows, n, k = int(counts.sum()), case.n, case.k
    if case.mode == "block":
        scale_a = (torch.rand(blocks, -(-rows // 4) * 4, device="cuda") / 8 + 0.01).T[:rows]
        scale_b = torch.rand(model.experts, -(-n // BLOCK), blocks, device="cuda") / 8 + 0.01
    else:
        scale_a = torch.rand(rows, 1, device="cuda") / 8 + 0.01
        scale_b = torch.rand(model.experts, n, 1, device="cuda") / 8 + 0.01
    out = torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    offs = counts.cumsum(0, dtype=torch.int32)
    return Operands(codes(rows, k), scale_a, codes(model.experts, n, k), scale_b, offs, counts.tolist(), out)


def roofline(o: Operands) -> Roofline:
    """Return the bytes and operations: every weight that is used is read once."""
    (rows, k), n = o.a.shape, o.weight.shape[1]
    used = sum(count > 0 for count in o.counts)
    return Roofline(used * n * k + rows * k + 2 * rows * n, 2 * rows * n * k)


def ours(o: Operands) -> Variant:
    """Return fp8core's product."""
    return Variant(lambda: fp8core.grouped_scaled_mm_nt(o.a, o.weight, o.scale_a, o.scale_b, offs=o.offs, out=o.out))


def tiles(o: Operands) -> Iterator[tuple[str, Variant]]:
    """Yield the product by each tile that sm90_grouped can have, in the order of estimates."""
    problem = fp8core.explain(
        fp8core.grouped_scaled_mm_nt, o.a, o.weight, o.scale_a, o.scale_b, offs=o.offs, out=o.out
    ).problem
    matrices = [x.data_ptr() for x in (o.a, o.weight, o.scale_a, o.scale_b)]

    def run(plan: Any) -> torch.Tensor:
        plan(timing.stream(), *matrices, 0, o.offs.data_ptr(), o.out.data_ptr())
        return o.out

    for tile in sm90.by_cost(problem):
        yield str(tile), Variant(partial(run, sm90.plan_grouped(problem, tile)))


def torch_grouped(o: Operands) -> Variant:
    """Return torch's grouped product, which has no ``out``."""
    matrices = o.a, o.weight.transpose(1, 2), o.scale_a.flatten(), o.scale_b.flatten(1)
    return Variant(
        lambda: torch._scaled_grouped_mm(*matrices, offs=o.offs, out_dtype=torch.bfloat16, use_fast_accum=True)
    )


def vllm(ops: Any, o: Operands) -> Variant:
    """Return vLLM's product; sizes and strides are made before."""
    (groups, n, k), rows = o.weight.shape, len(o.a)
    sizes = [[n, count, k] if rows <= SWAPPED_ROWS else [count, n, k] for count in o.counts]
    problems = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    starts = o.offs.long() - problems[:, int(rows <= SWAPPED_ROWS)]
    of_k, of_n = (torch.full((groups,), size, dtype=torch.int64, device="cuda") for size in (k, n))
    matrices = o.out, o.a, o.weight, o.scale_a, o.scale_b

    def run() -> torch.Tensor:
        ops.cutlass_moe_mm(*matrices, starts, problems, of_k, of_k, of_n, True, True)
        return o.out

    return Variant(run)


def contiguous(module: Any, o: Operands) -> Variant:
    """Return DeepGEMM's product of groups that begin at multiples of 128 rows, from copies of the operands."""
    counts = torch.tensor(o.counts, device="cuda")
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    groups = torch.arange(len(counts), device="cuda")
    moved = (padded.cumsum(0) - padded) - (o.offs - counts)  # how far the rows of each group move
    place = torch.arange(len(o.a), device="cuda") + moved.repeat_interleave(counts)
    indices = groups.repeat_interleave(padded).int()
    total = len(indices)
    a = torch.zeros(total, o.a.shape[1], dtype=torch.uint8, device="cuda")
    a[place] = o.a.view(torch.uint8)
    scale = torch.zeros(o.scale_a.shape[1], total, device="cuda").T
    scale[place] = o.scale_a
    out = torch.empty(total, o.out.shape[1], dtype=torch.bfloat16, device="cuda")

    def run() -> torch.Tensor:
        module.m_grouped_fp8_gemm_nt_contiguous((a.view(FP8), scale), (o.weight, o.scale_b), out, indices)
        return out

    return Variant(run, lambda result: result[place])


def masked(module: Any, o: Operands) -> Variant:
    """Return DeepGEMM's product with as many rows for each group, from copies of the operands so laid out."""
    groups, most = len(o.counts), -(-max(o.counts) // 64) * 64
    a = torch.zeros(groups, most, o.a.shape[1], dtype=torch.uint8, device="cuda")
    scale = torch.zeros(groups, o.scale_a.shape[1], most, device="cuda").transpose(1, 2)
    out = torch.empty(groups, most, o.out.shape[1], dtype=torch.bfloat16, device="cuda")
    for group, (count, rows) in enumerate(zip(o.counts, rows_of(o), strict=True)):
        a[group, :count] = o.a.view(torch.uint8)[rows]
        scale[group, :count] = o.scale_a[rows]
    counts = torch.tensor(o.counts, dtype=torch.int32, device="cuda")
    expected = max(1, len(o.a) // groups)

    def run() -> torch.Tensor:
        module.m_grouped_fp8_gemm_nt_masked((a.view(FP8), scale), (o.weight, o.scale_b), out, counts, expected)
        return out

    return Variant(run, lambda result: torch.cat([part[:count] for part, count in zip(result, o.counts, strict=True)]))


def others(case: Case, o: Operands, loaded: baselines.Loaded, deep_gemm: Any) -> Iterator[tuple[str, Variant]]:
    """Yield the name and the product of each baseline that takes the case."""
    if case.mode == "row":
        yield "torch", torch_grouped(o)
        if loaded.vllm is not None:
            yield "vllm", vllm(loaded.vllm, o)
    elif deep_gemm is not None:
        yield "contiguous", contiguous(deep_gemm, o)
        yield "masked", masked(deep_gemm, o)


def rows_of(o: Operands) -> list[slice]:
    """Return the rows of each group."""
    return [slice(end - count, end) for end, count in zip(accumulate(o.counts), o.counts, strict=True)]


def error(case: Case, o: Operands, result: torch.Tensor) -> float:
    """Return the relative error of a result, of up to eight groups."""
    used = [(group, rows) for group, rows in enumerate(rows_of(o)) if o.counts[group]]
    wrong = total = 0.0
    for group, rows in used[:4] + used[-4:]:
        one = decode.Operands(o.a[rows], o.weight[group], o.scale_a[rows], o.scale_b[group], result[rows])
        want = decode.want(decode.Case(case.mode, o.counts[group], case.n, case.k), one)
        wrong += float((one.out.double() - want).square().sum())
        total += float(want.square().sum())
    return (wrong / total) ** 0.5 if total else 0.0


def key(case: Case) -> dict[str, Any]:
    """Return the fields of a case's record that distinguish it from others."""
    return {"bench": "grouped", **case._asdict()}


def measure(case: Case, loaded: baselines.Loaded, deep_gemm: Any, all_tiles: bool) -> dict[str, Any]:
    """Return one record: the case, its floor, and each variant's time or error."""
    o = operands(case)
    floor = roofline(o).floor()
    record = {**key(case), "rows": len(o.a), "used": sum(count > 0 for count in o.counts), "floor_us": floor}
    if not len(o.a):
        return {**record, "us": {}, "wrong": {}}
    variants = tiles(o) if all_tiles else others(case, o, loaded, deep_gemm)

    def tried(variant: Variant) -> tuple[Callable[[], object], float]:
        o.out.fill_(float("nan"))
        return variant.run, error(case, o, variant.rows(variant.run()))

    ways = [(name, partial(tried, variant)) for name, variant in [("fp8core", ours(o)), *variants]]
    return {**record, **timed(ways, WRONG, least=4 if floor > 300 else 16)}


def timed(ways: Iterable[tuple[str, Way]], most: float, least: int) -> dict[str, Any]:
    """Return the fields "us" and "wrong" of a record: the time of each way, or why it has none.

    Args:
        ways: the names, and functions that return what to time and the relative error of its result.
        most: the largest error of a right result.
        least: as for `timing.compare`.
    """
    calls: dict[str, list[Callable[[], object]]] = {}
    wrong: dict[str, str] = {}
    for name, way in ways:
        try:
            run, off = way()
            torch.cuda.synchronize()
        except (RuntimeError, AttributeError, TypeError, ValueError) as fault:
            wrong[name] = f"{type(fault).__name__}: {str(fault)[:900]}"
            continue
        if off <= most:
            calls[name] = [run]
        else:
            wrong[name] = f"relative error {off:.1e}"
    timing.rest()
    times = timing.compare(calls, replays=9, least=least)
    return {"us": timing.fields(times), "wrong": wrong}


def main() -> None:
    """Time the cases, print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baselines", type=Path, help="a folder with the libraries of vLLM and DeepGEMM")
    parser.add_argument("--deep-gemm", action="store_true", help="time DeepGEMM, too, which compiles its kernels")
    log.options(parser)
    parser.add_argument("--models", nargs="+", choices=ALL, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tiles", action="store_true", help="time all tiles of fp8core's kernel in place of baselines")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--drawn", type=int, default=0, metavar="COUNT", help="time drawn cases in place of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skew", type=float, default=0.0, help="how unequally likely experts are (default: not)")
    chosen = parser.parse_args()
    require_gpu(parser)
    loaded = baselines.load(chosen.baselines)
    deep_gemm = None
    if chosen.deep_gemm and chosen.baselines:
        deep_gemm = block_baselines.module(chosen.baselines, "deep_gemm")
    table = Table("model", "mode", "tokens", "rows", "n x k", "floor us", *GROUPED, title=torch.cuda.get_device_name(0))
    cases = (
        tuple(drawn(chosen.drawn, chosen.seed))
        if chosen.drawn
        else listed(chosen.models, chosen.modes, chosen.tokens, chosen.skew)
    )
    for case, record in log.Log(chosen).measured(
        cases, key, partial(measure, loaded=loaded, deep_gemm=deep_gemm, all_tiles=chosen.tiles)
    ):
        torch.cuda.empty_cache()
        times, wrong = record["us"], record["wrong"]
        cells = [f"{times[n]['median']:.2f}" if n in times else wrong.get(n, "-") for n in GROUPED]
        size = f"{case.n}x{case.k}"
        floor = f"{record['floor_us']:.2f}"
        table.add_row(case.model, case.mode, str(case.tokens), str(record["rows"]), size, floor, *cells)
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
