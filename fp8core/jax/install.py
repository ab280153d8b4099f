"""What `import fp8core.jax` does, once per process."""

from functools import cache
from typing import Any

import jax
import numpy as np

from fp8core.core.operation import Operation
from fp8core.interrupts import interrupts_wait
from fp8core.jax import batching, ending, exporting, gradients, handler
from fp8core.jax.calls import stand_in
from fp8core.ops import all_close
from fp8core.ops.quantized import Quantized, quantized


def install() -> None:
    """Register the handlers and the rules of transformations, and run calls on JAX arrays as JAX programs.

    Ctrl-C takes effect afterwards: JAX keeps what is registered, and refuses to register a type again.
    """
    with interrupts_wait():
        _install()


@cache
def _install() -> None:
    for platform in handler.ALL.values():
        platform.register()
    ending.register()
    batching.install()
    gradients.install()
    jax.tree_util.register_pytree_with_keys(Quantized, _with_keys, _unflatten, _flatten)
    exporting.register()
    Operation.stand_ins["jax"] = stand_in
    all_close.READING["jax"] = _read_spread


def _with_keys(q: Any) -> Any:
    keys = jax.tree_util.GetAttrKey("data"), jax.tree_util.GetAttrKey("scale")
    return tuple(zip(keys, q, strict=True)), q.group_shape


def _flatten(q: Any) -> Any:
    return tuple(q), q.group_shape


def _unflatten(group_shape: Any, parts: Any) -> Any:
    data, scale = parts
    return quantized(data, scale, group_shape)


def _read_spread(flag: Any) -> bool | None:
    """Return the value of a flag on several devices, which a program has written; None for any other flag."""
    if not isinstance(flag, jax.Array) or len(flag.sharding.device_set) == 1:
        return None
    return bool(np.asarray(flag).view(np.int32)[0])
