"""Steps of the AMD report that are not tests: each one prints its findings, and runs in its own process.

python -m bench.amd_steps STEP
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module, util
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

import fp8core
from fp8core import PER_TENSOR, timing
from fp8core.dtypes import FORMATS
from fp8core.errors import Fp8Error
from fp8core.kernels.gemm.blaslt import query
from fp8core.kernels.gemm.blaslt.library import find
from fp8core.kernels.gemm.blaslt.mapping import accumulation, product
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.quantize import QUANTIZE
from fp8core.ops.example_problems import example_product
from fp8core.problem import Quantize
from fp8core.runtime import compiler, device, hip_graphs, launches, loaded
from fp8core.runtime.plans import QuantizeNumbers
from fp8core.target import native_e4m3

MEBIBYTE: Final = 1 << 20
PRODUCT: Final = """
import cupy
x = cupy.ones((32, 512), cupy.float16)
q = fp8core.quantize(x)
fp8core.scaled_mm_nt(q.data, q.data, q.scale, q.scale, out_dtype="float16")
from fp8core.runtime import loaded
for stem in ("libamdhip64", "libhipblaslt", "libhiprtc"):
    print(f"  {stem}: {', '.join(map(str, loaded.mapped(stem))) or 'none'}")
"""
ORDERS: Final = {
    "fp8core alone": f"import fp8core{PRODUCT}",
    "torch first": f"import torch; torch.ones(1, device='cuda')\nimport fp8core{PRODUCT}",
    "fp8core first": f"import fp8core{PRODUCT}\nimport torch; torch.ones(1, device='cuda')\n"
    "print('  then torch:', ', '.join(map(str, loaded.mapped('libamdhip64'))))",
}


def import_() -> None:
    """Import CuPy and print how it was built."""
    cupy = import_module("cupy")
    cupy.show_config()
    print("HIP:", cupy.cuda.runtime.is_hip, cupy.cuda.runtime.runtimeGetVersion(), "hipRTC:", compiler.version())


def libraries() -> None:
    """Print the libraries that the shared objects of CuPy do not find."""
    missing: dict[str, list[str]] = {}
    for name in ("cupy", "cupy_backends"):
        spec = util.find_spec(name)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*.so")):
                said = subprocess.run(("ldd", path), capture_output=True, text=True, check=False).stdout
                for line in said.splitlines():
                    if "not found" in line:
                        missing.setdefault(line.split()[0], []).append(path.name)
    for library, users in missing.items():
        print(f"{library} is not found, and {len(users)} modules need it: {', '.join(users[:4])}")
    print(f"{len(missing)} libraries are not found")


def runtimes() -> None:
    """Print which HIP runtimes are mapped, for each order of imports."""
    for name, code in ORDERS.items():
        if "torch" in name and util.find_spec("torch") is None:
            print(f"{name}: PyTorch is not installed")
            continue
        done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=False, timeout=110)
        print(f"{name}: exit status {done.returncode}\n{done.stdout}{done.stderr[-2000:]}")


def _quantized(rows: int, cols: int, seed: int, spread: float = 1.0) -> Any:
    random = np.random.default_rng(seed)
    x: Any = (random.standard_normal((rows, cols)) * spread).astype(np.float16)
    return fp8core.quantize(device.cupy().asarray(x), dtype=native_e4m3(device.target(0)))


def _product(a: Any, b: Any, **options: Any) -> Any:
    return fp8core.scaled_mm_nt(a.data, b.data, a.scale, b.scale, out_dtype="float16", **options)


def _bytes(x: Any) -> Any:
    return x.codes if isinstance(x, fp8core.Float8Array) else x.view("uint8")


def _same(got: Any, want: Any) -> str:
    return "the same" if bool((got == want).all()) else "WRONG"


def replay() -> None:
    """Print what a replayed graph computes from operands that changed after its capture."""
    cupy = device.cupy()
    stream, dtype = cupy.cuda.Stream(non_blocking=True), native_e4m3(device.target(0))
    weight = _quantized(512, 1024, 1)
    for rows in (4, 256):
        for name, options in (("per token", {}), ("per tensor", {"group_shape": PER_TENSOR})):
            x = cupy.zeros((rows, 1024), cupy.float16)

            def calls(x: Any = x, options: Any = options) -> Any:
                codes = fp8core.quantize(x, dtype=dtype, **options)
                return codes, (_product(codes, weight) if not options else None)

            with stream:
                calls()  # compiles the kernels, and lets the library load its own
                stream.synchronize()
                made: list[Any] = []
                graph = hip_graphs.HipGraph(stream.ptr, lambda run=calls, made=made: made.append(run()))
                x[...] = cupy.asarray(np.random.default_rng(rows).standard_normal(x.shape).astype(np.float16))
                graph.launch(stream.ptr)
                want, wanted = calls()
                stream.synchronize()
            got, gotten = made[0]
            said = f"codes {_same(_bytes(got.data), _bytes(want.data))}, scales {_same(got.scale, want.scale)}"
            said += "" if wanted is None else f", product {_same(gotten, wanted)}"
            print(f"{rows} rows {name}: {said}")


def streams(calls: int = 10_000) -> None:
    """Multiply on two streams at once, and compare with the results of one stream."""
    cupy = device.cupy()
    a, b = _quantized(256, 8192, 1), _quantized(4096, 8192, 2)
    print(fp8core.explain(fp8core.scaled_mm_nt, a.data, b.data, a.scale, b.scale, out_dtype="float16").chosen)
    want = _product(a, b)
    outs = [cupy.empty_like(want) for _ in range(2)]
    both = [cupy.cuda.Stream(non_blocking=True) for _ in outs]
    cupy.cuda.runtime.deviceSynchronize()
    wrong = 0
    for turn in range(calls):
        for stream, out in zip(both, outs, strict=True):
            with stream:
                _product(a, b, out=out)
        if turn % 100 == 99:
            for stream in both:
                stream.synchronize()
            wrong += sum(not bool((out == want).all()) for out in outs)
            print(f"{turn + 1} products a stream, {wrong} results wrong", flush=True)


def late() -> None:
    """Capture products on a stream that was not used before, and then with a shape that was not used before."""
    cupy = device.cupy()
    b = _quantized(1024, 1024, 2)
    known, unknown = _quantized(256, 1024, 1), _quantized(320, 1024, 1)
    _product(known, b)
    cupy.cuda.runtime.deviceSynchronize()
    for name, a in (("a known product on a new stream", known), ("a product that was never called", unknown)):
        stream, made = cupy.cuda.Stream(non_blocking=True), []
        try:
            with stream:
                graph = hip_graphs.HipGraph(stream.ptr, lambda a=a, made=made: made.append(_product(a, b)))
                graph.launch(stream.ptr)
            stream.synchronize()
            print(f"{name}: captured, its result is {_same(made[0], _product(a, b))}")
        except (Fp8Error, RuntimeError) as error:
            print(f"{name}: {type(error).__name__}: {error}")


def sticky() -> None:
    """Let a launch fail, and print whether CuPy and torch see its error afterwards."""
    target = device.target(0)
    try:
        launches.Launcher(target, compiler.Function(0, None), "nothing", "P", (64, 1, 1), 0, b"").bind((1, 1, 1))(0, 0)
        print("a launch of no kernel did NOT fail")
    except Fp8Error as error:
        print(f"the launch failed as it should: {error}")
    print("left behind:", device.driver().hipPeekAtLastError())
    print("CuPy:", float(device.cupy().ones(2).sum()))
    if util.find_spec("torch"):
        print("torch:", import_module("torch").ones(2, device="cuda").sum().item())


def stream1() -> None:
    """Use the default stream by both of its numbers."""
    a, b = _quantized(32, 1024, 1), _quantized(256, 1024, 2)
    for number in (0, 1):
        got = _product(a, b, stream=number)
        print(f"stream={number}:", float(abs(got.astype("f4")).sum()))


def results() -> None:
    """Print which kernel computes FP8 results, and where they saturate."""
    a, b = _quantized(256, 1024, 1, 100.0), _quantized(512, 1024, 2, 100.0)
    for out in FORMATS:
        call = (a.data, b.data, a.scale, b.scale)
        try:
            chosen = fp8core.explain(fp8core.scaled_mm_nt, *call, out_dtype=out, out_scale=1e-3).chosen
            codes = fp8core.scaled_mm_nt(*call, out_dtype=out, out_scale=1e-3)
            largest = np.nanmax((codes.get() if hasattr(codes, "get") else codes).astype(np.float32))
            print(f"{out}: {chosen}, the largest result is {largest}")
        except Fp8Error as error:
            print(f"{out}: {error}")


def offers() -> None:
    """Print how many algorithms hipBLASLt offers, by workspace, bias and scales."""
    target, library = device.target(0), find("hip")
    if isinstance(library, str):
        raise SystemExit(library)
    handle = library.handles.of_device(0)
    e4m3 = native_e4m3(target)
    problems = {
        "per tensor": example_product(target),
        "per row": example_product(target, "row", "row"),
        "per tensor, bfloat16 bias, float32": example_product(target, out="float32", bias="bfloat16"),
        f"per tensor, {e4m3}": example_product(target, out=e4m3),
        "per tensor, 16 rows": example_product(target, m=16),
    }
    for name, p in problems.items():
        for kind, made in (("itself", product(p)), ("fp32 sums", accumulation(p))):
            for mebibytes in (0, 32, 76, 128):
                try:
                    found = query.HeuristicQuery(library, handle, made).offered(mebibytes * MEBIBYTE)
                    said = f"{len(found)} algorithms, workspaces {[c.workspace_bytes for c in found]}"
                except Fp8Error as error:
                    said = str(error)
                print(f"{name}, {kind}, {mebibytes} MiB: {said}")


def cold() -> None:
    """Time every kernel of some products with weights over 192 MiB and over 768 MiB."""
    target = device.target(0)
    for mebibytes in (192, 768):
        timing.INFINITY_CACHE_COLD_BYTES = mebibytes * MEBIBYTE  # type: ignore[misc]
        for m in (1, 16, 64, 256, 4096):
            p = example_product(target, "row", "row", m=m, n=4096, k=4096)
            choices = SCALED_MM.candidates(p)
            found = timing.times(p, [SCALED_MM.planned(p, choice) for choice in choices])
            for choice, us in sorted(zip(choices, found, strict=True), key=lambda pair: pair[1]):
                print(f"{mebibytes} MiB m={m}: {us:.2f} us {choice.kernel} algorithm {choice.algorithm}", flush=True)


def resident() -> None:
    """Time quantization per tensor by each able kernel."""
    cupy, target = device.cupy(), device.target(0)
    watch = timing.Stopwatch()
    for rows in (1, 64, 4096):
        p = Quantize(target, "float16", native_e4m3(target), PER_TENSOR, False, "float32", "k", 8192, 16)
        x = cupy.ones((rows, 8192), cupy.float16)
        data, scale = cupy.empty((rows, 8192), cupy.uint8), cupy.empty(1, cupy.float32)
        numbers = QuantizeNumbers(8192, 8192, 0, 0, rows, rows, float("inf"), 1e-10)
        for choice in QUANTIZE.candidates(p):
            launch = QUANTIZE.planned(p, choice).bind(numbers)
            run = partial(launch, watch.stream.ptr, x.data.ptr, data.data.ptr, scale.data.ptr, 0)
            times = [watch.elapsed(run, 50) for _ in range(20)]
            print(f"{rows} x 8192: {1e3 * median(times):.2f} us {choice.kernel}", flush=True)


STEPS: Final[dict[str, Callable[[], None]]] = {
    "import": import_,
    **{
        step.__name__: step
        for step in (*(libraries, runtimes, replay, streams, late, sticky, stream1, results, offers, cold, resident),)
    },
}

if __name__ == "__main__":
    STEPS[sys.argv[1]]()
    if device.count():
        device.cupy().cuda.runtime.deviceSynchronize()
    print("HIP runtimes mapped:", ", ".join(map(str, loaded.mapped(loaded.HIP_RUNTIME))) or "none")
