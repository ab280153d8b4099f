"""The error of every kernel of scaled products by k: on random data, with outliers, and on a real model's weights.

    python -m bench.accuracy [--json FILE] [--k 512 4096 53248] [--data random outliers] [--model FOLDER]
    python -m bench.accuracy --extract [--model FOLDER]

For each mode of scales, data, k and number of rows, every able kernel runs, with and without `use_fast_accum`. Errors
are relative, in the Frobenius norm, to float64: "error" is that of the product alone, relative to the product of the
same codes and scales; "rounded" that of the exact product rounded to the result's dtype; "whole" includes the
quantization of both operands, and is relative to the product of the unquantized operands. The real weights and inputs
are those of two layers of the demo's encoder, which runs in fp32 to get them; --extract does only this, so that they
can be taken to a machine without a network.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench import results
from bench.choice import compile_ahead
from bench.errors import relative
from bench.needs import require_gpu
from fp8core import demo
from fp8core.errors import CheckpointError, Fp8Error

DEPTHS: Final = (512, 1024, 2048, 4096, 8192, 14336, 16384, 21504, 28672, 53248)
ROWS: Final = (16, 64, 512)
CHANNELS: Final = 1024
MODES: Final = ("tensor", "row", "block")
DATA: Final = ("random", "outliers")
OUTLIERS: Final = 0.005
"""The fraction of the input's columns that are `OUTLIER` times as large, like some features of language models."""
OUTLIER: Final = 50.0
LAYERS: Final = ("encoder.layer.3.intermediate.dense", "encoder.layer.3.output.dense")
"""Layers of the demo's encoder, with k = 384 and k = 1536."""
OUTS: Final = ("bfloat16", "float32")
SEED: Final = 1
KEPT: Final = Path(__file__).resolve().parent.parent / "build" / "minilm.npz"
"""The file with the weights and inputs of `LAYERS`."""


class Case(NamedTuple):
    """A product: a mode of scales, a kind of data, and a shape."""

    mode: str
    data: str
    m: int
    n: int
    k: int


def extract(folder: Path) -> None:
    """Save the weights and inputs of `LAYERS` in half precision."""
    module = demo.encoder_module()
    encoder = module.Encoder(folder)
    inputs: dict[str, Any] = {}

    def watch(name: str, x: Any, _: Any) -> None:
        if name in LAYERS:
            inputs[name] = x.reshape(-1, x.shape[-1])

    ids, mask = module.Tokenizer(folder / "vocab.txt")(module.SENTENCES)
    encoder(ids, mask, watch)
    kept = {}
    for name in LAYERS:
        kept[f"{name}.weight"] = encoder.weights[f"{name}.weight"].astype(np.float16)
        kept[f"{name}.input"] = inputs[name][mask.reshape(-1)].astype(np.float16)
    KEPT.parent.mkdir(exist_ok=True)
    np.savez_compressed(KEPT, **kept)


def made(case: Case) -> tuple[Any, Any]:
    """Return x [m, k] and a weight [n, k] in bfloat16, normally distributed; x has outlier columns if requested."""
    import torch

    torch.manual_seed(SEED)
    x = torch.randn(case.m, case.k, device="cuda")
    weight = torch.randn(case.n, case.k, device="cuda") * case.k**-0.5
    if case.data == "outliers":
        x[:, torch.randperm(case.k, device="cuda")[: max(1, round(OUTLIERS * case.k))]] *= OUTLIER
    return x.bfloat16(), weight.bfloat16()


