"""Compares `fp8core.quantize` on a framework with the reference."""

import numpy as np

import fp8core
from fp8core import PER_TOKEN
from support import reference
from support.engines import assert_same_bytes


def check(engine, x, **options):
    got = fp8core.quantize(engine.array(x), **options)
    dtype = options.pop("dtype", "float8_e4m3fn")
    shape = tuple(options.pop("group_shape", PER_TOKEN))
    options.pop("scale_layout", None)
    want = reference.quantize(x, dtype, shape, **options)
    assert_same_bytes(engine.codes(got.data), want.codes)
    scale = np.ascontiguousarray(engine.numpy(got.scale))
    if shape == (-1, -1):
        assert scale.shape == (1,)
    assert_same_bytes(scale.reshape(want.scale.shape), want.scale)
    assert str(engine.numpy(got.data).dtype) == dtype
