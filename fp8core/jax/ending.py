"""Programs that still run when the process ends: what is left of them needs the interpreter, in which handlers run.

A call of a program returns before the program has run. Where the interpreter ends first, a handler waits for it for
ever, and so does the process, as XLA's client waits for its programs.
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
    """Wait at the end of this process: before JAX takes its clients down, which it has registered earlier."""
    atexit.register(_wait, os.getpid())


def _wait(process: int) -> None:
    if os.getpid() != process:  # of a fork, where XLA's threads are not
        return
    for platform in handler.ALL.values():
        if platform.ready:
            with suppress(RuntimeError):  # of a program, or of a backend that is gone: either has ended
                for array in jax.live_arrays(platform.name):
                    with suppress(RuntimeError):
                        array.block_until_ready()
                wait_for_programs(platform.name)


def wait_for_programs(platform: str) -> None:
    """Return when what this thread has called on a platform has run, whether or not its results are still there.

    XLA runs programs of one thread and one device in their order, on the CPU those with collectives apart from others.
    """
    devices = jax.local_devices(backend=platform)
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
