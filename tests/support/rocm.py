"""ROCm without an AMD GPU: stand-ins for libamdhip64, with the real ABI, and for a CuPy that was built for ROCm.

Test modules import the fixtures that they use, and the fixtures that these depend on.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from fp8core.interop import dlpack_capsule
from fp8core.runtime import compiler, device, launches, loaded
from fp8core.runtime.args import Float32, Int32, Pointer
from support.targets import MI300, TARGETS

HIP = [target for target in TARGETS if target.platform == "hip"]
CACHED = (
    device.cupy,
    device._survey,
    device.platform,
    device.target,
    device.driver,
    device._asking_capture,
    compiler.version,
)
"""Caches of plain data, which can be cleared and filled again. Caches of modules are not among them, as launches
depend on these."""


class Event:
    """A CuPy event that is always complete."""

    done = True
    made = 0

    def __init__(self, **options):
        Event.made += 1
        assert options == {"disable_timing": True}

    def record(self, stream):
        self.stream = stream


class Stream(SimpleNamespace):
    """A CuPy stream, which is also a context."""

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        return None

    def wait_event(self, event):
        self.waited = event


class Compiler(SimpleNamespace):
    """``cupy.cuda.nvrtc`` of a CuPy for ROCm, which is hipRTC: ``getPTX`` returns machine code."""

    def __init__(self):
        super().__init__(seen=[])

    def getVersion(self):
        return (7, 0)

    def createProgram(self, text, name, headers, names):
        return [text, name]

    def compileProgram(self, program, options):
        self.seen.append((*program, options))

    def getPTX(self, program):
        return b"\x7fELF of " + program[1].encode()

    def getCUBIN(self, program):
        raise RuntimeError("getCUBIN is not available in HIP")

    def destroyProgram(self, program):
        program.clear()


def unsupported(*arguments):
    raise RuntimeError("streamIsCapturing is not supported in ROCm")


PROPERTIES = {
    "gcnArchName": b"gfx942:sramecc+:xnack-",
    "multiProcessorCount": 304,
    "warpSize": 64,
    "sharedMemPerBlock": 65536,
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("rocm")
    source = str(Path(__file__).with_name("rocm_stub.c"))
    paths = {}
    for name, flags in (("7", ()), ("6", ("-DROCM_6",))):
        paths[name] = folder / f"libamdhip64.so.{name}"
        command = (compiler, "-std=c11", "-Wall", "-Werror", "-shared", "-fPIC", *flags, source, "-o", str(paths[name]))
        subprocess.run(command, check=True)
    return {name: ctypes.CDLL(str(path)) for name, path in paths.items()}


@pytest.fixture
def cupy(monkeypatch):
    runtime = SimpleNamespace(
        is_hip=True,
        getDeviceCount=lambda: 2,
        getDevice=lambda: 0,
        getDeviceProperties=lambda ordinal: PROPERTIES,
        runtimeGetVersion=lambda: 70051831,
        streamIsCapturing=unsupported,
    )
    null = Stream(ptr=0)
    cuda = SimpleNamespace(
        runtime=runtime,
        nvrtc=Compiler(),
        Device=lambda ordinal: Stream(ordinal=ordinal),
        Event=Event,
        Stream=SimpleNamespace(null=null, from_external=lambda stream: Stream(ptr=stream.__cuda_stream__()[1])),
        get_current_stream=lambda ordinal=-1: null,
    )
    for function in CACHED:
        function.cache_clear()
    launches._launch_function.cache_clear()
    module = SimpleNamespace(cuda=cuda)
    monkeypatch.setattr(device, "cupy", lambda: module)
    monkeypatch.setattr(loaded, "MAPS", Path("/nowhere"))  # the process has stand-in libraries mapped
    yield module
    monkeypatch.undo()
    for function in CACHED:
        function.cache_clear()
    launches._launch_function.cache_clear()


@pytest.fixture
def rocm(cupy, libraries, monkeypatch):
    library = libraries["7"]
    library.stub_log.restype = ctypes.c_char_p
    library.stub_set(0, 0)
    monkeypatch.setattr(device, "driver", lambda: library)
    dropped = SimpleNamespace(start=lambda: None, add=lambda *_: None)  # no thread queries the stand-ins
    monkeypatch.setattr(dlpack_capsule, "releases", lambda: dropped)
    Event.made = 0
    return library


class PifArgs(NamedTuple):
    places: Pointer
    count: Int32
    factor: Float32


def launcher(signature="Pif", cooperative=False):
    function = compiler.Function(0xABC0, None)
    return launches.Launcher(MI300, function, "entry", signature, (256, 1, 1), 4096, b"", cooperative)
