"""ROCm below interop, without an AMD GPU: devices, compiling and launching."""

import ctypes
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8core.errors import BackendError, UnsupportedProblemError
from fp8core.kernels.quantize import QUANTIZE
from fp8core.problem import PER_TENSOR, Quantize
from fp8core.runtime import compiler, device, jit, launches, loaded, streams
from fp8core.runtime.plans import QuantizeNumbers
from fp8core.target import Target
from support import compilers
from support.rocm import HIP, PROPERTIES, PifArgs, cupy, launcher, libraries, rocm  # noqa: F401
from support.targets import H200, MI300

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


def test_the_library_that_is_mapped_is_the_only_one_that_is_tried(cupy, monkeypatch):
    """Streams and kernels of one copy are not valid in another."""
    tried = []
    monkeypatch.setattr(loaded, "hip_runtime", lambda: Path("/wheel/lib/libamdhip64.so.7"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: tried.append(name) or name)
    assert device.driver() == "/wheel/lib/libamdhip64.so.7"
    assert tried == ["/wheel/lib/libamdhip64.so.7"]


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


def test_a_launch_has_the_layout_of_the_driver(rocm):
    launcher().bind((70_000, 2, 3), -5, 0.25)(0x7000, 0x1234)
    assert rocm.stub_log() == (
        b"plain: kernel 0xabc0 grid 70000 2 3 block 256 1 1 shared 4096 stream 0x7000 parameters 0x1234 -5 0.25\n"
    )


def test_a_bound_launch_is_the_same_launch_each_time(rocm):
    bound = launcher().bind((70_000, 2, 3), -5, 0.25)
    for stream in (0x7000, 0x8000, 0x7000):
        bound(stream, 0x1234)
        launcher().bind((70_000, 2, 3), -5, 0.25)(stream, 0x1234)
    lines = rocm.stub_log().splitlines()
    assert len(lines) == 6
    assert lines[0::2] == lines[1::2]
    assert lines[0] == lines[4] != lines[2]


def test_arguments_lie_where_their_kinds_want_them():
    text, offsets, end = launches.lay_out(["i", "P", "128s", "512i", "q"], 56)
    assert (offsets, end) == ((56, 64, 128, 256, 2304), 2312)
    assert struct.calcsize(text) == end - 56


def prepared(monkeypatch, **options):
    monkeypatch.setattr(jit, "_function", lambda *arguments: compiler.Function(0xABC0, None))
    return jit.prepare(MI300, "source", "entry", {}, PifArgs, block=64, **options)


def test_a_resident_grid_is_asked_for_by_its_own_entry_point(rocm, monkeypatch):
    prepared(monkeypatch, cooperative=True, programmatic=True).bind((8, 1, 1), 0, 0.0)(0, 0x1234)
    assert rocm.stub_log() == (
        b"cooperative: kernel 0xabc0 grid 8 1 1 block 64 1 1 shared 0 stream (nil) parameters 0x1234 0 0\n"
    )


def test_a_launch_is_in_the_graph_of_a_captured_stream(rocm):
    rocm.stub_set(0, 1)
    launcher().bind((1, 1, 1), -5, 0.25)(0x7000, 0x1234)
    assert rocm.stub_log().endswith(b" recorded\n")


@pytest.mark.parametrize(
    ("stream", "state", "captured"), [(0, 1, False), (1, 1, False), (2, 1, True), (0x7000, 2, True)]
)
def test_every_stream_but_the_default_one_may_be_captured(rocm, stream, state, captured):
    """Also that of each thread (2); and a capture that was invalidated (state 2) has to be ended first."""
    rocm.stub_set(0, state)
    assert device.capturing(stream) == captured


def test_a_resident_grid_is_never_put_into_a_captured_stream(rocm, monkeypatch):
    """Not every release records one; `together` of tensorwise launches another kernel then."""
    launch = prepared(monkeypatch, cooperative=True).bind((8, 1, 1), 0, 0.0)
    rocm.stub_set(0, 1)
    with pytest.raises(launches.LaunchError, match="needs a stream that is not captured") as raised:
        launch(0x7000, 0)
    assert raised.value.status in launches.TOO_LARGE
    assert rocm.stub_log() == b"capturing 0x7000\n"
    launch(0, 0)  # the default stream is never captured
    assert b"cooperative" in rocm.stub_log()


def test_a_captured_quantization_per_tensor_is_launched_by_another_row(rocm, monkeypatch):
    ran: list[str] = []
    monkeypatch.setattr(jit, "_function", lambda *arguments: compiler.Function(hash(arguments[2]) & 0xFFF0, arguments))
    problem = Quantize(MI300, "bfloat16", "float8_e4m3fnuz", PER_TENSOR, False, "float32", "k", 4096, 16)
    launch = QUANTIZE.planned(problem, QUANTIZE.choice(problem)).bind(
        QuantizeNumbers(4096, 4096, 0, 0, 4096, 4096, float("inf"), 1e-10)
    )

    def refused(bound, reason, status):
        ran.append(bound._launcher.entry)
        return launches.LaunchError(reason, status)

    monkeypatch.setattr(launches.HipBound, "_refused", refused)
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
        launcher().bind((1, 1, 1), 0, 0.0)(0, 0)


def test_a_failed_call_leaves_no_error_behind_for_others(rocm):
    rocm.stub_set(98, 0)
    with pytest.raises(BackendError):
        launcher().bind((1, 1, 1), 0, 0.0)(0, 0)
    assert rocm.hipPeekAtLastError() == 0
    with pytest.raises(BackendError, match="hipStreamIsCapturing failed with hipErrorInvalidDeviceFunction"):
        device.capturing(0x7000)
    assert rocm.hipPeekAtLastError() == 0
    with pytest.raises(BackendError, match="hipMemsetD32Async failed"):
        streams.fill_float32(0x1000, 1.0, 0, 0)
    assert rocm.hipPeekAtLastError() == 0


@pytest.mark.parametrize(
    ("target", "grid", "text"),
    [
        (MI300, (1 << 24, 1, 1), "gfx942 .* at most 16777215 blocks of 256 threads along x"),  # 2**32 threads
        (MI300, (1, 1, 1 << 16), "gfx942 .* at most 65535 blocks of 256 threads along z"),
        (H200, (1 << 31, 1, 1), "sm_90 .* at most 2147483647 blocks of 256 threads along x"),
        (H200, (1 << 32, 1, 1), "along x"),  # the launch configuration has no room for the number
        (H200, (1, 1 << 16, 1), "along y"),
    ],
)
def test_a_grid_that_no_launch_can_have_is_refused_when_it_is_planned(target, grid, text):
    made = launches.Launcher(target, compiler.Function(0xABC0, None), "entry", "Pif", (256, 1, 1), 0, b"")
    with pytest.raises(UnsupportedProblemError, match=f"entry on .*{text}, got a grid of"):
        made.bind(grid, 0, 0.0)


def test_the_largest_grid_of_hip_is_launched(rocm):
    launcher().bind(((1 << 24) - 1, 1, 1), 0, 0.0)(0, 0)
    assert rocm.stub_log().count(b"plain") == 1


@pytest.mark.parametrize("stream", [0, 1])
def test_the_default_stream_is_0_in_every_release(rocm, stream):
    launcher().bind((1, 1, 1), 0, 0.0)(stream, 0)
    streams.fill_float32(0x1000, 1.0, stream, 0)
    assert rocm.stub_log().count(b"stream (nil)") == 2
    assert device.cupy_stream(stream).ptr == 0


def test_what_rocm_7_brought_is_not_needed(rocm, libraries, monkeypatch):
    older = libraries["6"]
    older.stub_log.restype = ctypes.c_char_p
    older.stub_set(0, 1)
    monkeypatch.setattr(device, "driver", lambda: older)
    launcher().bind((1, 1, 1), 0, 0.0)(0x7000, 0)
    assert older.stub_log().endswith(b" recorded\n")


def test_a_driver_without_launches_is_refused_by_name(rocm, monkeypatch):
    monkeypatch.setattr(device, "driver", dict)
    monkeypatch.setattr(launches, "device", SimpleNamespace(driver=lambda: ctypes.CDLL("libm.so.6")))
    launches._launch_function.cache_clear()
    with pytest.raises(BackendError, match="no hipModuleLaunchKernel: ROCm 5 or later is needed"):
        launches._launch_function("hip")
