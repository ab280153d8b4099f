"""What the emulation says of mbarriers, named barriers, TMA, cp.async and wgmma that are used wrongly."""

import numpy as np
import pytest

from support.emulation import EmulationError, Launcher, Schedule
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.hopper import encode_map, hopper_text

RIGHT = """
    if (t == 0) load(at, full);
    barrier_wait(full, 0);
    if (t < 128) {
        float sums[8] = {};
        multiply(sums, at);
        wgmma_wait<0>();
        for (int i = t; i < 2048; i += 128) put(at + 8192, i, sums[0]);
        accesses_fence();
        threads_sync(1, 128);
        if (t == 0) {
            store(at + 8192);
            stores_read<0>();
        }
    }
"""
WRONG = {
    "reads shared dynamic memory at byte 1008, into which a copy is under way": "if (t == 0) load(at, full), get(at, 0);",
    "the block ends before this copy into its shared memory is awaited": "if (t == 0) load(at, full);",
    "race on shared dynamic memory at byte 1008: reads what another thread wrote": """
        if (t == 0) load(at, full), barrier_wait(full, 0);
        if (t == 32) { while (!barrier_passed(full, 0)) pause(); get(at, 0); }""",
    "TMA counts at an mbarrier whose initialization was not fenced": """
        if (t == 0) { barrier_init(full + 24, 1); load(at, full + 24); }""",
    "no mbarrier was initialized at": "if (t == 0) barrier_arrive(full + 24);",
    "an mbarrier is initialized where there is one": "if (t == 0) barrier_init(full, 1);",
    "reads shared barriers at byte 8, an mbarrier's": "if (t == 0) q[0] = *(float*)(barriers + 1);",
    "more arrive at an mbarrier than the 1 that it awaits": """
        if (t == 0) { barrier_expect(full, 8); barrier_arrive(full); }""",
    "an mbarrier completes two phases while thread 64 of its block waits for the first": """
        if (t < 32) threads_sync(2, 64);
        if (t / 32 == 2) threads_arrive(2, 64);
        if (t == 64) barrier_wait(full, 0);
        if (t == 0) { barrier_arrive(full); barrier_arrive(full); }""",
    "an mbarrier awaits 1048576 bytes, more than it can count": "if (t == 0) barrier_expect(full, 1 << 20);",
    "copies over what another thread read since the last barrier": """
        if (t == 0) load(at, full);
        if (t == 32) { barrier_wait(full, 0); get(at, 0); }
        if (t == 0) { barrier_wait(full, 0); load(at, full); }""",
    "overwrites what another thread read since the last barrier": """
        const auto& eight = *reinterpret_cast<const volatile word64*>(emulation_shared_place(at));
        if (t == 0) load(at, full);
        if (t == 32) { barrier_wait(full, 0); q[t] = eight; }
        if (t == 0) { barrier_wait(full, 0); q[t] = eight; get(at, 0), put(at, 0, 1); }""",
    "copies over what another thread wrote since the last barrier": """
        if (t == 32) put(at, 0, 1);
        if (t == 0) load(at, full);""",
    "TMA writes what thread 0 wrote: no fence.proxy.async stands between": "if (t == 0) put(at, 0, 1), load(at, full);",
    "TMA writes what thread 0 read: no fence.proxy.async stands between": """
        if (t == 0) { load(at, full); barrier_wait(full, 0); get(at, 0); load(at, full); }""",
    "copies into shared memory where another copy is under way": "if (t == 0) load(at, full), load(at, full + 8);",
    "TMA loads to 0x810, which is no multiple of 128": "if (t == 0) load(at + 16, full);",
    "a store of TMA reads what thread 0 wrote: no fence.proxy.async": """
        if (t == 0) { for (int i = 0; i < 2048; ++i) put(at, i, 1); store(at); }""",
    "overwrites shared memory that a store of TMA of thread 0 still reads": """
        if (t == 0) { for (int i = 0; i < 2048; ++i) put(at, i, 1); accesses_fence(); store(at); put(at, 5, 2); }""",
    "returns while stores of TMA read its shared memory": """
        if (t == 0) { for (int i = 0; i < 2048; ++i) put(at, i, 1); accesses_fence(); store(at); }""",
    "the named barrier 0: there are 1 to 15": "threads_sync(0, 256);",
    "named barrier 2 is shared by 96 threads, and by 64": "if (t < 96) threads_sync(2, t < 64 ? 96 : 64);",
    "arrives twice at named barrier 2 before the others are there": "if (t < 32) { threads_arrive(2, 64); threads_arrive(2, 64); }",
    "the block ends with 32 threads at named barrier 2, which 64 share": "if (t < 32) threads_arrive(2, 64);",
    "deadlock: .* 0-31 at a named barrier": "if (t < 32) threads_sync(2, 64);",
    "deadlock: .* 7 at an mbarrier": "if (t == 7) barrier_wait(full, 0);",
    "a product whose registers no wgmma.fence orders": """
        if (t == 0) load(at, full);
        barrier_wait(full, 0);
        float sums[8];
        if (t < 128) wgmma_issue<E4M3FN, E4M3FN>(sums, tile_descriptor(at), tile_descriptor(at), 0);""",
    "race on shared memory: a product reads what was written": """
        float sums[8];
        if (t == 0) { load(at, full); while (!barrier_passed(full, 0)) pause(); multiply(sums, at); }""",
    "a product reads shared memory into which a copy is under way": """
        float sums[8];
        if (t == 0) { load(at, full); multiply(sums, at); }""",
    "returns while products are under way": """
        if (t == 0) load(at, full);
        barrier_wait(full, 0);
        float sums[8];
        if (t < 128) multiply(sums, at);""",
    "writes sums into which a product is under way": """
        if (t == 0) load(at, full);
        barrier_wait(full, 0);
        if (t >= 128) return;
        float sums[8];
        multiply(sums, at);
        sums[3] = 0;
        wgmma_wait<0>();""",
    "a result is made of sums into which a product is under way": """
        if (t == 0) load(at, full);
        barrier_wait(full, 0);
        if (t >= 128) return;
        float sums[8];
        multiply(sums, at);
        q[t] = emulated_round_pair<BFLOAT16>(2 * sums[0], 0);
        wgmma_wait<0>();""",
    "overwrites shared memory that a product of thread 0 read: nothing tells that it was awaited": """
        if (t == 0) load(at, full);
        barrier_wait(full, 0);
        float sums[8];
        if (t < 128) { multiply(sums, at); wgmma_wait<0>(); }
        if (t == 128) load(at, full);""",
    "writes registers that a product reads": """
        if (t == 0) load(at, full);
        barrier_wait(full, 0);
        if (t >= 128) return;
        float sums[8];
        unsigned w[4] = {};
        wgmma_fence();
        wgmma_issue<E4M3FN, E4M3FN>(sums, w, tile_descriptor(at), 0);
        wgmma_commit();
        w[2] = 1;
        wgmma_wait<0>();""",
    "st.async into one block that is counted in another": """
        if (t == 0) remote_store(cluster_address(at, 0), make_float2(1, 2), full);""",
    "st.async of 8 bytes to 0x1000804, which is no multiple": """
        if (t == 0) remote_store(cluster_address(at + 4, 0), make_float2(1, 2), cluster_address(full, 0));""",
    "TMA loads to blocks 0x2 of a cluster of 1": """
        if (t == 0) tile_load_shared(at, &in, 0, 0, full, 2);""",
}
"""What is reported, and of what a block of 256 threads does after it has initialized two mbarriers of one arrival."""
CASES = [RIGHT, *WRONG.values()]
AT_ONCE = ("race on shared dynamic memory", "race on shared memory: a product")
LAST_FIRST = ("copies over", "overwrites what")
"""What is found where copies land at once, and where the last thread runs first; else they are late and the first does."""
KERNEL = """
#include "../gemm/pipeline.cuh"
extern "C" __global__ void faults(const TensorMap in, const TensorMap out, float* q, int which) {
    extern __shared__ char dynamic[];
    __shared__ alignas(8) word64 barriers[4];
    const unsigned at = (shared_address(dynamic) + 1023) & ~1023u, full = shared_address(barriers), t = threadIdx.x;
    const auto load = [&](unsigned to, unsigned barrier) {
        barrier_expect(barrier, 8192);
        tile_load(to, &in, 0, 0, barrier);
    };
    const auto store = [&](unsigned from) { tile_store(&out, from, 0, 0); stores_commit(); };
    const auto put = [&](unsigned to, unsigned i, float x) { shared_store(to + 4 * i, x); };
    const auto get = [&](unsigned from, unsigned i) { float x; shared_load(from + 4 * i, x); q[t] = x; };
    const auto multiply = [&](float (&sums)[8], unsigned from) {
        wgmma_fence();
        wgmma_issue<E4M3FN, E4M3FN>(sums, tile_descriptor(from), tile_descriptor(from), 0);
        wgmma_commit();
    };
    if (t == 0) {
        barrier_init(full, 1);
        barrier_init(full + 8, 1);
        barrier_init_fence();
    }
    __syncthreads();
    CASES
}
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return the text of a kernel that has all cases: to compile it takes longer than to run it."""
    folder = tmp_path_factory.mktemp("hopper")
    entry = folder / "cuda_src" / "ptx" / "faults.cu"
    entry.parent.mkdir(parents=True)
    cases = "\n".join(f"if (which == {i}) {{ {case} }}" for i, case in enumerate(CASES))
    entry.write_text(KERNEL.replace("CASES", cases))
    return hopper_text(folder, "ptx/faults.cu")


