"""Times the routing of mixtures of experts beside SGLang's kernels and torch: rows to their experts, and back.

    python -m bench.moe [--baselines FOLDER] [--json FILE] [--models Qwen3-30B] [--tokens 1 128]

Each token is routed to random experts, all equally likely. "permute" sorts the choices and copies the FP8 rows of the
tokens, with 1x128 scales; SGLang's `prepare_moe_input` and two `shuffle_rows` do that in several launches, without
an order of the rows of an expert. "unpermute" is the weighted sum of the experts' bfloat16 results for each token, with
float32 weights; SGLang's kernel takes them in bfloat16. The floor reads what is needed once and writes the result.
Results are checked before they are timed.
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
from bench import baselines, grouped, grouped_cases, log
from bench.errors import relative
from bench.labels import MOE, OPERATIONS
from bench.needs import require_gpu
from bench.roofline import Roofline
from fp8core import GROUP_128, Quantized
from fp8core.problem import BLOCK

FAR: Final = 1e-2
"""A relative error above this is a mistake: sums of bfloat16 results are rounded to bfloat16."""


class Model(NamedTuple):
    """What a model's router sees."""

    experts: int
    each: int
    """Experts of a token."""
    hidden: int


MODELS: Final = {
    name.removesuffix("/8"): Model(model.experts * model.share, model.each, model.shapes[0][1])
    for name, model in grouped_cases.MODELS.items()
}
"""Those of `bench.grouped_cases`, whole."""


class Case(NamedTuple):
    """One operation for a number of tokens of a model."""

    model: str
    mode: str
    tokens: int


class Operands(NamedTuple):
    """The operands of both operations."""

    x: torch.Tensor
    q: Quantized[Any, Any]
    ids: torch.Tensor
    weights: torch.Tensor
    y: torch.Tensor
    """The experts' results, in the order of `fp8core.moe_permute`."""


class Variant(NamedTuple):
    """A way to make one operation."""

    run: Callable[[], Any]
    summed: Callable[[Any], torch.Tensor]
    """Returns, of the result, what a plain sum of each token's rows gives: the same for all ways."""


def operands(case: Case) -> Operands:
    """Return the operands of a case; equal cases have equal routing."""
    model, tokens = MODELS[case.model], case.tokens
    torch.manual_seed(tokens)
    x = torch.randn(tokens, model.hidden, device="cuda", dtype=torch.bfloat16)
    weights, ids = torch.rand(tokens, model.experts, device="cuda").topk(model.each, 1)
    y = torch.randn(tokens * model.each, model.hidden, device="cuda", dtype=torch.bfloat16)
    return Operands(x, fp8core.quantize(x, group_shape=GROUP_128), ids, weights, y)


