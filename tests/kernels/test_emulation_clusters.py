"""Blocks of an emulated cluster that store to each other's shared memory: what is right passes, a fault is reported."""

import re

import numpy as np
import pytest

from fp8core.runtime import sources
from support.emulation import EmulationError, Launcher, Schedule
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.hopper import SCHEDULES

KERNEL = """
    KERNEL(64) exchange(unsigned* q) {
        SHARED unsigned first[4];
        SHARED unsigned second[4];
        SHARED word64 barriers[2];
        const unsigned warp = thread_x() / WARP, from = block_x() * 2 + warp;
        if (warp == 0) {
            tx_barrier_open(&barriers[0], 16);
            tx_barrier_open(&barriers[1], 16);
        }
        cluster_arrive();
        cluster_wait();
        if (lane() < 2) dsmem_store(&first[from], 1 << 4 * from, &barriers[0], lane());
        tx_barrier_wait(&barriers[0]);
        const unsigned sum = first[0] + first[1] + first[2] + first[3];
        if (lane() < 2) dsmem_store(&second[from], sum + from, &barriers[1], lane());
        tx_barrier_wait(&barriers[1]);
        q[block_x() * 64 + thread_x()] = second[lane() % 4];
    }"""
"""Two warps of two blocks: each sends a word to all, and then what it makes of theirs."""
EARLY = "under way|nobody wrote|race on shared|is awaited"
FAULTS = {
    "without the cluster's barrier": (r"cluster_wait\(\);", "", "may not have begun|no mbarrier was initialized"),
    "no barrier is opened": (r"if \(warp == 0\)", "if (false)", "no mbarrier was initialized"),
    "two warps open the barriers": (r"if \(warp == 0\)", "", "an mbarrier is initialized where there is one"),
    "the first words are not awaited": (r"tx_barrier_wait\(&barriers\[0\]\);", "", EARLY),
    "the second words are not awaited": (r"tx_barrier_wait\(&barriers\[1\]\);", "", EARLY),
    "the barrier of the other exchange is awaited": (r"wait\(&barriers\[1\]", "wait(&barriers[0]", EARLY),
    "some of the words are awaited": (r"&barriers\[1\], 16", "&barriers[1], 8", EARLY),
    "more words are awaited than come": (r"&barriers\[1\], 16", "&barriers[1], 20", "deadlock"),
    "counted at the other exchange's barrier": (r"\+ from, &barriers\[1\]", "+ from, &barriers[0]", f"deadlock|{EARLY}"),
    "the second words overwrite the first": (r"&second\[from\]", "&first[from]", EARLY),
    "to a block that there is not": (r"lane\(\) < 2(?=\) dsmem_store\(&second)", "lane() < 3", "block 2 of a cluster of 2"),
}  # fmt: skip
"""A fault in the kernel, and what is reported of it under every schedule."""


@pytest.fixture
def run(emulator):
    def run(text):
        flat = sources.flatten_file(sources.root(), "cuda_src/platform.cuh") + text
        kernel = emulator.compile(flat, ("-DFP8CORE_WARP=32",), "exchange")
        with emulator.watch() as memory:
            q = memory.empty((128,), np.uint32)
            Launcher(emulator, kernel, "exchange", "P", (64, 1, 1), 0, 32, 2, False)(0, (2, 1, 1), q.ctypes.data)
        return q

    return run


@pytest.mark.parametrize("schedule", [Schedule(), *SCHEDULES], ids=str)
def test_words_come_to_every_block(run, emulator, schedule):
    emulator.schedule = schedule
    assert (run(KERNEL) == 0x1111 + np.arange(128) % 4).all()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_in_any_order(run, emulator, fault):
    place, instead, report = FAULTS[fault]
    text, count = re.subn(place, instead, KERNEL)
    assert count == 1
    for schedule in (Schedule(), *SCHEDULES):
        emulator.schedule = schedule
        with pytest.raises(EmulationError, match=report):
            run(text)
