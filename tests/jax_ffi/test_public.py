"""Every public function under jax.jit: which of the cases calls it, or what it does there instead."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import fp8core  # noqa: E402 - after the skip
import fp8core.jax  # noqa: E402
from fp8core import w8a8  # noqa: E402
from fp8core.errors import LayoutError  # noqa: E402
from fp8core.jax.programs import plain  # noqa: E402
from jax_ffi.cases import CASES, K, cpu, same, weight, wide  # noqa: E402, F401

COMPUTES = {
    "convert_to_channelwise": "expand",
    "cutlass_w8a8_scaled_mm": "w8a8_product",
    "dequantize": "dequantize",
    "grouped_scaled_mm_nt": "grouped",
    "linear": "linear",
    "moe_permute": "permute",
    "moe_unpermute": "unpermute",
    "normalize_e4m3fn_to_e4m3fnuz": "fnuz",
    "normalize_e4m3fnuz_to_e4m3fn": "fnuz",
    "per_tensor_dequantize": "dequantize_number",
    "quantize": "quantize_static",
    "requantize_with_max_scale": "requantize",
    "rms_norm_quant": "norm",
    "rocm_per_tensor_w8a8_scaled_mm": "w8a8_product",
    "scaled_fp8_quant": "w8a8_quantize",
    "scaled_mm": "scaled_mm",
    "scaled_mm_nt": "scaled_mm_nt",
    "silu_and_mul_quant": "silu",
    "torch_channelwise_w8a8_scaled_mm": "w8a8_product",
    "torch_per_tensor_w8a8_scaled_mm": "w8a8_product",
    "torch_per_token_w8a8_scaled_mm": "w8a8_product",
}
"""By function: a case that calls it, or another name of what it calls; `test_jit` runs all cases."""
WITHOUT_ARRAYS = {
    "capabilities", "load_tunings", "save_tunings", "tune_shapes", "cutlass_block_fp8_supported", "cutlass_fp8_supported",
    "cutlass_group_gemm_supported", "dispatch_w8a8_scaled_mm", "maybe_create_device_identity", "sparse_cutlass_supported",
}  # fmt: skip
"""They take no arrays, so that it does not matter who traces."""
HERE = {"all_close_1d", "explain", "tune"}
"""Those of the tests below."""


def test_every_public_function_is_met():
    names = {
        name
        for module in (fp8core, w8a8)
        for name in module.__all__
        if callable(getattr(module, name)) and not isinstance(getattr(module, name), type)
    }
    assert names == COMPUTES.keys() | WITHOUT_ARRAYS | HERE
    assert set(COMPUTES.values()) <= {case.name for case in CASES}


@pytest.mark.parametrize("values", [[0.5, 0.5], [0.5, 0.6], [np.nan, 1.0], [1.0], []])
def test_all_close_1d_is_an_array(values):
    x = np.array(values, np.float32)
    wanted = fp8core.all_close_1d(x)
    for found in (jax.jit(fp8core.jax.all_close_1d)(x), fp8core.jax.all_close_1d(jnp.asarray(x))):
        assert isinstance(found, jax.Array)
        assert found.shape == ()
        assert bool(found) is wanted
    assert fp8core.all_close_1d(jnp.asarray(x)) is wanted


def test_all_close_1d_gives_no_number_in_a_program():
    with pytest.raises(LayoutError, match=r"fp8core\.jax\.all_close_1d returns it as an array"):
        jax.jit(fp8core.all_close_1d)(jnp.ones(3))
    x = jnp.array([[1.0, 1.0], [1.0, 2.0]])
    assert jax.vmap(fp8core.jax.all_close_1d)(x).tolist() == [True, False]


def test_calls_on_tracers_are_explained():
    w = weight()
    told = []

    @jax.jit
    def layer(x):
        told.append(fp8core.explain(fp8core.linear, x, w))
        return fp8core.linear(x, w)

    x = wide(3, K)
    assert same(layer(x), fp8core.linear(x, w))
    assert told[0].problem == fp8core.explain(fp8core.linear, fp8core.ArraySpec(x.shape, "bfloat16"), w).problem


def test_layers_of_the_core_take_tracers():
    layer = fp8core.Fp8Linear(weight())
    x = wide(3, K)
    assert same(jax.jit(lambda x: layer(x))(x), layer(x))


def test_vllms_names_are_those_of_errors():
    x = wide(4, K)
    op, w = w8a8.Fp8LinearOp(), weight()
    for words, given in (
        ("input needs an array of float32, .*, got int16", x.astype(np.int16)),
        (r"input_scale of input\(4, 512\) .* needs shape", x),
    ):
        with pytest.raises(fp8core.Fp8Error, match=words):
            jax.jit(lambda x: op.apply(x, w.data.T, w.scale, input_scale=jnp.ones((4, 3))))(given)
    with pytest.raises(LayoutError, match="output needs to be writable, got an array of JAX"):
        jax.jit(lambda x: w8a8.scaled_fp8_quant(x, output=x.astype(jnp.float8_e4m3fn)))(x)


class Name(str):
    """As members of an Enum of texts have it."""

    __slots__ = ()

    def __str__(self):
        return f"Name.{self[:]}"


def test_options_that_are_equal_are_one():
    """Calls are kept by their options: the first one of equal ones must not decide how the others end."""
    wanted = fp8core.quantize(wide(3, K), group_shape=(1, 128), dtype="float8_e5m2")
    x = jnp.asarray(wide(3, K))
    for given in (
        {"group_shape": (1.0, 128.0), "dtype": Name("float8_e5m2"), "scale_layout": Name("k")},
        {"group_shape": (Decimal(1), Fraction(128)), "rows_padded": 1 + 0j, "dtype": "float8_e5m2"},
        {"group_shape": (np.float32(1), np.int16(128)), "dtype": np.str_("float8_e5m2")},
        {"group_shape": (1, 128), "dtype": "float8_e5m2"},
    ):
        assert same(fp8core.quantize(x, **given), wanted)
    assert list(map(type, plain((1.0, np.float32(2), np.int8(3), True, 0.5, Name("k"))))) == [int] * 3 + [
        bool,
        float,
        str,
    ]
