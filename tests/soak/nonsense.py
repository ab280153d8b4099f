"""For every kind of argument (`soak.good_calls`) what has to be refused."""

from collections.abc import Callable
from typing import Any

import numpy as np

from soak.good_calls import N

NAN, INF = float("nan"), float("inf")


def _strided(x: np.ndarray) -> np.ndarray:
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def _misaligned(x: np.ndarray) -> np.ndarray:
    raw = np.zeros(x.nbytes + 1, np.uint8)
    held = np.ndarray(x.shape, x.dtype, raw, 1)
    held[...] = x
    return held


def _read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def _made(value: Any) -> Callable[[np.ndarray], Any]:
    return lambda _: value


NO_ARRAYS = {repr(v): _made(v) for v in ("text", [[1.0]], {}, 1j, (1.0,), b"bytes", np.array, NAN)}
NUMBERS = {
    "int32": np.int32,
    "int64": np.int64,
    "float64": np.float64,
    "bool": bool,
    "complex64": np.complex64,
    "int8": np.int8,
}
NO_DTYPES = {name: lambda x, to=dtype: np.ones(x.shape, to) for name, dtype in NUMBERS.items()}
BAD_LAYOUTS = {"strided columns": _strided, "0-d": lambda x: x.reshape(-1)[:1].reshape(())}
OBJECTS = {"object()": _made(object()), "None": _made(None)}
SHORTER = {
    "one shorter": lambda x: np.ascontiguousarray(x[..., :-1]),
    "one longer": lambda x: np.concatenate([x, x[..., :1]], -1),
}


WRONG_SHAPES = {
    "a row": lambda x: x[0],
    "three axes": lambda x: x[None],
    "one token less": lambda x: x[:-1].copy(),
    "strided": _strided,
    "turned": lambda x: np.ascontiguousarray(x.T).T,
}
"""For matrices of a row for each token, without gaps."""


def _values(*values: Any) -> dict[str, Callable[[Any], Any]]:
    return {repr(value): _made(value) for value in values}


