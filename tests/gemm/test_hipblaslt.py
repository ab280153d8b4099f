"""What hipBLASLt has of its own: handles for streams, captures, and where it lies."""

import threading

import pytest

from fp8core.errors import BackendError
from fp8core.kernels.gemm.blaslt import handles, library, matmul, places, query
from fp8core.kernels.gemm.blaslt.dialects import HIPBLASLT
from fp8core.kernels.gemm.blaslt.mapping import product
from fp8core.runtime import device, loaded
from support.blaslt_fixtures import built, hip_stub  # noqa: F401
from support.blaslt_tools import forget, pretend, problem
from support.hip_launches import ONE, OURS, THREE, TWO, launches, multiply
from support.targets import MI300, MI350

# handles


def test_streams_never_share_a_handle(hip_stub):
    """One handle for two streams: the second launch fails here, and its blocks would wait forever on a GPU."""
    launch = matmul.plan(OURS)
    for stream in (ONE, TWO, 0, ONE, TWO, 1):
        multiply(launch, stream)
    used = dict(reversed(pair) for pair in launches(hip_stub))
    assert set(used) == {ONE, TWO, 0}
    assert len(set(used.values())) == 3
    assert not [line for line in hip_stub.lines("Matmul") if "SHARED" in line]


def test_all_plans_use_the_same_handle_for_a_stream(hip_stub):
    for m in (16, 32, 48):
        multiply(matmul.plan(product(problem(target=MI300, m=m))), ONE)
    assert len({handle for handle, _ in launches(hip_stub)}) == 1
    assert len(hip_stub.lines("Create")) == 3, "that of the device, of the stream, and a spare one"


def test_devices_have_handles_of_their_own(built, monkeypatch):
    both = MI300, MI300._replace(device=1)
    pretend(monkeypatch, built["hip"], both)
    for target in both:
        multiply(matmul.plan(product(problem(target=target))), ONE)
        built["hip"].idle(ONE)
    assert len(set(launches(built["hip"]))) == 2
    forget()


