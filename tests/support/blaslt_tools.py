"""Problems, made-up targets and the recording library for tests of fp8core.kernels.gemm.blaslt and its table rows."""

import ctypes
import gc
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from fp8core.kernels.gemm import corrections
from fp8core.kernels.gemm.blaslt import corrections as blaslt_corrections
from fp8core.kernels.gemm.blaslt import library as blaslt_library
from fp8core.kernels.gemm.blaslt import query as blaslt_heuristic
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import ScaledMm
from fp8core.runtime import capture, device, loaded
from fp8core.target import Target
from support.targets import H200, MI300

MODES = {
    "tensor": ("tensor", "tensor", (0, 0), (0, 0)),
    "row": ("row", "row", (1, 0), (1, 0)),
    "mixed": ("tensor", "row", (0, 0), (1, 0)),
    "group x block": ("group", "block", (1, 64), (32, 1)),
    "group x group": ("group", "group", (1, 64), (1, 256)),
}


def problem(mode="tensor", target=H200, **changes):
    """Return a ScaledMm with m=64, n=256, k=4096, whose scales of a mode have the layout that the library requires."""
    scale_a, scale_b, strides_a, strides_b = MODES[mode]
    e4m3 = "float8_e4m3fnuz" if target == MI300 else "float8_e4m3fn"
    made = ScaledMm(
        target=target,
        m=64,
        n=256,
        k=4096,
        a=e4m3,
        b=e4m3,
        out="bfloat16",
        scale_a=scale_a,
        scale_b=scale_b,
        scale_a_strides=strides_a,
        scale_b_strides=strides_b,
        bias="",
        out_scale=False,
        amax=False,
        use_fast_accum=True,
        batch_invariant=False,
        lda=4096,
        ldb=4096,
        ldo=256,
        alignment=16,
    )
    return made._replace(**changes)


class Stub:
    """The recording library of a platform."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        self._dll.stub_log.restype = ctypes.c_char_p
        self._dll.stub_version.argtypes = [ctypes.c_size_t]
        self.offers, self.version = self._dll.stub_offers, self._dll.stub_version
        self.tile, self.vectors = self._dll.stub_tile, self._dll.stub_vectors
        self.capturing, self.relaxed, self.idle = self._dll.stub_capturing, self._dll.stub_relaxed, self._dll.stub_idle
        self.idle.argtypes = [ctypes.c_void_p]
        self._mode = 0
        self.cuda = Cuda(self)
        self.captured: set[int] = set()
        """The streams that are being captured."""
        self.drained: list[str] = []
        """One entry for each time that HIP's sticky error was cleared."""

    def exchange(self, mode: int) -> int:
        """Stand in for `capture.exchange`: a thread in relaxed mode may allocate while a stream is captured."""
        before, self._mode = self._mode, mode
        self.relaxed(int(mode == capture.RELAXED))
        return before

    def fail(self, function: str, status: int) -> None:
        self._dll.stub_fail(function.encode(), status)

    def reset(self) -> None:
        self._dll.stub_reset()

    def lines(self, *functions: str) -> list[str]:
        """Return the log of calls, of all functions or of ``functions`` only."""
        said = self._dll.stub_log().decode().splitlines()
        return [line for line in said if not functions or line.split()[0] in functions]

    def attributes(self, number: int) -> dict[int, tuple[int, int]]:
        """Return the width and value of each attribute that calls have set on the ``number``th descriptor of a product."""
        found = (re.fullmatch(rf"Matmul\w+SetAttribute d{number} (\d+) (\d+) (-?\d+)", x) for x in self.lines())
        return {int(f[1]): (int(f[2]), int(f[3])) for f in found if f}


FIRST_RUN = 0x5000_0000
"""The stream of a first run, and the address of its memory."""


class Cuda:
    """The part of ``cupy.cuda`` that the first run of a product needs: a stream and a memory pool."""

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self.runtime = SimpleNamespace(is_hip=True)
        self.allocated: list[int] = []
        self.fails = False
        self.memory = SimpleNamespace(OutOfMemoryError=MemoryError)

    def Stream(self, non_blocking: bool) -> SimpleNamespace:
        assert non_blocking
        return SimpleNamespace(ptr=FIRST_RUN, synchronize=lambda: self.stub.idle(FIRST_RUN))

    def MemoryPool(self) -> SimpleNamespace:
        return SimpleNamespace(malloc=self._malloc, free_all_blocks=self.allocated.clear)

    def _malloc(self, nbytes: int) -> SimpleNamespace:
        if self.fails:
            raise MemoryError(nbytes)
        self.allocated.append(nbytes)
        return SimpleNamespace(ptr=FIRST_RUN)


def build(folder: Path, platform: str) -> Path:
    source = Path(__file__).with_name("blaslt_stub.c")
    name = {"cuda": "libcublasLt", "hip": "libhipblaslt"}[platform]
    made = folder / f"{name}_stub.so"
    flags = ["-DHIP"] if platform == "hip" else []
    subprocess.run(["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", *flags, "-o", made, source], check=True)
    return made


def forget() -> None:
    """Clear the caches that hold a library, a device or their answers."""
    blaslt_library.find.cache_clear()
    blaslt_heuristic._ask.cache_clear()
    blaslt_heuristic.absence.cache_clear()
    blaslt_corrections.gpu_of.cache_clear()
    corrections.gpu_of.cache_clear()


def pretend(monkeypatch, stub: Stub, targets: tuple[Target, ...]) -> None:
    """Pretend that the machine has ``targets`` and the stub as its library, with empty caches before and after."""
    monkeypatch.setattr(SCALED_MM, "_tuned", {})
    monkeypatch.setattr(SCALED_MM, "_plans", {})
    gc.collect()
    stub.reset()
    monkeypatch.setattr(blaslt_library, "candidates", lambda dialect: iter([str(stub.path)]))
    monkeypatch.setattr(device, "count", lambda: len(targets))
    monkeypatch.setattr(device, "name", lambda ordinal: "stub")
    monkeypatch.setattr(device, "target", lambda ordinal: targets[ordinal])
    monkeypatch.setattr(device, "current", lambda: 0)
    monkeypatch.setattr(device, "current_getter", lambda: device.current)
    monkeypatch.setattr(device, "make_current", lambda ordinal: None)
    monkeypatch.setattr(device, "retry_with_context", lambda status, *_: status)
    monkeypatch.setattr(device, "on", lambda ordinal: nullcontext())
    monkeypatch.setattr(loaded, "MAPS", Path("/nowhere"))  # the process has other stand-in libraries mapped
    stub.cuda, stub.captured, stub.drained = Cuda(stub), set(), []
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=stub.cuda))
    monkeypatch.setattr(device, "capturing", lambda stream: stream in stub.captured)
    monkeypatch.setattr(device, "clear_error", lambda: stub.drained.append("drained"))
    monkeypatch.setattr(capture, "exchange", stub.exchange)
    forget()
