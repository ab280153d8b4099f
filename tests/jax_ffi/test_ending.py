"""Processes that end while programs of JAX run: they end when these have, and not never."""

import os

import pytest

pytest.importorskip("jax")

import jax

from fp8core.jax import ending, handler
from jax_ffi.test_processes import program

UNDER_WAY = """
    import faulthandler, sys
    faulthandler.dump_traceback_later(100, exit=True)  # of a process that does not end
    import jax, numpy as np, jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import fp8core, fp8core.jax

    over = NamedSharding(Mesh(np.array(jax.devices()), "a"), P("a"))
    x = jax.device_put(np.ones((960, 4096), np.float32), over)
    call = jax.jit(lambda x: tuple(fp8core.quantize(x, group_shape=fp8core.PER_TENSOR)))
    made = call(x)
    for _ in range(5):
        made = call(x + jnp.sum(made[1]) * 0)
    if sys.argv[1] == "dropped":
        del made
    print("ends")
"""


@pytest.mark.parametrize("results", ["kept", "dropped"])
@pytest.mark.parametrize("devices", [1, 6])
def test_a_process_ends_whose_programs_have_not(results, devices):
    assert program(UNDER_WAY, results, XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}") == ["ends"]


class Failed:
    """An array whose program has failed."""

    def __init__(self, waited):
        self.waited = waited

    def block_until_ready(self):
        self.waited.append(self)
        raise RuntimeError("INTERNAL: it failed")


@pytest.fixture
def waited(monkeypatch):
    """What is waited for, of two arrays whose programs have failed, and a platform."""
    found = []
    monkeypatch.setattr(jax, "live_arrays", lambda platform: [Failed(found), Failed(found)])
    monkeypatch.setattr(ending, "wait_for_programs", found.append)
    monkeypatch.setattr(handler.ALL["cpu"], "ready", {"any": None})
    for name in ("cuda", "rocm"):
        monkeypatch.setattr(handler.ALL[name], "ready", {})
    return found


def test_programs_that_fail_are_waited_for_like_others(waited):
    ending._wait(os.getpid())
    assert [type(one) for one in waited] == [Failed, Failed, str]
    assert waited[-1] == "cpu"


def test_the_child_of_a_fork_waits_for_nothing(waited):
    ending._wait(os.getpid() + 1)
    assert waited == []


def test_nor_does_who_has_called_nothing(waited, monkeypatch):
    monkeypatch.setattr(handler.ALL["cpu"], "ready", {})
    ending._wait(os.getpid())
    assert waited == []


SLOW = """
    import time
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import fp8core, fp8core.jax
    from fp8core.jax import ending, programs

    ran, launch, devices = [], programs.Prepared.__call__, jax.devices()

    def slow(*given):
        time.sleep(0.2)
        launch(*given)
        ran.append(given)

    programs.Prepared.__call__ = slow
    call = jax.jit(lambda x: fp8core.quantize(x @ x).data)
    over = NamedSharding(Mesh(np.array(devices), "a"), P("a"))  # the product gathers x
    for where, parts in ((devices[-1], 1), (over, len(devices))):
        ran.clear()
        call(jax.device_put(np.ones((516, 516), np.float32), where))
        ending.wait_for_programs("cpu")
        print(len(ran) == parts)
"""


@pytest.mark.parametrize("devices", [1, 6])
def test_programs_have_run_when_it_returns(devices):
    """One of the last device, and one of all devices, whose results nobody keeps."""
    assert program(SLOW, XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}") == ["True", "True"]
