"""Layers and pairs as arguments and results of exported programs: how JAX writes and reads their static parts."""

import json
from typing import Any

import numpy as np
from jax import export

from fp8core.interop import dtype_name
from fp8core.jax.linear import Fp8Linear
from fp8core.ops.quantized import Quantized
from fp8core.problem import GroupShape


def register() -> None:
    """Let `jax.export.Exported.serialize` write programs that take or return a layer or a `Quantized`."""
    for kind, write, read in ((Fp8Linear, _write_layer, _read_layer), (Quantized, _write_pair, _read_pair)):
        export.register_pytree_node_serialization(
            kind, serialized_name=f"fp8core.{kind.__name__}", serialize_auxdata=write, deserialize_auxdata=read
        )


def _write_layer(options: Any) -> bytes:
    weight_group, group, out_dtype, *flags = options
    return json.dumps([weight_group, group, None if out_dtype is None else dtype_name(out_dtype), *flags]).encode()


def _read_layer(text: bytes | bytearray) -> Any:
    weight_group, group, name, *flags = json.loads(text)
    # A dtype of NumPy equals all objects that mean it, and its name; a name does not equal jnp.float16.
    return GroupShape(*weight_group), GroupShape(*group), None if name is None else np.dtype(name), *flags


def _write_pair(group: GroupShape | None) -> bytes:
    return json.dumps(group).encode()


def _read_pair(text: bytes | bytearray) -> GroupShape | None:
    group = json.loads(text)
    return None if group is None else GroupShape(*group)