NO_SCALES = {
    **{name: made for name, made in NO_ARRAYS.items() if name != "nan"},
    **NO_DTYPES,
    "of five": _made(np.ones(5, np.float32)),
    "of three axes": _made(np.ones((1, 5, 1), np.float32)),
    "empty": _made(np.ones(0, np.float32)),
    "float16": lambda x: np.ones(np.shape(x), np.float16),
    "misaligned": lambda x: _misaligned(np.ones(np.shape(x) or (1,), np.float32)),
}
ANY_SCALES = {k: v for k, v in NO_SCALES.items() if not k.startswith(("of", "empty"))}
"""Where shapes do not matter."""
NO_GROUPS = _values(
    128, "token", (1,), (1, 2, 3), (0, 128), (-2, 1), (1.5, 128), ("1", 128), (1, None), (1, NAN), {}, ((1, 2), 3)
)
NO_STREAMS = _values("text", 1.5, -1, 1 << 64, True, [0], (0,), 1j, {}, np.int32(-1), np.ones(2, int)) | {
    "object()": _made(object())
}
NONSENSE: dict[str, dict[str, Callable[[Any], Any]]] = {
    "high": {
        **NO_ARRAYS,
        **NO_DTYPES,
        **BAD_LAYOUTS,
        **OBJECTS,
        "uint8": lambda x: np.ones(x.shape, np.uint8),
        "misaligned": _misaligned,
        "masked": lambda x: np.ma.masked_array(x, x > 0),
        "reversed": lambda x: x[::-1] if x.ndim > 1 else x[::-1][None][0],
    },
    "fp8": {
        **NO_ARRAYS,
        **NO_DTYPES,
        **BAD_LAYOUTS,
        **OBJECTS,
        "bytes": lambda x: x.view(np.uint8),
        "float32": lambda x: x.astype(np.float32),
    },
    "fp8 of any shape": {**NO_ARRAYS, **NO_DTYPES, **OBJECTS, "bytes": lambda x: x.view(np.uint8)},
    "scale": NO_SCALES,
    "scale, there": {**NO_SCALES, "None": _made(None)},
    "scales, any": ANY_SCALES | {"None": _made(None)},
    "scales, any, or none": ANY_SCALES,
    "bias": {**NO_ARRAYS, **NO_DTYPES, **SHORTER, "a row": lambda x: x[None], "strided": _strided},
    "ends": {
        **NO_ARRAYS,
        **{name: made for name, made in NO_DTYPES.items() if name != "int32"},
        **SHORTER,
        **OBJECTS,
        "0-d": lambda x: x[:1].reshape(()),
        "a column": lambda x: x[:, None],
        "strided": _strided,
        "misaligned": _misaligned,
        "uint8": lambda x: x.astype(np.uint8),
        "float32": lambda x: x.astype(np.float32),
        "a number": _made(3),
    },
    "experts": {
        **NO_ARRAYS,
        **{name: made for name, made in NO_DTYPES.items() if name not in ("int32", "int64")},
        **OBJECTS,
        **WRONG_SHAPES,
        "misaligned": _misaligned,
        "uint8": lambda x: x.astype(np.uint8),
        "float32": lambda x: x.astype(np.float32),
        "a number": _made(3),
    },
    "places": {
        **NO_ARRAYS,
        **{name: made for name, made in NO_DTYPES.items() if name != "int32"},
        **OBJECTS,
        **WRONG_SHAPES,
        "misaligned": _misaligned,
        "uint8": lambda x: x.astype(np.uint8),
        "a number": _made(3),
    },
    "weights of choices": {**NO_ARRAYS, **NO_DTYPES, **SHORTER, **WRONG_SHAPES, "misaligned": _misaligned},
    "out": {
        **{name: made for name, made in NO_ARRAYS.items() if name != "(1.0,)"},
        **NO_DTYPES,
        **SHORTER,
        "read-only": _read_only,
        "strided columns": _strided,
        "overlapping rows": lambda x: np.lib.stride_tricks.as_strided(x, x.shape, (0, x.itemsize)),
        "three": lambda x: (x, None, None),
        "a number": _made(3),
    },
    "one float": {**NO_ARRAYS, **NO_DTYPES, "two": _made(np.ones(2, np.float32)), "read-only": _read_only},
    "group": {**NO_GROUPS, "None": _made(None)},
    "group or none": NO_GROUPS,
    "group of a product": {**NO_GROUPS, **_values((1, 64), (1, 96), (-1, 1), (2, 2), (128, 128), None)},
    "group of a weight": {**NO_GROUPS, **_values((96, 96), (-1, 1), (1, 64), (2, 2), None)},
    "fp8 dtype": _values("float16", "float7", 3, np.int32, "", b"float8_e4m3fn", [], "uint8") | OBJECTS,
    "result dtype": _values("float64", "float7", 3, np.int32, [], "uint8") | {"object()": _made(object())},
    "dtype": _values("float8_e4m3fn", "float64", "float7", 3, np.int32, [], "uint8") | {"object()": _made(object())},
    "eps": _values("a", None, NAN, INF, 0.0, -1.0, 1e-300, [1.0], 1j),
    "epsilon": _values("a", None, [1.0], 1j),
    "bound": _values("a", -1.0, 0.0, NAN, [1.0], 1j, np.ones(2, np.float32), np.ones(1, np.int32)),
    "format": _values("e4m3", "", 3, [], None, b"float32"),
    "layout": _values("nm", "", 3, [], None),
    "rows": _values(20.5, "20", [20], 1j, NAN, 1 << 31, 10**20),
    "count": _values(None, 2.5, "2", [2], 1j, NAN, -1, 1 << 31),
    "widths": _values(None, 3, "44", [N - 0.5, 0.5], [str(N)], [N + 1, -1], [None, N], [NAN]),
    "widths of rows": _values(
        None, 3, "44", [N - 0.5, 0.5], [str(N)], [N + 1, -1], [None, N], [NAN], [N - 1], [], [1 << 70]
    ),
    "stream": NO_STREAMS,
    "flag": _values("text", 2, 0.5, None, [], [True], np.ones(3), {}) | {"object()": _made(object())},
}
