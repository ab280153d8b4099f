"""The emulator itself: right results of right kernels, a report for what a GPU would forgive or hang on."""

import ctypes
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from support import emulation
from support.emulation import EmulationError, Launcher
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401

FULL = "0xffffffffu"


@pytest.fixture
def run(emulator):
    def run(text, *arguments, signature="", grid=1, block=64, shared_bytes=0, warp=32, together=1):
        kernel = emulator.compile(f'#line 1 "test.cu"\nextern "C" __global__ {text}', (), "kernel")
        items = re.findall(r"\d*[a-zA-Z]", signature)
        launcher = Launcher(emulator, kernel, "kernel", items, (block, 1, 1), shared_bytes, warp, together, False)
        launcher(0, (grid, 1, 1), *(a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments))

    return run


@pytest.mark.parametrize("warp", [32, 64])
@pytest.mark.parametrize(
    ("shuffle", "source"),
    [
        ("__shfl_xor(x, 5)", lambda lane, warp: lane ^ 5),
        ("__shfl_down(x, 3)", lambda lane, warp: np.where(lane + 3 < warp, lane + 3, lane)),
        ("__shfl_up(x, 3)", lambda lane, warp: np.where(lane >= 3, lane - 3, lane)),
        ("__shfl(x, 7)", lambda lane, warp: np.full_like(lane, 7)),
        ("__shfl_xor(x, 8, 16)", lambda lane, warp: lane ^ 8),
        ("__shfl_down(x, 1, 8)", lambda lane, warp: np.where(lane % 8 < 7, lane + 1, lane)),
    ],
)
def test_shuffles_move_lanes(run, warp, shuffle, source):
    x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    run(
        f"void kernel(const float* p, float* q) {{ float x = p[threadIdx.x]; q[threadIdx.x] = {shuffle}; }}",
        *(x, y),
        signature="PP",
        block=128,
        warp=warp,
    )
    lane = np.arange(128) % warp
    assert (y == np.arange(128) - lane + source(lane, warp)).all()


@pytest.mark.parametrize(("warp", "word"), [(32, f"__ballot_sync({FULL}, x)"), (64, "__ballot(x)")])
def test_ballots_hold_a_bit_a_lane(run, warp, word):
    y = np.zeros(64, np.uint64)
    run(
        f"void kernel(unsigned long long* q) {{ int x = threadIdx.x % 3 == 0; q[threadIdx.x] = {word}; }}",
        y,
        signature="P",
        warp=warp,
    )
    for thread in range(64):
        first = thread - thread % warp
        assert y[thread] == sum(1 << lane for lane in range(warp) if (first + lane) % 3 == 0)


def test_blocks_and_barriers_reverse_an_array(run):
    x, y = np.arange(5 * 96, dtype=np.int32), np.zeros(5 * 96, np.int32)
    run(
        """void kernel(const int* p, int* q) {
          __shared__ int kept[96];
          extern __shared__ int more[];
          kept[threadIdx.x] = p[blockIdx.x * blockDim.x + threadIdx.x];
          __syncthreads();
          more[threadIdx.x] = kept[95 - threadIdx.x];
          __syncthreads();
          q[(gridDim.x - 1 - blockIdx.x) * 96 + threadIdx.x] = more[threadIdx.x];
        }""",
        *(x, y),
        signature="PP",
        grid=5,
        block=96,
        shared_bytes=96 * 4,
    )
    assert (y == x[::-1]).all()


def test_structures_go_by_value(run):
    y = np.zeros(1, np.int64)
    run(
        "void kernel(int4 widths, float f, long long n, long long* q) { *q = widths.w + n + (int)f; }",
        *(1, 2, 3, 4, 2.5, 1 << 40, y),
        signature="4ifqP",
        block=1,
    )
    assert y[0] == 4 + 2 + (1 << 40)


def test_a_signature_that_is_not_the_kernel_s_is_refused(run):
    with pytest.raises(EmulationError, match="the arguments P i mean"):
        run("void kernel(float* p, float x) {}", 0, 1, signature="Pi")


