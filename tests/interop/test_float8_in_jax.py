"""`jnp.asarray` of a Float8Array, and JAX functions that take one: through ``__jax_array__``."""

import ctypes
import gc
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - after the skip

from fp8core.errors import LayoutError  # noqa: E402
from fp8core.interop import jax_arrays  # noqa: E402
from fp8core.interop.float8 import DTYPES, Float8Array  # noqa: E402
from fp8core.runtime import device  # noqa: E402
from support.host_arrays import codes  # noqa: E402
from support.releases import kept  # noqa: E402, F401


def same(got, q):
    assert isinstance(got, jax.Array)
    assert (got.dtype.name, got.shape) == (q.dtype, q.shape)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), q.view("uint8"))


def test_codes_without_memory_are_refused():
    deleted = jnp.zeros(3, jnp.uint8)
    deleted.delete()
    with pytest.raises(LayoutError, match="codes needs memory of its own, got one that was deleted or donated"):
        Float8Array(deleted, "float8_e4m3fn")
    with pytest.raises(LayoutError, match="codes needs memory of its own, got a tracer"):
        jax.jit(lambda x: Float8Array(x, "float8_e4m3fn"))(jnp.zeros(3, jnp.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [jnp.asarray, jnp.array, jnp.copy])
def test_it_becomes_an_array_of_jax(make, dtype):
    q = Float8Array(codes(), dtype)
    for view in (q, q.T, q[:, ::2], q[:0]):
        same(make(view), view)


def test_an_array_of_jax_compares_with_it_by_value():
    q = Float8Array(np.array([[0x38, 0xB8, 0x7F, 0x80]], np.uint8), "float8_e4m3fn")
    values = jnp.asarray([[1, 1, jnp.nan, 0]], "float8_e4m3fn")
    for equal in (q == values, values == q, ~(q != values), ~(values != q)):
        assert equal.tolist() == [[True, False, False, True]]


@pytest.mark.parametrize("trace", [lambda call, q: jax.jit(call)(q), jax.eval_shape], ids=["jit", "eval_shape"])
def test_a_traced_function_refuses_it_and_says_what_to_pass(trace):
    q = Float8Array(codes(), "float8_e4m3fn")
    with pytest.raises(
        (ValueError, TypeError), match=r"convert your object using jax.numpy.array|not a valid JAX type"
    ):
        trace(lambda x: x, q)


class OnGpu(np.ndarray):
    """Bytes with the attributes of CuPy's array."""

    device = SimpleNamespace(id=0)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self):
        return np.array(self)


@pytest.fixture
def lent(monkeypatch, kept):
    """Return the owners of memory that JAX got; JAX's operations have ended as soon as they are asked about."""
    owners = []

    def unowned(pointer, nbytes, owner, ordinal):
        owners.append(owner)
        return SimpleNamespace(ptr=pointer, nbytes=nbytes, owner=owner)

    def array(shape, dtype, pointer):
        memory = pointer.memory
        made = (ctypes.c_uint8 * memory.nbytes).from_address(memory.ptr)
        made.owner = memory.owner
        return np.frombuffer(made, dtype).reshape(shape)

    cuda = SimpleNamespace(
        UnownedMemory=unowned, MemoryPointer=lambda memory, at: SimpleNamespace(memory=memory, at=at)
    )
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=cuda, ndarray=array))
    monkeypatch.setattr(device, "on", lambda ordinal: nullcontext())
    monkeypatch.setattr(jax_arrays, "releases", lambda: kept)
    monkeypatch.setattr(jax_arrays.framework(), "_fence", lambda ordinal: lambda: lambda: True)
    return owners


def aligned(shape):
    """Return bytes at an address that JAX takes over on the CPU."""
    memory = np.zeros(int(np.prod(shape)) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    made = memory[start : start + int(np.prod(shape))].reshape(shape)
    made[...] = codes(shape)
    return made


def test_memory_of_a_gpu_is_lent_and_kept_until_jax_is_done(lent, kept):
    q = Float8Array(aligned((8, 16)).view(OnGpu), "float8_e4m3fn")
    values = jnp.asarray(q)
    same(values, q)
    assert values.unsafe_buffer_pointer() == q.codes.ctypes.data
    assert lent.pop()._memory is q.codes
    del values
    gc.collect()
    assert kept.wait(30)


def test_memory_with_gaps_or_of_another_order_is_copied(lent):
    q = Float8Array(aligned((8, 16)).view(OnGpu), "float8_e5m2")
    for view in (q.T, q[:, ::2]):
        same(jnp.asarray(view), view)
        assert lent.pop()._memory.flags.c_contiguous
