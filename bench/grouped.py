"""Times grouped products of mixtures of experts, and compares them with their floor and with other libraries' kernels.

    python -m bench.grouped [--baselines FOLDER] [--deep-gemm] [--json FILE] [--models Qwen3-30B] [--tokens 1 128]

Each token is routed to random experts, all equally likely. Every result is checked against PyTorch in fp32. The floor
reads the weights of the experts that have tokens once. Baselines get what they need: DeepGEMM groups that begin at
multiples of 128 rows ("contiguous"), or as many rows for each expert ("masked"); vLLM sizes that were computed before.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import fp8core
from bench import baselines, block_baselines, log, timing
from bench.needs import require_gpu
from bench.roofline import Roofline
from fp8core.kernels.grouped import sm90

FP8: Final = baselines.FP8
BLOCK: Final = 128
WRONG: Final = 5e-3
SWAPPED_ROWS: Final = 64
"""Up to so many rows vLLM's kernel takes sizes with m and n exchanged."""


class Model(NamedTuple):
    """The experts of a layer, or of a part of it that one GPU has."""

    experts: int
    each: int
    """Experts of a token."""
    share: int
    """GPUs that the experts are divided among: of so many tokens one expert is here."""
    shapes: tuple[tuple[int, int], ...]
    """n and k of gate and up together, and of down."""


MODELS: Final = {
    "Mixtral-8x7B": Model(8, 2, 1, ((28672, 4096), (4096, 14336))),
    "Qwen3-30B": Model(128, 8, 1, ((1536, 2048), (2048, 768))),
    "Qwen3-235B/8": Model(128, 8, 1, ((384, 4096), (4096, 192))),
    "DeepSeek-V3/8": Model(32, 8, 8, ((4096, 7168), (7168, 2048))),
}
TOKENS: Final = (1, 16, 128, 1024, 4096)
MODES: Final = ("row", "block")


class Case(NamedTuple):
    """A model's product for a number of tokens."""

    model: str
    mode: str
    tokens: int
    n: int
    k: int


class Operands(NamedTuple):
    """The operands of one call."""

    a: torch.Tensor
    scale_a: torch.Tensor
    weight: torch.Tensor
    scale_b: torch.Tensor
    offs: torch.Tensor
    counts: list[int]
    out: torch.Tensor


Call = Callable[[Operands], torch.Tensor]


def codes(*shape: int) -> torch.Tensor:
    """Return random FP8 numbers."""
    made = torch.empty(shape, dtype=FP8, device="cuda")
    for part in made.view(-1, shape[-1]).split(1 << 16):
        part.copy_(torch.randn(part.shape, device="cuda"))
    return made