@pytest.fixture
def run(emulator, text):
    def run(case):
        kernel = emulator.compile(text, ("-DFP8CORE_WARP=32",), "faults")
        with emulator.watch() as memory:
            ones = memory.array(np.full((64, 128), 0x38, np.uint8))  # 1.0 as e4m3fn
            out = memory.empty((64, 128), np.uint8)
            q = memory.empty((256,), np.float32)
            maps = (encode_map(x.ctypes.data, 64, 128, 128, 64) for x in (ones, out))
            items = ("128s", "128s", "P", "i")
            launcher = Launcher(emulator, kernel, "faults", items, (256, 1, 1), 1024 + 2 * 8192, 32, 1, False)
            launcher(0, (1, 1, 1), *maps, q.ctypes.data, CASES.index(case))
            return out.view(np.float32)

    return run


@pytest.mark.parametrize("order", ["next", "first", "last", "groups", "any"])
@pytest.mark.parametrize("landing", ["at once", "late", "sometime"])
def test_what_is_right_passes_in_any_order(run, emulator, order, landing):
    for seed in range(3):
        emulator.schedule = Schedule(order, landing, seed)
        out = run(RIGHT)
        assert (out == 32).all()


@pytest.mark.parametrize("report", WRONG)
def test_what_is_wrong_is_reported(run, emulator, report):
    order, landing = report.startswith(LAST_FIRST), report.startswith(AT_ONCE)
    emulator.schedule = Schedule("last" if order else "first", "at once" if landing else "late", 1)
    with pytest.raises(EmulationError, match=report) as caught:
        run(WRONG[report])
    assert str(emulator.schedule) in str(caught.value)