def test_a_grid_barrier_spins_to_its_end(run):
    count, y = np.zeros(1, np.uint32), np.zeros(8, np.uint32)
    run(
        """void kernel(unsigned* count, unsigned* q) {
          __shared__ unsigned seen;
          if (threadIdx.x == 0) {
            atomicAdd(count, 1u);
            while (atomicAdd(count, 0u) < gridDim.x) {}
            seen = *count + blockIdx.x;
          }
          __syncthreads();
          if (threadIdx.x == 40) q[blockIdx.x] = seen;
        }""",
        *(count, y),
        signature="PP",
        grid=8,
        together=0,
    )
    assert (y == 8 + np.arange(8)).all()


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("if (threadIdx.x < 40) __syncthreads(); else __syncwarp();", "deadlock|returned while"),
        ("if (threadIdx.x < 8) return; __syncthreads();", "8 threads of the block returned before this barrier"),
        (
            "if (threadIdx.x == 3) __syncthreads(); else __shfl_xor_sync(0xffffffffu, 1, 1);",
            "returned while threads of its block wait at a barrier",
        ),
        ("if (threadIdx.x < 5) __shfl_xor_sync(0xffffffffu, 1, 1);", "returned while lanes 0x1f"),
        ("if (threadIdx.x != 5) __shfl_xor_sync(0xffffffdfu, 1, 1);", "lane 4 reads from lane 5, which takes no part"),
        ("if (threadIdx.x == 5) __ballot_sync(0xfu, 1);", "lane 5 is not in its own mask 0xf"),
        ("__shared__ int a[64]; a[threadIdx.x + 1] = 1;", r"undefined behaviour \(out_of_bounds\)\n  at test.cu:1"),
        (
            "__shared__ int a[64]; int* b = a; b[threadIdx.x + 1] = 1;",
            "write of 4 bytes at byte 256 of shared a, which has 256",
        ),
        (
            "extern __shared__ int a[]; a[threadIdx.x] = 1;",
            "write of 4 bytes at byte 128 of dynamic shared memory, which has 128",
        ),
        (
            "__shared__ int a[64]; if (threadIdx.x < 9) a[threadIdx.x] = 1; q[0] = a[9];",
            "read of shared a at byte 36, which nobody wrote",
        ),
        (
            "__shared__ long long a; if (threadIdx.x == 0) *(int*)&a = 1; q[0] = a;",
            "read of shared a at byte 4, which nobody wrote",
        ),
        ("__shared__ int a; if (threadIdx.x == 0) a = 1; q[0] = a;", "race on shared a at byte 0: reads"),
        ("__shared__ int a; a = threadIdx.x;", "race on shared a: two threads write different values"),
        (
            "__shared__ int a; if (threadIdx.x == 0) a = 1; __syncthreads(); if (threadIdx.x == 5) a = 2; else q[0] = a;",
            "race on shared a at byte 0: overwrites what another thread read",
        ),
        ("q[threadIdx.x + 1] = 1;", "write of 4 bytes at byte 256 of argument array 1, which has 256"),
        ("q[0] = p[-1];", "read of 4 bytes at"),
        ("p[3] = 1;", "write to byte 12 of argument array 0, which is an input"),
        ("*(int2*)(q + 1) = make_int2(1, 1);", r"undefined behaviour \(type_mismatch_v1\)\n  at test.cu:1"),
        ("atomicAdd(q, 1); while (atomicAdd(q, 0) < 100) __nanosleep(1);", "nothing moves any more"),
    ],
)
def test_what_is_wrong_is_reported(run, emulator, text, report):
    with emulator.watch() as memory, pytest.raises(EmulationError, match=report) as caught:
        p, q = memory.array(np.zeros(64, np.int32)), memory.empty((64,), np.int32)
        run(f"void kernel(int* p, int* q) {{ {text} }}", p, q, signature="PP", shared_bytes=128)
    if "returned while" not in str(caught.value):
        assert "test.cu:1" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "__shared__ int a; if (threadIdx.x == 0) a = 0; __syncthreads(); a = 1; __syncthreads(); q[threadIdx.x] = a;",
        "__shared__ int a[2]; const int t = threadIdx.x; if (t % 32 == 0) a[t / 32] = 1; __syncwarp(); q[t] = a[t / 32];",
        "__shared__ int a; int t = threadIdx.x; if (!t) a = 0; __syncthreads(); atomicMax(&a, t / 63); __syncthreads(); q[t] = a;",
        "if (threadIdx.x >= 32) return; q[threadIdx.x] = q[threadIdx.x + 32] = __shfl_sync(0xffffffffu, 1, 3);",
    ],
)
def test_what_is_right_passes(run, emulator, text):
    with emulator.watch() as memory:
        q = memory.empty((64,), np.int32)
        run(f"void kernel(int* q) {{ {text} }}", q, signature="P")
    assert (q == 1).all()


def test_guards_notice_a_write_of_the_host(emulator):
    with pytest.raises(AssertionError, match="after an array"), emulator.watch() as memory:
        x = memory.empty((3,), np.float32)
        ctypes.memset(x.ctypes.data + 12, 0, 1)


def test_subnormals_are_flushed_as_the_options_say(emulator):
    text = 'extern "C" __global__ void kernel(float* p) { p[0] = p[0] * p[1]; }'
    kernel = emulator.compile(text, (), "kernel")
    for flush, want in ((True, 0.0), (False, 2.0**-130)):
        x = np.array([2.0**-130, 1], np.float32)
        Launcher(emulator, kernel, "kernel", "P", (1, 1, 1), 0, 32, 1, flush)(0, (1, 1, 1), x.ctypes.data)
        assert x[0] == np.float32(want)


def test_text_that_is_no_kernel_says_what_the_compiler_said(emulator):
    with pytest.raises(EmulationError, match="nonsense"):
        emulator.compile('extern "C" __global__ void kernel() { nonsense; }', (), "kernel")


def test_the_emulated_grid_is_one_that_a_device_takes(run):
    with pytest.raises(EmulationError, match="no device takes the grid"):
        run("void kernel() {}", grid=0)
    assert emulation.CUDA.warp == 32


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_compiled_is_kept_where_pytest_keeps_things(tmp_path, kept):
    (tmp_path / "test_folder.py").write_text(
        textwrap.dedent("""
            from support.kept import kept_folder

            def test(request):
                (kept_folder(request, "binaries") / "made").touch()
        """)
    )
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *(() if kept else ("-p", "no:cacheprovider")),
        f"--rootdir={tmp_path}",
    ]
    options = ["-o", f"pythonpath={Path(emulation.__file__).parents[2]}", f"--basetemp={tmp_path / 'temporary'}"]
    run = subprocess.run([*line, *options, tmp_path], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    (made,) = tmp_path.rglob("made")
    assert (".pytest_cache" in made.parts) == kept
