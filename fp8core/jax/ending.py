"""Waits at exit for programs that still run, as their handlers need the interpreter.

A call of a program returns before the program has run. If the interpreter ends first, a handler waits for it forever,
and so does the process, as XLA's client waits for its programs.
"""

import atexit
import os
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8core.jax import handler


def register() -> None:
    """Register the wait at exit. JAX has registered the shutdown of its clients earlier, so that it runs later."""
    atexit.register(_wait, os.getpid())


def _wait(process: int) -> None:
    if os.getpid() != process:  # a forked process does not have XLA's threads
        return
    for platform in handler.ALL.values():
        if platform.ready:
            with suppress(RuntimeError):  # a program failed or the backend is gone: nothing is left to wait for
                for array in jax.live_arrays(platform.name):
                    with suppress(RuntimeError):
                        array.block_until_ready()
                wait_for_programs(platform.name)


def wait_for_programs(platform: str) -> None:
    """Wait for all programs that this thread has called on a platform, even if their results have been deleted.

    XLA runs the programs of one thread on one device in order. On the CPU, programs with collectives are ordered among
    themselves and independent of others, so one program of either kind is awaited.
    """
    devices = jax.local_devices(backend=platform)
    with jax.set_mesh(Mesh(np.empty((), object), ())):  # instead of the user's, which one device does not fit
        jax.block_until_ready([_next(jax.device_put(np.float32(0), device)) for device in devices])
        if platform == "cpu" and len(devices) > 1:
            over = NamedSharding(Mesh(np.array(devices), "device"), PartitionSpec("device"))
            jax.block_until_ready(_sum(jax.device_put(np.zeros(len(devices), np.float32), over)))


@jax.jit
def _next(x: Any) -> Any:
    return x + 1


@jax.jit
def _sum(x: Any) -> Any:
    return jnp.sum(x)