def real(model: Path | None) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, x and weight of each of `LAYERS`; nothing if the model is not available."""
    import torch

    if not KEPT.exists():
        try:
            extract(demo.model_folder(model) or demo.fetch_model())
        except CheckpointError as error:
            print(f"without real weights: {error}", flush=True)
            return
    with np.load(KEPT) as kept:
        for name in LAYERS:
            x, weight = (torch.from_numpy(kept[f"{name}.{part}"]).cuda().bfloat16() for part in ("input", "weight"))
            yield name, x, weight


class Quantized(NamedTuple):
    """Both operands in FP8 with their scales, and dequantized to float64."""

    a: Any
    b: Any
    scale_a: Any
    scale_b: Any
    wide_a: Any
    wide_b: Any


def quantized(mode: str, x: Any, weight: Any) -> Quantized:
    """Quantize both operands as a linear layer with this mode of scales does."""
    import fp8core

    groups = {
        "tensor": (fp8core.PER_TENSOR, fp8core.PER_TENSOR),
        "row": (fp8core.PER_TOKEN, fp8core.PER_CHANNEL),
        "block": (fp8core.GROUP_128, fp8core.BLOCK_128),
    }[mode]
    layout: Any = "mn" if mode == "block" else "k"
    a = fp8core.quantize(x, group_shape=groups[0], scale_layout=layout)
    b = fp8core.quantize(weight, group_shape=groups[1])

    def wide(q: Any, rows: int) -> Any:
        scale = q.scale.double()
        if mode == "block":
            scale = scale.repeat_interleave(128, 1)[:, : q.data.shape[1]]
            scale = scale.repeat_interleave(rows, 0)[: q.data.shape[0]]
        return q.data.double() * (scale if scale.numel() > 1 else scale.reshape(()))

    return Quantized(a.data, b.data, a.scale, b.scale, wide(a, 1), wide(b, 128))


def problems(case: Case) -> Iterator[Any]:
    """Yield the problems of a case: each dtype of the result, with and without use_fast_accum."""
    from fp8core.ops.explain import explain_product

    modes: Any = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "block": ("group", "block")}[case.mode]
    for out in OUTS:
        for fast in (True, False):
            keywords: Any = {"out_dtype": out, "scale_a": modes[0], "scale_b": modes[1], "use_fast_accum": fast}
            yield explain_product(case.m, case.n, case.k, **keywords).problem


def choices(p: Any) -> list[Any]:
    """Return every row that is able to run a product, with its first algorithm."""
    from fp8core.kernels.gemm.table import SCALED_MM

    return [choice for choice in SCALED_MM.candidates(p) if not choice.algorithm]


def measure(case: Case, x: Any, weight: Any) -> Iterator[dict[str, Any]]:
    """Yield a record for every able kernel, for each dtype of the result and value of use_fast_accum."""
    import torch

    from bench.decode import Operands, launched
    from fp8core.kernels.gemm.table import SCALED_MM

    q = quantized(case.mode, x, weight)
    exact, whole = q.wide_a @ q.wide_b.T, x.double() @ weight.double().T
    for p in problems(case):
        result = torch.empty(case.m, case.n, device="cuda", dtype=getattr(torch, p.out))
        rounded, first = relative(exact.to(result.dtype), exact), SCALED_MM.choice(p)
        for choice in choices(p):
            run = launched(SCALED_MM.planned(p, choice))
            result.fill_(float("nan"))
            try:
                run(Operands(q.a, q.b, q.scale_a, q.scale_b, result))
            except Fp8Error as error:
                print(f"{choice.kernel} does not run {case}: {error}", flush=True)
                continue
            yield {
                "bench": "accuracy",
                **case._asdict(),
                "kernel": choice.kernel,
                "chosen": choice == first,
                "fast": p.use_fast_accum,
                "out": p.out,
                "error": float(f"{relative(result, exact):.3e}"),
                "rounded": float(f"{rounded:.3e}"),
                "whole": float(f"{relative(result, whole):.3e}"),
            }


def main() -> None:
    """Measure the errors, or only save the parts of a real model for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one line a result to this file")
    parser.add_argument("--k", nargs="+", type=int, default=DEPTHS)
    parser.add_argument("--data", nargs="+", choices=DATA, default=DATA)
    parser.add_argument("--extract", action="store_true", help=f"keep what is needed of the encoder in {KEPT.name}")
    parser.add_argument("--model", type=Path, help="the encoder's folder (default: the demo's, which is fetched)")
    asked = parser.parse_args()
    if asked.extract:
        extract(demo.model_folder(asked.model) or demo.fetch_model())
        return
    require_gpu(parser)
    records: list[dict[str, Any]] = []

    def keep(found: Iterator[dict[str, Any]]) -> None:
        some = list(found)
        results.append(asked.json, *some)
        records.extend(some)

    layers = list(real(asked.model))
    shapes = (Case(mode, "", m, CHANNELS, k) for mode in MODES for m in ROWS for k in asked.k)
    compile_ahead((p, choice) for case in shapes for p in problems(case) for choice in choices(p))
    for mode in MODES:
        for data in asked.data:
            for k in asked.k:
                for m in ROWS:
                    case = Case(mode, data, m, CHANNELS, k)
                    keep(measure(case, *made(case)))
        for name, x, weight in layers:
            keep(measure(Case(mode, name, x.shape[0], *weight.shape), x, weight))
    worst: dict[tuple[str, str, bool, str], float] = {}
    for r in records:
        key = r["mode"], r["kernel"], r["fast"], r["out"]
        worst[key] = max(worst.get(key, 0.0), r["error"])
    for (mode, kernel, fast, out), error in sorted(worst.items()):
        print(f"{mode:>6} {kernel:20} {'fast' if fast else 'exact':5} {out:8} {error:.2e}", flush=True)


if __name__ == "__main__":
    main()