def roofline(case: Case, o: Operands) -> Roofline:
    """Return the bytes of an operation: each token's row once, and the rows of all its choices."""
    tokens, each = o.ids.shape
    row = o.x.shape[1] * 2
    if case.mode == "permute":
        row = o.x.shape[1] + 4 * (o.x.shape[1] // BLOCK)
    return Roofline(tokens * (1 + each) * row, 0)


def places(o: Operands) -> torch.Tensor:
    """Return the row of each choice if rows are sorted by expert, equal ones in their order."""
    return o.ids.flatten().argsort(stable=True).argsort(stable=True)


def dequantized(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the values of rows with 1x128 scales."""
    return data.float() * scale.repeat_interleave(BLOCK, 1)


def ours(case: Case, o: Operands) -> Variant:
    """Return fp8core's way."""
    experts = MODELS[case.model].experts
    inverse = fp8core.moe_permute(o.q, o.ids, experts).inverse
    if case.mode == "unpermute":
        return Variant(lambda: fp8core.moe_unpermute(o.y, inverse, o.weights), torch.Tensor.float)

    def summed(made: Any) -> torch.Tensor:
        return dequantized(*made.rows)[made.inverse.long()].sum(1)

    return Variant(lambda: fp8core.moe_permute(o.q, o.ids, experts), summed)


def of_torch(case: Case, o: Operands) -> Variant:
    """Return torch's way, with operations that can be captured."""
    (tokens, each), experts = o.ids.shape, MODELS[case.model].experts
    numbers = torch.arange(experts, device="cuda")
    place = o.ids.flatten().argsort(stable=True)
    if case.mode == "unpermute":

        def run() -> torch.Tensor:
            apart = torch.empty_like(o.y).index_copy_(0, place, o.y).view(tokens, each, -1)
            return (apart * o.weights[..., None]).sum(1).to(o.y.dtype)

        return Variant(run, torch.Tensor.float)

    def permute() -> tuple[torch.Tensor, ...]:
        expert_of, order = torch.sort(o.ids.flatten(), stable=True)
        offs = torch.searchsorted(expert_of, numbers, right=True, out_int32=True)
        rows = order // each
        return o.q.data.view(torch.uint8)[rows], o.q.scale[rows], order, offs

    def summed(made: tuple[torch.Tensor, ...]) -> torch.Tensor:
        data, scale, order, _ = made
        values = dequantized(data.view(torch.float8_e4m3fn), scale)
        return torch.zeros(tokens, values.shape[1], device="cuda").index_add_(0, order // each, values)

    return Variant(permute, summed)


def sglang(ops: Any, case: Case, o: Operands) -> Variant:
    """Return SGLang's way, with memory given."""
    (tokens, each), model = o.ids.shape, MODELS[case.model]
    ids, rows = o.ids.int(), tokens * each
    offsets = torch.empty(model.experts + 1, dtype=torch.int32, device="cuda")
    sizes = [torch.empty(model.experts, 3, dtype=torch.int32, device="cuda") for _ in range(2)]
    source, place = (torch.empty(rows, dtype=torch.int32, device="cuda") for _ in range(2))
    data = torch.empty(rows, model.hidden, dtype=o.q.data.dtype, device="cuda")
    scale = torch.empty(rows, o.q.scale.shape[1], device="cuda")

    def permute() -> tuple[torch.Tensor, torch.Tensor]:
        ops.prepare_moe_input(ids, offsets, None, *sizes, source, place, model.experts, BLOCK, model.hidden)
        ops.shuffle_rows(o.q.data, source, data)
        ops.shuffle_rows(o.q.scale, source, scale)
        return data, scale

    def summed(made: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return dequantized(*made)[place.long()].view(tokens, each, -1).sum(1)

    if case.mode == "permute":
        return Variant(permute, summed)
    out = torch.empty(tokens, model.hidden, dtype=o.y.dtype, device="cuda")
    order = places(o).int()

    weights = o.weights.to(o.y.dtype)

    def unpermute() -> torch.Tensor:
        ops.apply_shuffle_mul_sum(o.y, out, order, weights)
        return out

    return Variant(unpermute, torch.Tensor.float)


def want(case: Case, o: Operands) -> torch.Tensor:
    """Return what `Variant.summed` gives of a right result."""
    tokens, each = o.ids.shape
    if case.mode == "permute":
        return dequantized(*o.q) * each
    return (o.y[places(o)].view(tokens, each, -1).double() * o.weights[..., None]).sum(1).float()


def variants(case: Case, o: Operands, loaded: baselines.Loaded) -> Iterator[tuple[str, Callable[[], Variant]]]:
    """Yield the name and the maker of each way."""
    yield "fp8core", partial(ours, case, o)
    yield "torch", partial(of_torch, case, o)
    if loaded.sgl is not None:
        yield "sgl", partial(sglang, loaded.sgl, case, o)


def key(case: Case) -> dict[str, Any]:
    """Return the fields of a case's record that distinguish it from others."""
    return {"bench": "moe", **case._asdict()}


def measure(case: Case, loaded: baselines.Loaded) -> dict[str, Any]:
    """Return one record: the case, its floor, and each way's time or error."""
    o = operands(case)
    floor, right = roofline(case, o).floor(), want(case, o)

    def tried(make: Callable[[], Variant]) -> tuple[Callable[[], object], float]:
        variant = make()
        return variant.run, relative(variant.summed(variant.run()), right)

    ways = [(name, partial(tried, make)) for name, make in variants(case, o, loaded)]
    return {**key(case), "rows": o.ids.numel(), "floor_us": floor, **grouped.timed(ways, FAR, least=16)}


def main() -> None:
    """Time the cases, print a table, and write JSON lines if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baselines", type=Path, help="a folder with SGLang's library")
    log.options(parser)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(grouped_cases.TOKENS))
    chosen = parser.parse_args()
    require_gpu(parser)
    loaded = baselines.load(chosen.baselines)
    table = Table("model", "operation", "tokens", "floor us", *MOE, title=torch.cuda.get_device_name(0))
    cases = [Case(*each) for each in product(chosen.models, OPERATIONS, chosen.tokens)]
    for case, record in log.Log(chosen).measured(cases, key, partial(measure, loaded=loaded)):
        torch.cuda.empty_cache()
        times, wrong = record["us"], record["wrong"]
        cells = [f"{times[n]['median']:.2f}" if n in times else wrong.get(n, "-") for n in MOE]
        table.add_row(case.model, case.mode, str(case.tokens), f"{record['floor_us']:.2f}", *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
