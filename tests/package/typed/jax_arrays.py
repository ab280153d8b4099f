"""What checkers know of calls with JAX's arrays; it also runs."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

import fp8core
from fp8core import Permuted, Quantized

x: jax.Array = jnp.asarray(np.ones((4, 256), np.float32))
q = fp8core.quantize(x, dtype=jnp.float8_e4m3fn)
assert_type(q, Quantized[jax.Array, jax.Array])
assert_type(q.data, jax.Array)
assert_type(fp8core.linear(x, q), jax.Array)
assert_type(fp8core.scaled_mm_nt(q, q), jax.Array)
experts = fp8core.quantize(jnp.ones((2, 8, 256)))
assert_type(fp8core.grouped_scaled_mm_nt(q, experts, offs=jnp.array([1, 4], jnp.int32)), jax.Array)
permuted = fp8core.moe_permute(x, jnp.array([[0, 1]] * 4, jnp.int32), 2)
assert_type(permuted, Permuted[jax.Array, jax.Array])
assert_type(fp8core.moe_permute(q, permuted.inverse, 2).rows, Quantized[jax.Array, jax.Array])
assert_type(fp8core.moe_unpermute(permuted.rows, permuted.inverse), jax.Array)
assert_type(fp8core.Fp8Linear(q)(x), jax.Array)
for made in (q.data, q.scale, fp8core.linear(x, q)):
    assert isinstance(made, jax.Array)