def test_threads_have_handles_for_their_own_default_streams(hip_stub):
    launch = matmul.plan(OURS)
    threads = [threading.Thread(target=multiply, args=(launch, device.PER_THREAD)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {stream for _, stream in launches(hip_stub)} == {device.PER_THREAD}
    known = library.find("hip").handles._of_stream[0]
    assert {stream for stream, _ in known} == {device.PER_THREAD}
    assert len(set(known.values())) == len(known) == len({thread for _, thread in known})


def test_a_captured_stream_takes_the_spare_handle(hip_stub):
    """As that of torch.cuda.graph, which is another than the one that was warmed up."""
    launch = matmul.plan(OURS)
    multiply(launch, ONE)
    made = len(hip_stub.lines("Create"))
    hip_stub.capturing(1)
    hip_stub.captured.add(TWO)
    multiply(launch, TWO)
    assert len(hip_stub.lines("Create")) == made
    assert launches(hip_stub)[-1][0] != launches(hip_stub)[0][0]
    with pytest.raises(
        BackendError,
        match=r"hipBLASLt needs a handle for each stream, made while it is not captured: "
        r"multiply once on stream 0x9000 before capturing it",
    ):
        hip_stub.captured.add(THREE)
        multiply(launch, THREE)
    hip_stub.capturing(0)
    hip_stub.captured.clear()
    multiply(launch, THREE)
    assert not [line for line in hip_stub.lines("Matmul") if "SHARED" in line]


def test_a_plan_that_is_made_while_another_thread_captures_may_make_handles(hip_stub):
    matmul.plan(OURS)
    hip_stub.capturing(1)
    multiply(matmul.plan(product(problem(target=MI300, m=32))), ONE)
    assert launches(hip_stub)[-1][1] == ONE


def test_handles_are_bounded_in_words(hip_stub, monkeypatch):
    monkeypatch.setattr(handles, "MOST_STREAMS", 3)
    launch = matmul.plan(OURS)
    for stream in range(0x1000, 0x4000, 0x1000):
        multiply(launch, stream)
    with pytest.raises(BackendError, match="needs a handle for each stream, got more than 3 streams of device 0"):
        multiply(launch, 0x4000)
    multiply(launch, 0x1000)
    assert len(hip_stub.lines("Create")) == 5


def test_a_handle_that_cannot_be_made_is_named_and_asked_for_again(hip_stub):
    launch = matmul.plan(OURS)
    multiply(launch, ONE)
    hip_stub.fail("Create", 2)
    with pytest.raises(BackendError, match=r"hipblasLtCreate: HIPBLAS_STATUS_ALLOC_FAILED \(2\) for device 0"):
        multiply(launch, TWO)
    assert hip_stub.drained
    hip_stub.fail("", 0)
    multiply(launch, TWO)
    assert launches(hip_stub)[-1][1] == TWO


# the result's type


@pytest.mark.parametrize(
    ("target", "out", "number"),
    [(MI350, "float8_e4m3fn", 28), (MI350, "float8_e5m2", 29), (MI300, "float8_e5m2fnuz", 1001)],
)
def test_c_is_described_as_the_result(built, monkeypatch, target, out, number):
    """Tensile has kernels for C and D of one type alone: with C in bfloat16 nothing would be offered."""
    stub = built["hip"]
    pretend(monkeypatch, stub, (target,))
    p = problem(target=target, a=None, b=None, out=out, out_scale=True)
    e4m3 = "float8_e4m3fnuz" if target == MI300 else "float8_e4m3fn"
    p = p._replace(a=e4m3, b=e4m3)
    assert query.refusal(product(p)) is None
    multiply(matmul.plan(product(p)), ONE)
    assert f"MatrixLayoutCreate l3 {number} 256 64 256" in stub.lines()
    line = stub.lines("Matmul")[-1]
    assert " C=5000 l6 D=5000 l6 " in line
    forget()


# where it lies


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """Let the process have mapped the HIP runtimes at the paths that are given, below a folder; return the folder."""

    def mapped(*paths):
        lines = [f"7f{i:04x}0-7f{i:04x}f r-xp 00000000 08:01 {i} {tmp_path / path}" for i, path in enumerate(paths)]
        (tmp_path / "maps").write_text("\n".join(lines))
        monkeypatch.setattr(loaded, "MAPS", tmp_path / "maps")
        monkeypatch.setattr(places, "is_loaded", lambda name: name == "libamdhip64.so.7" and bool(paths))
        for path in paths:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).touch()
        return tmp_path

    return mapped


def there(folder, *paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()


def test_the_library_is_that_of_the_mapped_runtime(runtime, monkeypatch):
    """With a torch that is installed and not imported: its library would bring a second runtime."""
    folder = runtime("rocm-7.0/lib/libamdhip64.so.7.0.70000")
    there(folder, "rocm-7.0/lib/libhipblaslt.so.1", "site/torch/lib/libhipblaslt.so", "rocm-6/lib/libhipblaslt.so.0")
    monkeypatch.setattr("sys.path", [str(folder / "site")])
    monkeypatch.setenv("ROCM_PATH", str(folder / "rocm-6"))
    assert list(places.candidates(HIPBLASLT)) == [str(folder / "rocm-7.0/lib/libhipblaslt.so.1"), "libhipblaslt.so.1"]


def test_the_library_of_torch_is_taken_where_its_runtime_is_mapped(runtime):
    folder = runtime("site/torch/lib/libamdhip64.so")
    there(folder, "site/torch/lib/libhipblaslt.so", "rocm/lib/libhipblaslt.so.1")
    assert next(places.candidates(HIPBLASLT)) == str(folder / "site/torch/lib/libhipblaslt.so")


def test_wheels_of_therock_have_it_in_a_folder_beside(runtime):
    folder = runtime("site/_rocm_sdk_core/lib/libamdhip64.so.7")
    there(folder, "site/_rocm_sdk_libraries_gfx94X_dcgpu/lib/libhipblaslt.so.1")
    found = str(folder / "site/_rocm_sdk_libraries_gfx94X_dcgpu/lib/libhipblaslt.so.1")
    assert next(places.candidates(HIPBLASLT)) == found


def test_a_link_to_the_runtime_is_followed(runtime):
    folder = runtime("opt/rocm-7.1/lib/libamdhip64.so.7")
    there(folder, "opt/rocm-7.1/lib/libhipblaslt.so.1")
    (folder / "usr").symlink_to(folder / "opt/rocm-7.1")
    runtime("usr/lib/libamdhip64.so.7")
    assert str(folder / "opt/rocm-7.1/lib/libhipblaslt.so.1") in list(places.candidates(HIPBLASLT))


def test_without_a_library_beside_the_runtime_it_is_said_where_it_was_looked_for(runtime, monkeypatch):
    runtime("rocm-7.0/lib/libamdhip64.so.7")
    monkeypatch.setattr(places, "is_loaded", lambda name: False)
    forget()
    assert library.find("hip") == "hipBLASLt was not found beside the HIP runtime that is loaded"
    forget()


def test_with_two_runtimes_it_is_not_used(runtime, built):
    folder = runtime("rocm/lib/libamdhip64.so.7", "site/torch/lib/libamdhip64.so")
    forget()
    answer = library.find("hip")
    assert answer.startswith("hipBLASLt is not used: a process needs one HIP runtime, got 2: ")
    assert str(folder / "site/torch/lib/libamdhip64.so") in answer
    forget()


def test_a_library_that_brings_a_second_runtime_is_not_used(runtime, built, monkeypatch):
    """Known only when it is loaded: its folder had another runtime beside it."""
    runtime("one/libamdhip64.so.7")

    def brings(dialect):
        runtime("one/libamdhip64.so.7", "two/libamdhip64.so")
        yield str(built["hip"].path)

    monkeypatch.setattr(library, "candidates", brings)
    forget()
    assert library.find("hip").startswith("hipBLASLt is not used: a process needs one HIP runtime, got 2")
    forget()
