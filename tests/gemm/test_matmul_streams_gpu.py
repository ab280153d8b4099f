"""Every able kernel of a product in graphs, in threads, on given streams and on another device."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.runtime import device
from support.gpu_products import EXACT, POISON, able, case, cp, error, launch, operands, replace, result

pytestmark = pytest.mark.gpu

SHARED = [("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("group", "block")]


@pytest.mark.parametrize("modes", SHARED)
def test_graph_replay_follows_its_inputs(modes):
    made, other = case(*modes, m=64, seed=1, fast=False), case(*modes, m=64, seed=2, fast=False)
    for row in able(made):
        kernel = next(k for k in SCALED_MM.kernels if k.name == row)
        plan = kernel.plan(made.problem)
        scratch = launch(made, plan)
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            cp.cuda.get_current_stream().synchronize()
            stream.begin_capture()
            launch(made, plan, stream.ptr, scratch)
            graph = stream.end_capture()
        kept = [x.copy() for x in operands(made)]
        replace(made, operands(other))
        made.storage[...] = POISON
        cp.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        assert error(result(made), other.want) <= EXACT, row
        replace(made, kept)


@pytest.mark.parametrize("modes", SHARED)
def test_threads_share_a_plan(modes):
    """Eight threads, a stream each: no descriptor's address reaches another thread's product."""
    cases = [case(*modes, m=64, seed=seed, fast=False) for seed in range(8)]
    for row in able(cases[0]):
        kernel = next(k for k in SCALED_MM.kernels if k.name == row)
        plan = kernel.plan(cases[0].problem)

        def work(made, plan=plan):
            stream = cp.cuda.Stream(non_blocking=True)
            with stream:
                scratch = cp.full(plan.scratch_bytes, POISON, cp.uint8)
                for _ in range(25):
                    launch(made, plan, stream.ptr, scratch)
            stream.synchronize()

        cp.cuda.runtime.deviceSynchronize()
        with ThreadPoolExecutor(len(cases)) as pool:
            list(pool.map(work, cases))
        for made in cases:
            assert error(result(made), made.want) <= EXACT, row


def test_a_thread_that_never_met_the_device_launches_kernels_and_calls_the_library():
    made = case("row", "row", fast=False)
    for row in able(made):
        plan = next(k for k in SCALED_MM.kernels if k.name == row).plan(made.problem)
        scratch = cp.full(plan.scratch_bytes, POISON, cp.uint8)
        made.storage[...] = POISON
        cp.cuda.runtime.deviceSynchronize()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(launch, made, plan, 0, scratch).result()
        cp.cuda.runtime.deviceSynchronize()
        assert error(result(made), made.want) <= EXACT, row


@pytest.mark.parametrize("modes", SHARED)
def test_stream_is_the_one_that_was_given(modes):
    """The product waits for work that only its own stream knows of."""
    made = case(*modes, m=64, fast=False)
    for row in able(made):
        plan = next(k for k in SCALED_MM.kernels if k.name == row).plan(made.problem)
        scratch = launch(made, plan)
        right = made.a.copy()
        cp.cuda.runtime.deviceSynchronize()
        made.a[...] = 0
        made.storage[...] = POISON
        slow = cp.zeros(64 << 20, cp.float32)
        cp.cuda.runtime.deviceSynchronize()
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            for _ in range(20):
                slow += 1
            made.a[...] = right
            launch(made, plan, stream.ptr, scratch)
        stream.synchronize()
        assert error(result(made), made.want) <= EXACT, row


@pytest.mark.multigpu
@pytest.mark.parametrize("modes", SHARED)
def test_device_that_is_not_current(modes):
    with device.on(1):
        made = case(*modes, m=64, fast=False)
        made.problem = made.problem._replace(target=device.target(1))
    for row in able(made):
        plan = next(k for k in SCALED_MM.kernels if k.name == row).plan(made.problem)
        with device.on(1):
            scratch = cp.full(plan.scratch_bytes, POISON, cp.uint8)
            made.storage[...] = POISON
            cp.cuda.runtime.deviceSynchronize()
            stream = cp.cuda.Stream(non_blocking=True)
        assert device.current() == 0
        launch(made, plan, stream.ptr, scratch)
        assert device.current() == 0
        with device.on(1):
            stream.synchronize()
            assert error(result(made), made.want) <= EXACT, row
