"""Made-up benchmark results, and a runner for the commands of the benchmarks."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def timing(**us):
    return {name: {"median": t, "low": 0.99 * t, "high": 1.01 * t} for name, t in us.items()}


def quantized(mode, rows, cols, mine, copy):
    us = timing(fp8core=mine, copy=copy, vllm=2 * copy)
    return {"mode": mode, "rows": rows, "cols": cols, "floor_us": 3 * rows * cols / 4.3e6, "us": us, "wrong": {}}


def product(mode, m, mine, library):
    us = timing(cublaslt=library, vllm=11.0) | (timing(sm90_decode=mine) if mine else {})
    return {"mode": mode, "m": m, "n": 4096, "k": 8192, "floor_us": 7.8 + m / 100, "us": us, "wrong": {}}


def odd(cols, mine, neighbour):
    us = timing(fp8core=mine, neighbour=neighbour)
    floors = {"floor_us": float(cols), "neighbour_floor_us": 1000.0}
    where = {"mode": "token", "x": "float32", "rows": 8, "cols": cols, "neighbour": "8x1000"}
    return {"bench": "odd", **where, **floors, "us": us}


SAMPLE = [
    {"bench": "machine", "format": 2, "device": "NVIDIA H200", "date": "2026-11-21", "command": "python -m bench --note 'made up'"},
    quantized("token", 1, 4096, 1.0, 1.1),
    quantized("token", 8192, 8192, 49.0, 48.5),
    quantized("tensor", 8192, 8192, 74.0, 48.5),
    {**quantized("1x128", 8192, 8192, 50.0, 48.5), "wrong": {"sgl": "codes differ by 3"}},
    odd(1001, 1.29, 1.0),
    odd(2001, 2.7, 1.0),
    odd(501, 1.31, 1.0),
    {**quantized("token", 8192, 8192, 55.0, 49.0), "kind": "norm"},
    {**product("row", 256, None, 15.0), "bench": "invariance", "us": timing(free=15.0, invariant=39.5),
     "kernels": {"free": "cublaslt", "invariant": "sm90_decode"}},
    {**product("block", 16, None, 15.0), "bench": "invariance", "us": timing(free=9.0),
     "kernels": {"free": "sm90_decode", "invariant": "sm90_decode"}, "wrong": {"invariant": "other bits"}},
    {"bench": "ending", "mode": "row", "m": 512, "n": 4096, "k": 8192,
     "chosen": {"plain": "cublaslt", "silu": "sm90_tiled"}, "wrong": {"sm90_tiled plain": "far from torch's"},
     "us": timing(**{"cublaslt plain": 48.0, "sm90_tiled silu": 64.0, "torch silu": 59.0, "torch add": 60.0})},
    *({"bench": "odd_products", "scales": "row x row", "ending": "", "m": m, "n": 5000, "k": 4101, "neighbour": f"{m}x5008x4112",
       "kernels": {"fp8core": "realigned", "neighbour": "sm90_tiled"}, "floor_us": 5.0, "us": timing(fp8core=us, neighbour=10.0)}
      for m, us in ((16, 15.1), (64, 14.9), (65, 24.9), (300, 25.1))),
    *({"bench": "grouped", "model": "Mixtral-8x7B", "mode": mode, "tokens": 16, "n": 4096, "k": 14336, "rows": 32, "used": 8,
       "floor_us": 95.8, "us": timing(**us), "wrong": {"masked": "far"} if mode == "block" else {}}
      for mode, us in (("row", {"fp8core": 104.0, "torch": 142.0, "vllm": 103.0}), ("block", {"fp8core": 104.0, "contiguous": 103.0}))),
    *({"bench": "moe", "model": "Qwen3-30B", "mode": mode, "tokens": 16, "rows": 128, "floor_us": 0.1,
       "us": timing(fp8core=mine, sgl=4.0, torch=20.0), "wrong": {}} for mode, mine in (("permute", 3.0), ("unpermute", 5.0))),
    {"bench": "hf_experts", "mode": "eager", "m": 16, "errors": {}, "us": timing(bf16=617.0, loop=11244.0, fp8core=519.0)},
    {"case": "normalize fn to fnuz", "rows": 64, "cols": 64, "floor_us": 0.1, "us": timing(fp8core=1.0, copy=1.0)},
    {"case": "requantize, 3 shards", "rows": 64, "cols": 64, "floor_us": 0.1, "wrong": "differs"},
    *(product("row", m, 9.0 + m / 20 if m <= 64 else None, 15.0) for m in (1, 4, 8, 16, 32, 64, 128, 512)),
    product("block", 1, 9.0, 16.0),
    *({"bench": "layer", "m": m, "floor_us": 50.0, "us": timing(preallocated=56.0 + m, plain=57.0 + m, vllm=86.0),
       "wrong": {}} for m in (16, 1)),
    *({"bench": "layer", "model": "Llama-70B/8", "m": m, "floor_us": 18.0, "us": timing(preallocated=us, plain=us),
       "wrong": {}} for m, us in ((1, 25.5), (16, 26.5))),
    *({"bench": "linear", "m": m, "n": 4096, "k": 8192, "floor_us": 8.0, "us": timing(fp8core=us, product=9.0)}
      for m, us in ((16, 10.4), (64, 11.1))),
    {"bench": "against", "kind": "gpu", "case": "quantize", "us": timing(before=2.0, now=1.98), "ratio": 0.99,
     "low": 0.985, "high": 1.0},
    {"bench": "against", "kind": "host", "case": "quantize", "wrong": {"before": "TypeError: no"}},
    *({"bench": "calls", "framework": f, "step": s, "us": t} for f, s, t in
      (("fp8core", "scaled_mm m=16", 6.0), ("torch", "_scaled_mm m=16", 12.0),
       ("fp8core", "Fp8Linear m=80", 8.1), ("vllm", "quantize + scaled_mm m=16", 11.0),
       ("vllm", "quantize + scaled_mm m=80", 10.0))),
    {"bench": "overhead", "framework": "torch", "step": "view", "us": 0.5},
    {"bench": "engine", "mode": "quantize bfloat16, per token", "copy_s": 1e-3, "s": 2e-3, "rate": 350.0, "unit": "M elements/s"},
    {"bench": "subject", "subject": "quantize", "status": 0, "seconds": 9.0},
    {"bench": "subject", "subject": "engine", "skipped": "made up"},
]  # fmt: skip


def written(path, records):
    """Write ``records`` as lines of a file, and return its path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def python(*arguments, cwd=ROOT):
    """Run Python with this tree on its path, and return the completed process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment)
