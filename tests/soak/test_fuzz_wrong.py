"""Every public function with one argument, or several, that no call can have: a refusal that names it, nothing written."""

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8core
from fp8core import w8a8
from soak.good_calls import GOOD, Good
from soak.nonsense import NONSENSE
from soak.strategies import examples
from soak.test_fuzz import ENGINES, engine_of
from soak.verdicts import check_words, describe, refusal_of

NUMPY_ONLY = ("masked", "reversed", "read-only", "misaligned")
"""What other frameworks do not have, or lose on the way."""
PAIRS = [(name, parameter) for name, good in GOOD.items() for parameter in good().kinds]


def crossed(engine: Any, value: Any) -> Any:
    """Return an array of the engine, with strides that it can have, in place of one of NumPy's."""
    if type(value) is tuple:
        return tuple(crossed(engine, part) for part in value)
    if not isinstance(value, np.ndarray) or engine.name == "numpy":
        return value
    if value.ndim == 2 and value.strides[0] == value.itemsize:  # a turned weight
        return engine.array(np.ascontiguousarray(value.T)).T
    if value.ndim and value.shape[-1] > 1 and value.strides[-1] == 2 * value.itemsize:
        return engine.array(np.repeat(value, 2, -1))[..., ::2]
    if value.ndim == 2 and value.strides[0] == 0:
        return stretched(engine.array(np.ascontiguousarray(value[:1])), value.shape)
    return engine.array(np.ascontiguousarray(value).reshape(value.shape))


def stretched(row: Any, shape: tuple[int, ...]) -> Any:
    """Return a view of a row in which it stands for every row."""
    if hasattr(row, "expand"):
        return row.expand(*shape)
    import cupy

    codes = row.codes if isinstance(row, fp8core.Float8Array) else row
    view = cupy.lib.stride_tricks.as_strided(codes, shape, (0, codes.strides[1]))
    return fp8core.Float8Array(view, row.dtype) if isinstance(row, fp8core.Float8Array) else view


def function_of(engine: Any, good: Good) -> Any:
    """Return what is called; a layer with arrays of the engine."""
    layer = good.function
    if engine.name == "numpy" or not isinstance(layer, fp8core.Fp8Linear):
        return layer
    return fp8core.Fp8Linear(engine.array(layer.weight), engine.array(layer.weight_scale))


def bytes_of(engine: Any, value: Any) -> bytes | None:
    """Return the bytes of an array."""
    if type(value) is tuple:
        return b"".join(bytes_of(engine, part) or b"" for part in value)
    if not hasattr(value, "shape") or isinstance(value, (type, np.generic)):
        return None
    return np.ascontiguousarray(engine.numpy(value)).tobytes()


def outcome(engine: Any, good: Good, wrong: dict[str, Any]) -> str | None:
    """Return what is wrong with the answer to a wrong call, or None."""
    arguments = {name: crossed(engine, value) for name, value in (good.arguments | wrong).items()}
    before = {name: bytes_of(engine, value) for name, value in arguments.items()}
    names = [alias for name in wrong for alias in (name, *good.also.get(name, ()))]
    try:
        result, error = refusal_of(lambda: function_of(engine, good)(**arguments))
    except Exception as other:
        return f"raises {type(other).__name__}: {str(other)[:100]}"
    for name, was in before.items():
        if error is not None and bytes_of(engine, arguments[name]) != was:
            return f"refuses and writes {name}: {error}"
    if error is None:
        return f"is taken, and gives {describe(result)}"
    try:
        check_words(error, names)
    except AssertionError as words:
        return str(words)
    return None


@pytest.mark.parametrize("engine_name", ENGINES)
@pytest.mark.parametrize("name", GOOD)
def test_the_good_call_is_good(name, engine_name):
    good, engine = GOOD[name](), engine_of(engine_name)
    function = function_of(engine, good)
    _, error = refusal_of(lambda: function(**{k: crossed(engine, v) for k, v in good.arguments.items()}))
    assert error is None


@pytest.mark.parametrize("engine_name", ENGINES)
@pytest.mark.parametrize(("name", "parameter"), PAIRS, ids=[f"{n}-{p}" for n, p in PAIRS])
def test_nonsense_is_refused_by_its_name(name, parameter, engine_name):
    engine, found = engine_of(engine_name), {}
    kind = GOOD[name]().kinds[parameter]
    for label, make in NONSENSE[kind].items():
        if engine_name != "numpy" and label in NUMPY_ONLY:
            continue
        good = GOOD[name]()
        value = make(good.arguments[parameter])
        if (said := _outcome_of(engine, good, parameter, value)) is not None:
            found[label] = said
    assert not found, f"{name}({parameter}=...):\n" + "\n".join(f"  {label}: {said}" for label, said in found.items())


