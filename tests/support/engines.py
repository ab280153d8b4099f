"""The frameworks with whose arrays every operation is tested, on the host and on a GPU, and random inputs."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fp8core.dtypes import HIGH_PRECISION

FP8 = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}
FLOATS = {name: np.dtype(getattr(ml_dtypes if name == "bfloat16" else np, name)) for name in HIGH_PRECISION}


class NumpyEngine:
    """NumPy arrays, which run on the host engine."""

    name = "numpy"

    def array(self, x: np.ndarray) -> Any:
        """Return the framework's array of the same dtype, shape and values."""
        return x

    def numpy(self, x: Any) -> np.ndarray:
        """Return a NumPy array, with a dtype of ml_dtypes if NumPy has none."""
        return x

    def codes(self, x: Any) -> np.ndarray:
        """Return the bytes of an FP8 array."""
        return np.ascontiguousarray(self.numpy(x)).view(np.uint8)


class TorchEngine(NumpyEngine):
    """PyTorch tensors on the CPU or a GPU."""

    def __init__(self, device: str) -> None:
        self.torch = pytest.importorskip("torch")
        self.name, self.device = f"torch-{device}", device

    def array(self, x):
        name = str(x.dtype)
        if name in FP8 or name == "bfloat16":
            raw = np.array(x.view(np.uint8 if name in FP8 else np.uint16), copy=True, order="C")
            tensor = self.torch.from_numpy(raw if name in FP8 else raw.view(np.int16)).view(getattr(self.torch, name))
        else:
            tensor = self.torch.from_numpy(np.array(x, copy=True, order="C"))
        return tensor.to(self.device)

    def numpy(self, x):
        name = str(x.dtype).removeprefix("torch.")
        x = x.detach().cpu()
        if name in FP8 or name == "float8_e8m0fnu":
            return x.contiguous().view(self.torch.uint8).numpy().view(getattr(ml_dtypes, name))
        return (
            x.contiguous().view(self.torch.int16).numpy().view(ml_dtypes.bfloat16) if name == "bfloat16" else x.numpy()
        )


class JaxEngine(NumpyEngine):
    """JAX arrays on the CPU or a GPU."""

    def __init__(self, device: str) -> None:
        self.jax = pytest.importorskip("jax")
        try:
            self.device = self.jax.devices(device)[0]
        except RuntimeError as error:
            pytest.skip(f"JAX has no {device}: {error}")
        self.name = f"jax-{device}"

    def array(self, x):
        return self.jax.device_put(x, self.device)

    def numpy(self, x):
        return np.asarray(x)


class CupyEngine(NumpyEngine):
    """CuPy arrays; FP8 is a Float8Array."""

    name = "cupy"

    def __init__(self) -> None:
        self.cupy = pytest.importorskip("cupy")

    def array(self, x):
        import fp8core

        if str(x.dtype) in FP8:
            codes = np.ascontiguousarray(x).view(np.uint8).reshape(x.shape)
            return fp8core.Float8Array(self.cupy.asarray(codes), str(x.dtype))
        return self.cupy.asarray(x)

    def numpy(self, x):
        if str(x.dtype).startswith("float8") and isinstance(x, self.cupy.ndarray):  # CuPy cannot gather float8
            return x.view(np.uint8).get().view(x.dtype)
        return x.get()


MAKERS = {
    "numpy": NumpyEngine,
    "torch-cpu": lambda: TorchEngine("cpu"),
    "jax-cpu": lambda: JaxEngine("cpu"),
    "cupy": CupyEngine,
    "torch-cuda": lambda: TorchEngine("cuda"),
    "jax-cuda": lambda: JaxEngine("gpu"),
}
GPU = ("cupy", "torch-cuda", "jax-cuda")


def engines(*names: str) -> Any:
    """Parametrize a test over engines; those of a GPU get the marker gpu."""
    chosen = names or tuple(MAKERS)
    return pytest.mark.parametrize(
        "engine",
        [pytest.param(n, marks=pytest.mark.gpu if n in GPU else ()) for n in chosen],
        indirect=True,
    )


BOTH = ("numpy", "cupy")
"""One engine of the host and one of the GPU, for tests that are not about interop."""


def rng(*seed: Any) -> np.random.Generator:
    """Return a generator seeded by the test case: the same case has the same inputs, other cases have others."""
    return np.random.default_rng(list(repr(seed).encode()))


def fresh(shape: tuple[int, ...], dtype: str = "bfloat16", *, spread: float = 4.0) -> np.ndarray:
    """Return random values in ``dtype``, whose magnitudes vary by powers of two."""
    generator = rng(shape, dtype, spread)
    values = generator.standard_normal(shape) * np.exp2(generator.uniform(-spread, spread, shape))
    return values.astype(np.float32).astype(FLOATS[dtype])


def fresh_fp8(shape: tuple[int, ...], dtype: str = "float8_e4m3fn", *, salt: int = 0) -> np.ndarray:
    """Return random finite FP8 numbers, normally distributed."""
    values = rng(shape, dtype, salt).standard_normal(shape).astype(np.float32)
    return values.astype(FP8[dtype])


def fresh_scale(shape: tuple[int, ...], *, low: float = 0.001, high: float = 0.1, salt: int = 0) -> np.ndarray:
    """Return random positive fp32 scales."""
    return rng(shape, low, high, salt).uniform(low, high, shape).astype(np.float32)


def assert_same_bytes(got: np.ndarray, want: np.ndarray) -> None:
    """Assert that shapes and bytes are the same; the error shows the first difference."""
    assert got.shape == want.shape
    size = np.dtype(f"u{want.dtype.itemsize}")
    a, b = np.ascontiguousarray(got).view(size), np.ascontiguousarray(want).view(size)
    different = np.argwhere(a != b)
    if different.size:
        at = tuple(different[0])
        raise AssertionError(f"{len(different)} of {b.size} differ; first at {at}: got {a[at]:#x}, want {b[at]:#x}")
