"""fp8core inside JAX: its functions in ``jax.jit`` and the other transformations, and FP8 layers as pytrees.

With this module imported, the functions of `fp8core` take JAX arrays and tracers. In a traced function each call
becomes a custom call, whose handler is written in Python and launches the kernel on the program's stream. XLA records
the launches into command buffers, so that a program runs without Python. A call outside of ``jax.jit`` runs such a
program from a cache.

The first call of a function of `fp8core` with a JAX array imports this module.

Examples:
    >>> import jax, jax.numpy as jnp, fp8core, fp8core.jax
    >>> weight = fp8core.quantize(jnp.eye(4, 32))
    >>> jax.jit(fp8core.linear)(jnp.ones((2, 32)), weight).round(3).tolist()
    [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
"""

from fp8core.interop.versions import require_version

require_version("jax")

from fp8core.jax.functional import all_close_1d, rms_norm_quant, scaled_mm, scaled_mm_nt
from fp8core.jax.install import install
from fp8core.jax.linear import Fp8Linear

__all__ = ["Fp8Linear", "all_close_1d", "rms_norm_quant", "scaled_mm", "scaled_mm_nt"]

install()