NOT_TAKEN = {
    "high": ("uint8", "e8m0"),
    "fp8": ("uint8", "e8m0", "float16", "float32"),
    "fp8 of any shape": ("uint8", "e8m0", "float16", "float32"),
    "scale": ("uint8", "float16", "e4m3", "e5m2"),
    "scale, there": ("uint8", "float16", "e4m3", "e5m2"),
    "bias": ("uint8", "float8"),
    "out": ("uint8", "e8m0"),
    "one float": ("uint8", "float16", "float8"),
}
"""By kind of array, what a refusal of another dtype must not recommend."""
ARRAYS = [
    (name, parameter)
    for name, good in GOOD.items()
    for parameter, kind in good().kinds.items()
    if kind in NOT_TAKEN and good().arguments[parameter] is not None
]


@pytest.mark.parametrize(("name", "parameter"), ARRAYS, ids=[f"{n}-{p}" for n, p in ARRAYS])
def test_a_dtype_is_refused_with_those_that_are_taken(name, parameter):
    good = GOOD[name]()
    value = good.arguments[parameter]
    for dtype in (np.float64, np.uint8, np.int32, np.int64):
        _, error = refusal_of(lambda dtype=dtype: good.function(**good.arguments | {parameter: value.astype(dtype)}))
        needed = str(error).split(", got ")[0]
        assert "float" in needed
        assert not [other for other in ("int32", "int64", *NOT_TAKEN[good.kinds[parameter]]) if other in needed], error


def _outcome_of(engine: Any, good: Good, parameter: str, value: Any) -> str | None:
    try:
        crossed(engine, value)
    except (TypeError, KeyError, AttributeError):  # a dtype that the framework does not have
        return None
    return outcome(engine, good, {parameter: value})


@pytest.mark.parametrize("name", GOOD)
def test_several_wrong_arguments_are_refused_by_one_of_their_names(name):
    engine = engine_of("numpy")

    @examples(40)
    @given(st.data())
    def run(data):
        good = GOOD[name]()
        parameters = data.draw(st.sets(st.sampled_from(tuple(good.kinds)), min_size=1, max_size=3))
        wrong = {}
        for parameter in sorted(parameters):
            label = data.draw(st.sampled_from(tuple(NONSENSE[good.kinds[parameter]])))
            wrong[parameter] = NONSENSE[good.kinds[parameter]][label](good.arguments[parameter])
        said = outcome(engine, good, wrong)
        assert said is None, f"{name} with wrong {sorted(wrong)} {said}"

    run()


def test_no_public_function_is_left_out():
    """What is not fuzzed here takes no arrays, or is checked below."""
    covered = {name.split(",")[0].removeprefix("w8a8.").split(".")[0] for name in GOOD}
    covered |= {"explain", "tune", "capabilities"}  # below
    covered |= {"tune_shapes", "load_tunings", "save_tunings"}  # no arrays
    covered |= {"normalize_e4m3fnuz_to_e4m3fn"}  # the same code, the other way
    public = {name for name in fp8core.__all__ if inspect.isfunction(getattr(fp8core, name))}
    assert not public - covered
    thin = {name for name in w8a8.__all__ if inspect.isfunction(getattr(w8a8, name)) and name not in fp8core.__all__}
    named_products = {name for name in thin if name.endswith("scaled_mm")}
    assert thin - covered - named_products == {
        *("cutlass_block_fp8_supported", "cutlass_fp8_supported", "cutlass_group_gemm_supported"),
        *("maybe_create_device_identity", "sparse_cutlass_supported"),
    }


PRODUCTS = ("scaled_mm", "scaled_mm_nt", "linear")
EXPLAINED = (
    *("quantize", "quantize, static", "rms_norm_quant", "silu_and_mul_quant", "dequantize", "grouped_scaled_mm_nt"),
    *("moe_permute", "moe_unpermute"),
    *PRODUCTS,
)
UNREAD = ("stream", "out", "one float", "epsilon")
"""What says nothing about which kernel runs."""


@pytest.mark.parametrize(
    ("function", "name"),
    [*((fp8core.explain, name) for name in EXPLAINED), *((fp8core.tune, name) for name in PRODUCTS)],
    ids=[*(f"explain-{name}" for name in EXPLAINED), *(f"tune-{name}" for name in PRODUCTS)],
)
def test_explain_and_tune_refuse_what_the_call_refuses(function, name):
    kinds = {parameter: kind for parameter, kind in GOOD[name]().kinds.items() if kind not in UNREAD}
    for parameter, kind in kinds.items():
        for label, make in NONSENSE[kind].items():
            good = GOOD[name]()
            wrong = good.arguments | {parameter: make(good.arguments[parameter])}
            _, error = refusal_of(lambda good=good, wrong=wrong: function(good.function, **wrong))
            assert error is not None, f"{name}({parameter}={label})"
            check_words(error, (parameter,))


@pytest.mark.parametrize("name", GOOD)
def test_a_wrong_call_signature_is_a_type_error(name):
    good = GOOD[name]()
    with pytest.raises(TypeError):
        good.function(**good.arguments, nonsense=1)
    with pytest.raises(TypeError):
        good.function()


def test_capabilities_refuses_what_is_no_device():
    for device in ("text", 1.5, object(), -1, 99):
        _, error = refusal_of(lambda device=device: fp8core.capabilities(device))
        assert error is not None, f"took {device!r}"
        check_words(error, ("device",))
