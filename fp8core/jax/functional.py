"""Variants for JAX of functions that write a result into an array of the caller, or return a Python value.

These return new arrays instead.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fp8core import ops
from fp8core.errors import DTypeError, LayoutError
from fp8core.interop.names import type_name
from fp8core.jax.calls import Place
from fp8core.ops import Quantized
from fp8core.ops.all_close import ALL_CLOSE_CALLS


def rms_norm_quant(
    x: Any, weight: Any, epsilon: float, *, residual: Any, **keywords: Any
) -> tuple[Quantized[jax.Array, jax.Array], jax.Array]:
    """Return the quantized norm of ``x + residual``, as `fp8core.rms_norm_quant` does, and the sum as a new array.

    Inside of ``jax.jit`` the sum reuses the residual's memory if nothing else needs it: if the residual is a donated
    argument, or an intermediate value of the program.

    Args:
        x: float32, float16 or bfloat16 ``[..., cols]``.
        weight: float32, float16 or bfloat16 ``[cols]``.
        epsilon: the number that is added to the mean square, at least 0.
        residual: an array of x's shape and dtype.
        **keywords: as for `fp8core.rms_norm_quant`.

    Returns:
        The `Quantized` norm of the sum, and the sum in the residual's dtype.

    Raises:
        DTypeError: residual is None, which `fp8core.rms_norm_quant` takes.
        Fp8Error: the other errors of `fp8core.rms_norm_quant`.

    Examples:
        >>> import jax.numpy as jnp, fp8core.jax
        >>> x = jnp.full((1, 64), 3.0)
        >>> q, residual = fp8core.jax.rms_norm_quant(x, jnp.ones(64), 1e-6, residual=jnp.ones((1, 64)))
        >>> float(residual[0, 0]), bool(abs(q.dequantize() - 1).max() < 1e-3)
        (4.0, True)
    """
    if residual is None:
        raise DTypeError("residual needs an array, got None: without a residual, take fp8core.rms_norm_quant")
    place: Any = Place(residual)
    q: Any = ops.rms_norm_quant(x, weight, epsilon, residual=place, **keywords)
    return q, place.array


def all_close_1d(x: Any) -> jax.Array:
    """Return the result of `fp8core.all_close_1d` as an array, without waiting for it; inside of ``jax.jit``, too.

    Args:
        x: a float32 JAX array with one axis.

    Returns:
        A boolean array of shape ``()``.

    Raises:
        Fp8Error: the errors of `fp8core.all_close_1d`.

    Examples:
        >>> import jax, jax.numpy as jnp, fp8core.jax
        >>> bool(jax.jit(fp8core.jax.all_close_1d)(jnp.array([0.5, 0.5])))
        True
    """
    place: Any = Place(None)
    _, count = ALL_CLOSE_CALLS((x, place), None)
    if not count:
        return jax.numpy.array(True)
    flag: jax.Array = jax.lax.bitcast_convert_type(place.array, np.int32)[0] != 0
    return flag


def scaled_mm(a: Any, b: Any, scale_a: Any = None, scale_b: Any = None, **keywords: Any) -> tuple[jax.Array, jax.Array]:
    """Return the product of `fp8core.scaled_mm`, and the largest magnitude of the product before it is rounded.

    Args:
        a: FP8 ``[..., m, k]`` or a `Quantized`.
        b: FP8 ``[k, n]`` or a `Quantized`, such as ``q.T`` of a weight.
        scale_a: as for `fp8core.scaled_mm`.
        scale_b: as for `fp8core.scaled_mm`.
        **keywords: as for `fp8core.scaled_mm`, without amax. With a ``beta``, ``beta * out`` is added; ``out``
            itself does not change. Inside of ``jax.jit`` the result reuses the memory of ``out`` if nothing else needs
            it.

    Returns:
        The result, and its amax as float32 ``[1]``.

    Raises:
        LayoutError: an array for the amax is given.
        Fp8Error: the other errors of `fp8core.scaled_mm`.

    Examples:
        >>> import jax.numpy as jnp, fp8core.jax
        >>> a, weight = fp8core.quantize(jnp.ones((2, 32))), fp8core.quantize(jnp.ones((3, 32)))
        >>> fp8core.jax.scaled_mm(a, weight.T)[1].round().tolist()
        [32.0]
    """
    return _with_amax(ops.scaled_mm, (a, b, scale_a, scale_b), keywords)


def scaled_mm_nt(
    a: Any, weight: Any, scale_a: Any = None, scale_b: Any = None, **keywords: Any
) -> tuple[jax.Array, jax.Array]:
    """Return the product of `fp8core.scaled_mm_nt`, and the largest magnitude of the product before it is rounded.

    Args:
        a: FP8 ``[..., m, k]`` or a `Quantized`.
        weight: FP8 ``[n, k]`` or a `Quantized`.
        scale_a: as for `fp8core.scaled_mm_nt`.
        scale_b: as for `fp8core.scaled_mm_nt`.
        **keywords: as for `fp8core.scaled_mm_nt`, without amax. With a ``beta``, ``beta * out`` is added; ``out``
            itself does not change. Inside of ``jax.jit`` the result reuses the memory of ``out`` if nothing else needs
            it.

    Returns:
        The result, and its amax as float32 ``[1]``.

    Raises:
        LayoutError: an array for the amax is given.
        Fp8Error: the other errors of `fp8core.scaled_mm_nt`.

    Examples:
        >>> import jax.numpy as jnp, fp8core.jax
        >>> a, weight = fp8core.quantize(jnp.ones((2, 32))), fp8core.quantize(jnp.ones((3, 32)))
        >>> fp8core.jax.scaled_mm_nt(a, weight)[1].round().tolist()
        [32.0]
    """
    return _with_amax(ops.scaled_mm_nt, (a, weight, scale_a, scale_b), keywords)


def _with_amax(
    product: Callable[..., Any], operands: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    given = keywords.pop("amax", None)
    if given is not None:
        name = f"fp8core.jax.{product.__name__}"
        raise LayoutError(f"amax needs to be left out, as {name} returns it, got {type_name(given)}")
    amax: Any = Place(jax.numpy.zeros(1, jax.numpy.float32))
    if keywords.get("out") is not None:
        keywords["out"] = Place(keywords["out"])
    made: Any = product(*operands, amax=amax, **keywords)
    return made, amax.array
