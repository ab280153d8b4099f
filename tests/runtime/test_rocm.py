"""ROCm in interop and below it, without an AMD GPU: against a stand-in for libamdhip64 with the real ABI, a CuPy
that answers as one built for ROCm does, and capsules of the real layout."""

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from fp8core import interop
from fp8core.errors import BackendError, DeviceError
from fp8core.interop import dlpack, dlpack_capsule, dlpack_exchange
from fp8core.problem import Target
from fp8core.runtime import compiler, device, jit
from fp8core.runtime.args import Float32, Int32, Pointer
from support import compilers
from support.problems import TARGETS

HIP = [target for target in TARGETS if target.platform == "hip"]
MI300 = next(target for target in HIP if target.arch == 0x942)
CACHED = (
    device.cupy,
    device._survey,
    device.platform,
    device.target,
    device.driver,
    device._asking_capture,
    compiler.version,
)
"""What is plain data: cleared, it is asked for again. Modules are not among it, as launches live in them."""


class Event:
    """A CuPy event that has always happened."""

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
    """``cupy.cuda.nvrtc`` of a CuPy for ROCm, which is hipRTC: machine code comes by the name of PTX."""

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
    source = str(Path(__file__).parents[1] / "support" / "rocm_stub.c")
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
    jit._launch_function.cache_clear()
    module = SimpleNamespace(cuda=cuda)
    monkeypatch.setattr(device, "cupy", lambda: module)
    yield module
    monkeypatch.undo()
    for function in CACHED:
        function.cache_clear()
    jit._launch_function.cache_clear()


@pytest.fixture
def rocm(cupy, libraries, monkeypatch):
    library = libraries["7"]
    library.stub_log.restype = ctypes.c_char_p
    library.stub_set(0, 0)
    monkeypatch.setattr(device, "driver", lambda: library)
    dropped = SimpleNamespace(start=lambda: None, add=lambda *_: None)  # no thread asks the stand-ins
    monkeypatch.setattr(dlpack_capsule, "releases", lambda: dropped)
    Event.made = 0
    return library


# the device


@pytest.mark.parametrize(
    ("name", "arch", "warp"),
    [(b"gfx942:sramecc+:xnack-", 0x942, 64), (b"gfx90a:sramecc+:xnack+", 0x90A, 64), (b"gfx1201", 0x1201, 32)],
)
def test_the_target_is_read_from_the_properties(cupy, monkeypatch, name, arch, warp):
    monkeypatch.setitem(PROPERTIES, "gcnArchName", name)
    monkeypatch.setitem(PROPERTIES, "warpSize", warp)
    assert device.target(1) == Target("hip", arch, 1, 304, warp, 65536)


def test_the_library_that_cupy_loaded_comes_first(cupy, monkeypatch):
    tried = []

    def load(name):
        tried.append(name)
        if name != "libamdhip64.so":
            raise OSError(f"{name}: cannot open shared object file")
        return name

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert device.driver() == "libamdhip64.so"
    assert tried == ["libamdhip64.so.7", "libamdhip64.so"]


# compiling


@pytest.mark.parametrize("target", HIP, ids=lambda target: f"gfx{target.arch:x}")
def test_options_name_the_architecture_without_features(target):
    options = jit.standard_options(target)
    assert [option for option in options if "arch" in option] == [f"--offload-arch=gfx{target.arch:x}"]
    assert not any(word in option for option in options for word in ("-arch=sm", "-ftz", "-fmad", "-default-device"))