def operands(case: Case) -> Operands:
    """Return the operands of a case; equal cases have equal routing."""
    model, blocks = MODELS[case.model], -(-case.k // BLOCK)
    torch.manual_seed(case.tokens)
    whole = model.experts * model.share
    chosen = torch.rand(case.tokens, whole, device="cuda").topk(model.each, 1).indices.flatten()
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


def ours(o: Operands) -> torch.Tensor:
    """Call fp8core's product."""
    made: torch.Tensor = fp8core.grouped_scaled_mm_nt(o.a, o.weight, o.scale_a, o.scale_b, offs=o.offs, out=o.out)
    return made


def tiles(o: Operands) -> dict[str, Call]:
    """Return the product by each tile that sm90_grouped can have, in the order of estimates."""
    problem = fp8core.explain(
        fp8core.grouped_scaled_mm_nt, o.a, o.weight, o.scale_a, o.scale_b, offs=o.offs, out=o.out
    ).problem

    def call(plan: Any) -> Call:
        def run(o: Operands) -> torch.Tensor:
            codes = o.a.data_ptr(), o.weight.data_ptr()
            plan(
                *(timing.stream(), *codes, o.scale_a.data_ptr(), o.scale_b.data_ptr(), 0),
                *(o.offs.data_ptr(), o.out.data_ptr()),
            )
            return o.out

        return run

    return {str(tile): call(sm90.plan_grouped(problem, tile)) for tile in sm90.by_cost(problem)}


def torch_grouped(o: Operands) -> Call:
    """Return torch's grouped product, which has no ``out``."""
    weight, scale_a, scale_b = o.weight.transpose(1, 2), o.scale_a.flatten(), o.scale_b.flatten(1)
    return lambda o: torch._scaled_grouped_mm(
        o.a, weight, scale_a, scale_b, offs=o.offs, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def vllm(ops: Any, o: Operands) -> Call:
    """Return vLLM's product; sizes and strides are made before."""
    (groups, n, k), rows = o.weight.shape, len(o.a)
    starts = torch.tensor([0, *o.offs.tolist()[:-1]], dtype=torch.int64, device="cuda")
    sizes = [[n, count, k] if rows <= SWAPPED_ROWS else [count, n, k] for count in o.counts]
    problems = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    of_k, of_n = (torch.full((groups,), size, dtype=torch.int64, device="cuda") for size in (k, n))

    def run(o: Operands) -> torch.Tensor:
        ops.cutlass_moe_mm(
            *(o.out, o.a, o.weight, o.scale_a, o.scale_b, starts, problems, of_k, of_k, of_n, True, True)
        )
        return o.out

    return run


def contiguous(module: Any, o: Operands) -> Call:
    """Return DeepGEMM's product of groups that begin at multiples of 128 rows, from copies of the operands."""
    begins, total = [], 0
    for count in o.counts:
        begins.append(total)
        total += -(-count // BLOCK) * BLOCK
    groups = torch.repeat_interleave(torch.arange(len(o.counts), device="cuda"), torch.tensor(o.counts, device="cuda"))
    starts = torch.tensor([0, *o.offs.tolist()[:-1]], device="cuda")
    place = torch.tensor(begins, device="cuda")[groups] + torch.arange(len(o.a), device="cuda") - starts[groups]
    a = torch.zeros(total, o.a.shape[1], dtype=torch.uint8, device="cuda")
    a[place] = o.a.view(torch.uint8)
    scale = torch.zeros(o.scale_a.shape[1], total, device="cuda").T
    scale[place] = o.scale_a
    indices = torch.full((total,), -1, dtype=torch.int32, device="cuda")
    indices[place] = groups.int()
    for begin, count, group in zip(begins, o.counts, range(len(begins)), strict=True):
        indices[begin + count : begin + -(-count // BLOCK) * BLOCK] = group
    out = torch.empty(total, o.out.shape[1], dtype=torch.bfloat16, device="cuda")

    def run(o: Operands) -> torch.Tensor:
        module.m_grouped_fp8_gemm_nt_contiguous((a.view(FP8), scale), (o.weight, o.scale_b), out, indices)
        return out

    def run_and_gather(o: Operands) -> torch.Tensor:
        return run(o)[place]

    run.gathered = run_and_gather  # type: ignore[attr-defined]
    return run


def masked(module: Any, o: Operands) -> Call:
    """Return DeepGEMM's product with as many rows for each group, from copies of the operands so laid out."""
    groups, most = len(o.counts), -(-max(o.counts) // 64) * 64
    a = torch.zeros(groups, most, o.a.shape[1], dtype=torch.uint8, device="cuda")
    scale = torch.zeros(groups, o.scale_a.shape[1], most, device="cuda").transpose(1, 2)
    out = torch.empty(groups, most, o.out.shape[1], dtype=torch.bfloat16, device="cuda")
    for group, (count, end) in enumerate(zip(o.counts, o.offs.tolist(), strict=True)):
        a[group, :count] = o.a.view(torch.uint8)[end - count : end]
        scale[group, :count] = o.scale_a[end - count : end]
    counts = torch.tensor(o.counts, dtype=torch.int32, device="cuda")
    expected = max(1, len(o.a) // groups)

    def run(o: Operands) -> torch.Tensor:
        module.m_grouped_fp8_gemm_nt_masked((a.view(FP8), scale), (o.weight, o.scale_b), out, counts, expected)
        return out

    def run_and_gather(o: Operands) -> torch.Tensor:
        return torch.cat([part[:count] for part, count in zip(run(o), o.counts, strict=True)])

    run.gathered = run_and_gather  # type: ignore[attr-defined]
    return run


def others(case: Case, o: Operands, loaded: baselines.Loaded, deep_gemm: Any) -> Iterator[tuple[str, Call]]:
    """Yield the name and the call of each baseline that takes the case."""
    if case.mode == "row":
        yield "torch", torch_grouped(o)
        if loaded.vllm is not None:
            yield "vllm", vllm(loaded.vllm, o)
    elif deep_gemm is not None:
        yield "contiguous", contiguous(deep_gemm, o)
        yield "masked", masked(deep_gemm, o)


def error(o: Operands, result: torch.Tensor) -> float:
    """Return the relative error of a result, of up to eight groups."""
    used = [group for group, count in enumerate(o.counts) if count]
    wrong = total = 0.0
    for group in used[:4] + used[-4:]:
        end = int(o.offs[group])
        rows, (n, k) = slice(end - o.counts[group], end), o.weight.shape[1:]
        scale_a, scale_b = o.scale_a[rows], o.scale_b[group]
        if scale_a.shape[1] > 1:
            scale_a = scale_a.repeat_interleave(BLOCK, 1)[:, :k]
            scale_b = scale_b.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
        want = (o.a[rows].float() * scale_a).double() @ (o.weight[group].float() * scale_b).double().T
        wrong += float((result[rows].double() - want).square().sum())
        total += float(want.square().sum())
    return (wrong / total) ** 0.5 if total else 0.0


def measure(case: Case, loaded: baselines.Loaded, deep_gemm: Any, all_tiles: bool) -> dict[str, Any]:
    """Return one record: the case, its floor, and each variant's time or error."""
    o = operands(case)
    floor = roofline(o).floor()
    record = {**case._asdict(), "rows": len(o.a), "used": sum(count > 0 for count in o.counts), "floor_us": floor}
    if not len(o.a):
        return {**record, "us": {}, "wrong": {}}
    runs: dict[str, Call] = {"fp8core": ours}
    wrong: dict[str, str] = {}
    variants = tiles(o).items() if all_tiles else others(case, o, loaded, deep_gemm)
    for name, run in [*runs.items(), *variants]:
        runs[name] = run
        o.out.fill_(float("nan"))
        try:
            off = error(o, getattr(run, "gathered", run)(o))
            torch.cuda.synchronize()
        except (RuntimeError, AttributeError, TypeError, ValueError) as fault:
            wrong[name] = f"{type(fault).__name__}: {str(fault)[:900]}"
            continue
        if not off <= WRONG:
            wrong[name] = f"relative error {off:.1e}"
    calls = {name: [partial(run, o)] for name, run in runs.items() if name not in wrong}
    timing.rest()
    times = timing.compare(calls, replays=9, least=4 if floor > 300 else 16)
    return {**record, "us": timing.fields(times), "wrong": wrong}


def main() -> None:
    """Time the cases, print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baselines", type=Path, help="a folder with the libraries of vLLM and DeepGEMM")
    parser.add_argument("--deep-gemm", action="store_true", help="time DeepGEMM, too, which compiles its kernels")
    log.options(parser)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tiles", action="store_true", help="time all tiles of fp8core's kernel in place of baselines")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    chosen = parser.parse_args()
    require_gpu(parser)
    loaded = baselines.load(chosen.baselines)
    deep_gemm = None
    if chosen.deep_gemm and chosen.baselines:
        deep_gemm = block_baselines.module(chosen.baselines, "deep_gemm")
    names = ("fp8core", "torch", "vllm", "contiguous", "masked")
    table = Table("model", "mode", "tokens", "rows", "n x k", "floor us", *names, title=torch.cuda.get_device_name(0))
    cases = [
        Case(model, mode, tokens, n, k)
        for model, mode, tokens in product(chosen.models, chosen.modes, chosen.tokens)
        for n, k in MODELS[model].shapes
    ]
    for case, record in log.Log(chosen).measured(
        cases, Case._asdict, partial(measure, loaded=loaded, deep_gemm=deep_gemm, all_tiles=chosen.tiles)
    ):
        torch.cuda.empty_cache()
        times, wrong = record["us"], record["wrong"]
        cells = [f"{times[n]['median']:.2f}" if n in times else wrong.get(n, "-") for n in names]
        size = f"{case.n}x{case.k}"
        floor = f"{record['floor_us']:.2f}"
        table.add_row(case.model, case.mode, str(case.tokens), str(record["rows"]), size, floor, *cells)
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
