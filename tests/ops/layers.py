"""Layers of small random weights, and what they have to give."""

import numpy as np

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, Fp8Linear
from support.engines import engines, fresh, fresh_fp8, fresh_scale

HOSTS = engines("numpy", "torch-cpu", "jax-cpu", "cupy", "torch-cuda")
TORCHES = engines("torch-cpu", "torch-cuda")
SCHEMES = {
    "channel": {},
    "tensor": {"weight_group_shape": PER_TENSOR, "group_shape": PER_TENSOR},
    "block": {"weight_group_shape": BLOCK_128, "group_shape": GROUP_128},
}


def bits(engine, x):
    return np.ascontiguousarray(engine.numpy(x)).view(np.uint16)


def made(engine, seed, n=48, k=256, **options):
    weight = engine.array(fresh((n, k), spread=1.0 + seed / 8))
    return Fp8Linear.from_weight(weight, **options)


def product(layer, x):
    """Return what a layer has to give, by functions that keep nothing."""
    return fp8core.linear(
        x,
        layer.weight,
        layer.weight_scale,
        bias=layer.bias,
        input_scale=layer.input_scale,
        group_shape=layer.group_shape,
    )


WEIGHT, SCALE = fresh_fp8((8, 256)), fresh_scale((8, 1))
