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

from fp8core import interop, timing
from fp8core.errors import BackendError, DeviceError
from fp8core.interop import dlpack, dlpack_capsule, dlpack_exchange
from fp8core.kernels.quantize import QUANTIZE
from fp8core.problem import PER_TENSOR, Quantize, Target
from fp8core.runtime import capture, compiler, device, hip_graphs, jit, loaded, partitions, streams
from fp8core.runtime.args import Float32, Int32, Pointer
from fp8core.runtime.plans import QuantizeNumbers
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
    monkeypatch.setattr(loaded, "MAPS", Path("/nowhere"))  # the stand-ins of this process are mapped, too
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


def launcher(signature="Pif", cooperative=False):
    function = compiler.Function(0xABC0, None)
    return jit.Launcher(MI300, function, "entry", signature, (256, 1, 1), 4096, b"", cooperative)


def test_a_launch_has_the_layout_of_the_driver(rocm):
    launcher()(0x7000, (70_000, 2, 3), 0x1234, -5, 0.25)
    assert rocm.stub_log() == (
        b"plain: kernel 0xabc0 grid 70000 2 3 block 256 1 1 shared 4096 stream 0x7000 parameters 0x1234 -5 0.25\n"
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


def prepared(monkeypatch, **options):
    monkeypatch.setattr(jit, "_function", lambda *arguments: compiler.Function(0xABC0, None))
    return jit.prepare(MI300, "source", "entry", {}, PifArgs, block=64, **options)


def test_a_resident_grid_is_asked_for_by_its_own_entry_point(rocm, monkeypatch):
    prepared(monkeypatch, cooperative=True, programmatic=True)(0, (8, 1, 1), 0x1234, 0, 0.0)
    assert rocm.stub_log() == (
        b"cooperative: kernel 0xabc0 grid 8 1 1 block 64 1 1 shared 0 stream (nil) parameters 0x1234 0 0\n"
    )


def test_a_launch_is_in_the_graph_of_a_captured_stream(rocm):
    rocm.stub_set(0, 1)
    launcher()(0x7000, (1, 1, 1), 0x1234, -5, 0.25)
    assert rocm.stub_log().endswith(b" recorded\n")


def test_a_resident_grid_is_never_put_into_a_captured_stream(rocm, monkeypatch):
    """Not every release records one; `together` of tensorwise launches another kernel then."""
    launch = prepared(monkeypatch, cooperative=True)
    rocm.stub_set(0, 1)
    with pytest.raises(partitions.LaunchError, match="needs a stream that is not captured") as raised:
        launch(0x7000, (8, 1, 1), 0, 0, 0.0)
    assert raised.value.status in partitions.TOO_LARGE
    assert rocm.stub_log() == b"capturing 0x7000\n"
    launch(0, (8, 1, 1), 0, 0, 0.0)  # the default stream is never captured
    assert b"cooperative" in rocm.stub_log()


def test_a_captured_quantization_per_tensor_is_launched_by_another_row(rocm, monkeypatch):
    ran: list[str] = []
    monkeypatch.setattr(jit, "_function", lambda *arguments: compiler.Function(hash(arguments[2]) & 0xFFF0, arguments))
    problem = Quantize(MI300, "bfloat16", "float8_e4m3fnuz", PER_TENSOR, False, "float32", "k", 4096, 16)
    launch = QUANTIZE.planned(problem, QUANTIZE.choice(problem)).bind(
        QuantizeNumbers(4096, 4096, 0, 0, 4096, 4096, float("inf"), 1e-10)
    )

    def refused(bound, _grid, reason, status):
        ran.append(bound._launcher.entry)
        return partitions.LaunchError(reason, status)

    monkeypatch.setattr(jit.HipBound, "_refused", refused)
    for captured in (0, 1):
        rocm.stub_set(0, captured)
        launch(0x7000, 0x1000, 0x2000, 0x3000, 0)
        kinds = [line.split(b":")[0] for line in rocm.stub_log().splitlines() if b"kernel" in line]
        assert kinds == ([b"plain"] if captured else [b"cooperative"])
    assert rocm.stub_log().endswith(b" recorded\n")
    assert ran == ["quantize_tensorwise"]


def test_a_refused_launch_names_the_status(rocm):
    rocm.stub_set(98, 0)
    with pytest.raises(BackendError, match=r"launching entry .* on gfx942 .*hipErrorInvalidDeviceFunction \(98\)"):
        launcher()(0, (1, 1, 1), 0, 0, 0.0)


def test_a_failed_call_leaves_no_error_behind_for_others(rocm):
    rocm.stub_set(98, 0)
    with pytest.raises(BackendError):
        launcher()(0, (1, 1, 1), 0, 0, 0.0)
    assert rocm.hipPeekAtLastError() == 0
    with pytest.raises(BackendError, match="hipStreamIsCapturing failed with hipErrorInvalidDeviceFunction"):
        device.capturing(0x7000)
    assert rocm.hipPeekAtLastError() == 0
    with pytest.raises(BackendError, match="hipMemsetD32Async failed"):
        streams.fill_float32(0x1000, 1.0, 0, 0)
    assert rocm.hipPeekAtLastError() == 0


def test_a_grid_that_hip_cannot_have_is_refused_in_words(rocm):
    """256 threads a block: 2**24 blocks are one thread too many for 32 bits."""
    launcher()(0, ((1 << 24) - 1, 1, 1), 0, 0, 0.0)
    text = r"grid \(16777216, 1, 1\) on gfx942 .*: HIP needs at most 4294967295 threads along each axis"
    with pytest.raises(BackendError, match=text):
        launcher()(0, (1 << 24, 1, 1), 0, 0, 0.0)
    with pytest.raises(BackendError, match=text):
        launcher().bind((1 << 24, 1, 1), 0, 0.0)(0, 0)
    assert rocm.stub_log().count(b"plain") == 1
    assert rocm.hipPeekAtLastError() == 0


@pytest.mark.parametrize("stream", [0, 1])
def test_the_default_stream_is_0_in_every_release(rocm, stream):
    launcher()(stream, (1, 1, 1), 0, 0, 0.0)
    streams.fill_float32(0x1000, 1.0, stream, 0)
    assert rocm.stub_log().count(b"stream (nil)") == 2
    assert device.external(stream).ptr == 0


def test_what_rocm_7_brought_is_not_needed(rocm, libraries, monkeypatch):
    older = libraries["6"]
    older.stub_log.restype = ctypes.c_char_p
    older.stub_set(0, 1)
    monkeypatch.setattr(device, "driver", lambda: older)
    launcher()(0x7000, (1, 1, 1), 0, 0, 0.0)
    assert older.stub_log().endswith(b" recorded\n")


def test_a_driver_without_launches_is_refused_by_name(rocm, monkeypatch):
    monkeypatch.setattr(device, "driver", dict)
    monkeypatch.setattr(jit, "device", SimpleNamespace(driver=lambda: ctypes.CDLL("libm.so.6")))
    jit._launch_function.cache_clear()
    with pytest.raises(BackendError, match="no hipModuleLaunchKernel: ROCm 5 or later is needed"):
        jit._launch_function("hip")


# the runtime in the process


def maps(monkeypatch, tmp_path, *paths):
    listing = tmp_path / "maps"
    lines = [f"7f00{i:04x}000-7f00{i:04x}fff r-xp 00000000 08:01 {i} {' ' * 20}{p}" for i, p in enumerate(paths)]
    listing.write_text("\n".join(["7ffc0000-7ffd0000 rw-p 00000000 00:00 0 [stack]", "55-56 rw-p 0 00:00 0", *lines]))
    monkeypatch.setattr(loaded, "MAPS", listing)


def test_the_mapped_runtime_is_the_driver(cupy, libraries, monkeypatch, tmp_path):
    path = libraries["7"]._name
    maps(monkeypatch, tmp_path, "/usr/lib/libc.so.6", path, path, "/opt/rocm/lib/libamdhip64_extra.so")
    assert loaded.hip_runtime() == Path(path)
    assert device.driver()._name == path


def test_two_hip_runtimes_are_refused_in_words(cupy, monkeypatch, tmp_path):
    two = "/opt/rocm-7.0.0/lib/libamdhip64.so.7.0.70000", "/venv/torch/lib/libamdhip64.so"
    maps(monkeypatch, tmp_path, *two)
    with pytest.raises(DeviceError, match=f"a process needs one HIP runtime, got 2: {two[0]}, {two[1]}"):
        device.driver()


def test_a_runtime_that_came_with_torch_later_is_refused_with_its_first_tensor(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    from fp8core.interop import torch_tensors

    target, tensor = object(), SimpleNamespace(is_cuda=True, is_cpu=False, get_device=lambda: 0)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(device, "target", lambda ordinal: target)
    loaded.refuse_second_hip_runtime.cache_clear()
    two = "/opt/rocm-7.0.0/lib/libamdhip64.so.7.0.70000", "/venv/torch/lib/libamdhip64.so"
    maps(monkeypatch, tmp_path, *two)
    for _ in range(2):
        with pytest.raises(DeviceError, match=f"a process needs one HIP runtime, got 2: {two[0]}, {two[1]}"):
            torch_tensors.framework()._target(tensor, "x")
    maps(monkeypatch, tmp_path, two[1])
    assert torch_tensors.framework()._target(tensor, "x") is target
    loaded.refuse_second_hip_runtime.cache_clear()


def test_without_a_list_of_what_is_mapped_the_names_decide(cupy, monkeypatch, tmp_path):
    monkeypatch.setattr(loaded, "MAPS", tmp_path / "absent")
    assert loaded.hip_runtime() is None
    assert loaded.mapped("libm") == ()


def test_what_this_process_has_mapped_is_found():
    ctypes.CDLL("libm.so.6")
    assert len(loaded.mapped("libm")) == 1


# streams


@pytest.mark.parametrize(("state", "captured"), [(0, False), (1, True), (2, True)])
def test_whether_a_stream_is_captured_is_asked_of_the_driver(rocm, state, captured):
    rocm.stub_set(0, state)
    assert device.capturing(0x7000) is captured
    assert rocm.stub_log() == b"capturing 0x7000\n"


def test_streams_wait_for_each_other_unless_they_are_captured(rocm):
    streams.join(0x7000, 0x8000, 0)
    assert Event.made == 1
    assert streams.event_query(0x7000, 0)() is True
    rocm.stub_set(0, 1)
    Event.made = 0
    streams.join(0x7000, 0, 0)
    streams.join(0, 0x7000, 0)
    assert streams.event_query(0x7000, 0) is None
    assert Event.made == 0


def test_events_are_queried_while_others_capture(rocm):
    """As the thread of `releases` does it, which would else fail, and keep for good what it asks about."""
    rocm.stub_set(0, 1)
    assert rocm.hipEventQuery(None) == 900
    before = capture.exchange(capture.RELAXED)
    assert rocm.hipEventQuery(None) == 0
    capture.exchange(before)


# graphs


def test_a_graph_is_captured_instantiated_launched_and_destroyed(rocm):
    launch = launcher()
    graph = hip_graphs.HipGraph(0x7000, lambda: launch(0x7000, (1, 1, 1), 0x1234, 0, 0.0))
    for _ in range(2):
        graph.launch(0x8000)
    del graph
    said = rocm.stub_log().decode().splitlines()
    assert said[0] == "begin 0x7000 2"
    assert said[1].endswith(" recorded")
    assert said[2:] == [
        "end 0x7000",
        "instantiate 0xa000 0",
        "destroy graph 0xa000",
        *["launch 0xb000 0x8000"] * 2,
        "destroy executable 0xb000",
    ]


def test_a_capture_ends_whatever_happens_in_it(rocm):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hip_graphs.HipGraph(0x7000, interrupted)
    assert rocm.stub_log().decode().splitlines() == ["begin 0x7000 2", "end 0x7000", "destroy graph 0xa000"]
    rocm.stub_set(0, 0)
    rocm.stub_fail_to_instantiate(98)
    with pytest.raises(BackendError, match=r"hipGraphInstantiateWithFlags failed with hipErrorInvalidDeviceFunction"):
        hip_graphs.HipGraph(0x7000, lambda: None)
    assert rocm.stub_log().endswith(b"destroy graph 0xa000\n")
    assert rocm.hipPeekAtLastError() == 0


@pytest.mark.parametrize("fails", [False, True])
def test_times_are_of_a_graph_or_of_the_calls_where_there_is_none(rocm, caplog, fails):
    launch = launcher()
    operands = SimpleNamespace(
        weights=range(0x1000, 0x3000, 0x1000), run=lambda run, stream, weight: run(stream, (1, 1, 1), weight, 0, 0.0)
    )
    rocm.stub_fail_to_instantiate(98 if fails else 0)
    run = timing.recorded(operands, launch, SimpleNamespace(ptr=0x7000), timing.CALLS)
    recorded = rocm.stub_log().count(b" recorded")
    assert recorded == timing.CALLS
    run()
    assert rocm.stub_log().count(b"plain") == recorded * (1 + fails)
    assert rocm.stub_log().count(b"launch 0xb000 0x7000") == 1 - fails
    assert ("without a graph" in caplog.text) is fails


@pytest.mark.parametrize(
    ("arch", "mebibytes"), [(0x942, 768), (0x950, 768), (0x90A, 192), (0x1201, 192)], ids=lambda x: f"{x:x}"
)
def test_weights_are_colder_than_the_infinity_cache(arch, mebibytes):
    target = MI300._replace(arch=arch)
    assert timing.cold_bytes(target) == mebibytes << 20
    assert timing.copies_of(target, 16 << 20) * 16 == mebibytes
    assert timing.copies_of(target, 1 << 40) == 2
    assert timing.copies_of(target, 1) == mebibytes // 3


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
