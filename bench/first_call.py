"""Times the first call in a fresh process, in seconds: kernels are cached on disk, imports of CuPy and torch excluded.

    python -m bench.first_call [--json FILE]

A process imports CuPy and torch and makes tensors (untimed), then imports fp8core and runs a linear layer on them.
The first process fills the cache; the median of the next five counts.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Final

from bench import results
from bench.needs import require_gpu

PROCESS: Final = """
import time
import cupy, torch
x = torch.ones(16, 4096, device="cuda", dtype=torch.bfloat16)
w = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
cupy.ones(1)
torch.cuda.synchronize()
begin = time.perf_counter()
import fp8core
fp8core.Fp8Linear.from_weight(w)(x)
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""
PROCESSES: Final = 5


def seconds() -> float:
    """Return the time that a fresh process measures."""
    run = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True)
    return float(run.stdout)


def main() -> None:
    """Time the first call and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append a JSON object to this file")
    chosen = parser.parse_args()
    require_gpu(parser)
    cold = seconds()
    warm = median(seconds() for _ in range(PROCESSES))
    print(f"first call: {warm:.3f} s with cached kernels, {cold:.3f} s in the process before")
    results.append(chosen.json, {"bench": "first_call", "s": warm, "before_s": cold})


if __name__ == "__main__":
    main()