@pytest.mark.parametrize("target", HIP, ids=lambda target: f"gfx{target.arch:x}")
def test_options_are_clangs(target):
    """hipRTC hands its options to clang's driver: one that is unknown there, or of no effect, is an error here."""
    if compilers.CLANG is None:
        pytest.skip("clang-22 (Debian: clang-22 lld-22) is not installed")
    request = jit.compile_request(target, "gemm/clear_amax", "clear_amax", {})
    fixed = ("-x", "hip", "--offload-device-only", "-nogpuinc", "-nogpulib", "-Werror", "-S", "-o", "-", "-")
    done = subprocess.run(
        (compilers.CLANG, *request.options, *fixed), input=request.text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"amdgcn-amd-amdhsa-unknown-gfx{target.arch:x}" in done.stdout or f"--gfx{target.arch:x}" in done.stdout
    assert ".amdhsa_float_denorm_mode_32 0" in done.stdout
    assert ".amdhsa_float_denorm_mode_16_64 3" in done.stdout


def test_the_compiler_is_given_the_request_and_nothing_else(cupy):
    request = jit.compile_request(MI300, "gemm/clear_amax", "clear_amax", {"FP8_THING": 3})
    code = compiler.compile_text(request.text, request.options, "clear_amax")
    assert code == b"\x7fELF of clear_amax"
    assert cupy.cuda.nvrtc.seen == [(request.text, "clear_amax", request.options)]
    assert {"--offload-arch=gfx942", "-DFP8_THING=3", "-DFP8CORE_WARP=64"} <= set(request.options)


def test_the_cache_tells_architectures_and_compilers_apart(cupy, monkeypatch, tmp_path):
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_placed", lambda code, name, where: code)

    def kept():
        device.target.cache_clear()
        compiler.version.cache_clear()
        compiler.Modules().load("text", jit.standard_options(device.target(0)))
        return len(list(tmp_path.iterdir()))

    assert (kept(), kept()) == (1, 1)
    monkeypatch.setitem(PROPERTIES, "gcnArchName", b"gfx942:sramecc+:xnack+")
    assert kept() == 1, "code of an architecture without features is good with all of them"
    monkeypatch.setitem(PROPERTIES, "gcnArchName", b"gfx950:sramecc+:xnack-")
    assert kept() == 2
    monkeypatch.setattr(cupy.cuda.runtime, "runtimeGetVersion", lambda: 70151831)
    assert kept() == 3


# launching


class PifArgs(NamedTuple):
    places: Pointer
    count: Int32
    factor: Float32


def launcher(signature="Pif", attributes=b""):
    return jit.Launcher(MI300, compiler.Function(0xABC0, None), "entry", signature, (256, 1, 1), 4096, attributes)


def test_a_launch_has_the_layout_of_the_driver(rocm):
    launcher()(0x7000, (70_000, 2, 3), 0x1234, -5, 0.25)
    assert rocm.stub_log() == (
        b"kernel 0xabc0 grid 70000 2 3 block 256 1 1 shared 4096 stream 0x7000 parameters 0x1234 -5 0.25 extra (nil)\n"
    )


def test_a_bound_launch_is_the_same_launch_each_time(rocm):
    bound = launcher().bind((70_000, 2, 3), -5, 0.25)
    for stream in (0x7000, 0x8000, 0x7000):
        bound(stream, 0x1234)
        launcher()(stream, (70_000, 2, 3), 0x1234, -5, 0.25)
    lines = rocm.stub_log().splitlines()
    assert len(lines) == 6
    assert lines[0::2] == lines[1::2]
    assert lines[0] == lines[4] != lines[2]


def test_arguments_lie_where_their_kinds_want_them():
    text, offsets, end = jit.lay_out(["i", "P", "128s", "512i", "q"], 56)
    assert (offsets, end) == ((56, 64, 128, 256, 2304), 2312)
    assert struct.calcsize(text) == end - 56


def test_a_resident_grid_is_asked_for_as_cooperative(rocm, monkeypatch):
    monkeypatch.setattr(jit, "_function", lambda *arguments: compiler.Function(0xABC0, None))
    options = {"block": 64, "cooperative": True, "programmatic": True}
    jit.prepare(MI300, "source", "entry", {}, PifArgs, **options)(0, (8, 1, 1), 0, 0, 0.0)
    assert rocm.stub_log().endswith(b" attribute 2 1\n")
    assert rocm.stub_log().count(b"attribute") == 1, "programmatic launches are CUDA's"


def test_a_refused_launch_names_the_status(rocm):
    rocm.stub_set(98, 0)
    with pytest.raises(BackendError, match=r"launching entry .* on gfx942 .*hipErrorInvalidDeviceFunction \(98\)"):
        launcher()(0, (1, 1, 1), 0, 0, 0.0)


def test_rocm_6_is_refused_by_name(rocm, libraries, monkeypatch):
    monkeypatch.setattr(device, "driver", lambda: libraries["6"])
    with pytest.raises(BackendError, match="no hipDrvLaunchKernelEx: ROCm 7 or later is needed"):
        launcher()


# streams


@pytest.mark.parametrize(("state", "captured"), [(0, False), (1, True), (2, True)])
def test_whether_a_stream_is_captured_is_asked_of_the_driver(rocm, state, captured):
    rocm.stub_set(0, state)
    assert device.capturing(0x7000) is captured
    assert rocm.stub_log() == b"capturing 0x7000\n"


def test_streams_wait_for_each_other_unless_they_are_captured(rocm):
    device.join(0x7000, 0x8000, 0)
    assert Event.made == 1
    assert device.event_query(0x7000, 0)() is True
    rocm.stub_set(0, 1)
    Event.made = 0
    device.join(0x7000, 0, 0)
    device.join(0, 0x7000, 0)
    assert device.event_query(0x7000, 0) is None
    assert Event.made == 0


class Tensor:
    """A DLPack exporter on a ROCm device that keeps to the protocol's rules for streams."""

    def __init__(self, kind=dlpack.ROCM, versioned=True):
        self.kind, self.versioned, self.streams = kind, versioned, []
        self.array = np.arange(12, dtype=np.float32).reshape(3, 4)

    def __dlpack_device__(self):
        return self.kind, 1

    def __dlpack__(self, *, stream=None, **options):
        if self.kind == dlpack.ROCM and stream in (1, 2):
            raise ValueError(f"stream {stream} is not allowed on ROCm")
        if options and not self.versioned:
            raise TypeError("max_version")
        self.streams.append(stream)
        capsule = self.array.__dlpack__(**options)
        tensor = dlpack.managed(capsule).tensor
        tensor.device_type, tensor.device_id = self.kind, 1
        return capsule


@pytest.mark.parametrize("versioned", [True, False])
def test_a_rocm_tensor_is_seen_on_its_device(rocm, versioned):
    x = Tensor(versioned=versioned)
    seen = interop.view(x, "x")
    assert (seen.pointer, seen.shape, seen.target.platform, seen.target.device) == (
        x.array.ctypes.data,
        (3, 4),
        "hip",
        1,
    )
    assert x.streams == [0], "the default stream is 0 on ROCm"
    assert interop.stream_of(seen, 0x7000) == 0x7000
    assert x.streams == [0, 0x7000]


def test_pinned_memory_of_rocm_is_the_hosts(rocm):
    x = Tensor(dlpack.ROCM_HOST)
    assert interop.view(x, "x").target.platform == "host"
    assert x.streams == [None]


def test_streams_by_number_are_rocms(rocm):
    assert dlpack_capsule.in_protocol(0, MI300) == 0
    assert dlpack_capsule.in_protocol(1, MI300) == 0
    assert dlpack_capsule.in_protocol(0x7000, MI300) == 0x7000
    seen = interop.view(Tensor(), "x")
    with pytest.raises(DeviceError, match="per-thread default stream"):
        interop.stream_of(seen, 2)
    cuda = Target("cuda", 90, 0, 132, 32, 0)
    assert [dlpack_capsule.in_protocol(number, cuda) for number in (0, 1, 2, 0x7000)] == [1, 1, 2, 0x7000]


def test_results_of_the_exchange_table_are_on_rocm():
    assert dlpack_exchange._kind(MI300) == dlpack.ROCM == 10
    assert dlpack.ROCM_HOST == 11
