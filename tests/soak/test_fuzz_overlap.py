"""Operands that share memory: refused before anything is written, or the numbers that separate memory gives."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8core
from fp8core import GROUP_128, PER_TENSOR, PER_TOKEN, LayoutError
from soak.arena import Arena, Place
from soak.strategies import codes, examples, numbers, same, scales
from soak.test_fuzz import ENGINES, engine_of
from soak.verdicts import check_words, refusal_of

M, K, N = 4, 64, 32
FN, BF16, F32 = "float8_e4m3fn", "bfloat16", "float32"


def _codes(*shape: int) -> np.ndarray:
    return codes(shape, FN, "ordinary", sum(shape))


def _floats(*shape: int, dtype: str = BF16) -> np.ndarray:
    return numbers(shape, dtype, "ordinary", sum(shape))


def _quantize(group: tuple[int, int], shape: tuple[int, ...]):
    operands = {"x": _floats(M, K, dtype=F32), "data": _codes(M, K), "scale": scales(shape, 1)}
    return (
        operands,
        {"data", "scale"},
        lambda o: fp8core.quantize(o["x"], group_shape=group, out=(o["data"], o["scale"])),
    )


def _static():
    operands = {"x": _floats(M, K), "given": scales((M, 1), 1), "out": _codes(M, K)}
    return operands, {"out"}, lambda o: fp8core.quantize(o["x"], scale=o["given"], out=o["out"])


def _bounded():
    operands = {"x": _floats(M, K), "scale_ub": scales((1,), 1), "out": _codes(M, K)}
    return operands, {"out"}, lambda o: fp8core.quantize(o["x"], scale_ub=o["scale_ub"], out=o["out"])


def _dequantize():
    operands = {"q": _codes(M, K), "scale": scales((M, 1), 1), "out": _floats(M, K, dtype=F32)}
    return operands, {"out"}, lambda o: fp8core.dequantize(o["q"], o["scale"], group_shape=PER_TOKEN, out=o["out"])


def _norm():
    operands = {"x": _floats(M, K), "weight": _floats(K), "residual": _floats(M, K), "data": _codes(M, K)}
    operands["scale"] = scales((M, 1), 1)

    def call(o: dict[str, Any]) -> Any:
        return fp8core.rms_norm_quant(o["x"], o["weight"], 1e-5, residual=o["residual"], out=(o["data"], o["scale"]))

    return operands, {"residual", "data", "scale"}, call


def _silu():
    operands = {"x": _floats(M, 2 * K), "data": _codes(M, K), "scale": scales((M, 1), 1)}
    return operands, {"data", "scale"}, lambda o: fp8core.silu_and_mul_quant(o["x"], out=(o["data"], o["scale"]))


def _product():
    operands = {"a": _codes(M, K), "weight": _codes(N, K), "scale_a": scales((M, 1), 1), "scale_b": scales((N, 1), 2)}
    operands |= {"bias": _floats(N), "out": _floats(M, N), "amax": scales((1,), 3)}

    def call(o: dict[str, Any]) -> Any:
        names = "a", "weight", "scale_a", "scale_b"
        return fp8core.scaled_mm_nt(*(o[n] for n in names), bias=o["bias"], out=o["out"], amax=o["amax"])

    return operands, {"out", "amax"}, call


def _grouped():
    operands = {
        "a": _codes(M, K),
        "weight": _codes(2, N, K),
        "scale_a": scales((M, 1), 1),
        "scale_b": scales((2, N), 2),
    }
    operands |= {"bias": _floats(2, N), "offs": np.array([1, M], np.int32), "out": _floats(M, N)}
    return operands, {"out"}, lambda o: fp8core.grouped_scaled_mm_nt(**o)


def _unpermute():
    operands = {"y": _floats(2 * M, K), "inverse": np.arange(2 * M, dtype=np.int32).reshape(M, 2)}
    operands |= {"topk_weights": _floats(M, 2, dtype=F32), "out": _floats(M, K)}
    return operands, {"out"}, lambda o: fp8core.moe_unpermute(**o)


def _linear():
    operands = {"x": _floats(M, K), "weight": _codes(N, K), "weight_scale": scales((N, 1), 2), "out": _floats(M, N)}
    return operands, {"out"}, lambda o: fp8core.linear(o["x"], o["weight"], o["weight_scale"], out=o["out"])


def _layer():
    operands, written, _ = _linear()
    return operands, written, lambda o: fp8core.Fp8Linear(o["weight"], o["weight_scale"])(o["x"], out=o["out"])


def _requantize():
    operands = {"weight": _codes(N, K), "weight_scale": scales((2,), 1), "out": _codes(N, K)}

    def call(o: dict[str, Any]) -> Any:
        return fp8core.requantize_with_max_scale(o["weight"], o["weight_scale"], [8, N - 8], out=o["out"])

    return operands, {"out"}, call


def _normalize():
    operands = {"weight": _codes(N, K), "weight_scale": scales((1,), 1), "out": _codes(N, K)}

    def call(o: dict[str, Any]) -> Any:
        return fp8core.normalize_e4m3fn_to_e4m3fnuz(o["weight"], o["weight_scale"], out=o["out"])

    return operands, {"out"}, call


CALLS = {
    "quantize per tensor": lambda: _quantize(PER_TENSOR, (1,)),
    "quantize per token": lambda: _quantize(PER_TOKEN, (M, 1)),
    "quantize by groups": lambda: _quantize(GROUP_128, (M, 1)),
    "quantize by small groups": lambda: _quantize((1, 16), (M, 4)),
    "quantize static": _static,
    "quantize bounded": _bounded,
    "dequantize": _dequantize,
    "rms_norm_quant": _norm,
    "silu_and_mul_quant": _silu,
    "scaled_mm_nt": _product,
    "grouped_scaled_mm_nt": _grouped,
    "moe_unpermute": _unpermute,
    "linear": _linear,
    "Fp8Linear": _layer,
    "requantize_with_max_scale": _requantize,
    "normalize": _normalize,
}


def laid_over(data: Any, arena: Arena, operands: dict[str, np.ndarray], written: set[str]) -> dict[str, Place]:
    """Lay out operands one after another, but one that is written over another operand's memory."""
    places = {name: arena.put(values) for name, values in operands.items()}
    moved = data.draw(st.sampled_from(sorted(written)))
    under = data.draw(st.sampled_from(sorted(set(operands) - {moved})))
    room = operands[under].nbytes
    shift = data.draw(st.sampled_from((0, 0, 4, 16, K, 2 * K, 4 * K, -4, -16, -K, room - 4)))
    places[moved] = arena.put(operands[moved], at=places[under].first + shift)
    return places


@pytest.mark.parametrize("engine_name", ENGINES)
@pytest.mark.parametrize("name", CALLS)
def test_shared_memory_is_refused_or_does_no_harm(name, engine_name):
    engine_of(engine_name)

    @examples(60)
    @given(st.data())
    def run(data):
        operands, written, call = CALLS[name]()
        shared, apart = Arena(engine_name), Arena(engine_name)
        places = laid_over(data, shared, operands, written)
        separate = {name: apart.put(np.array(shared.seen(place))) for name, place in places.items()}
        shared.seal(), apart.seal()
        call({name: apart.array(place) for name, place in separate.items()})
        _, error = refusal_of(lambda: call({name: shared.array(place) for name, place in places.items()}))
        if error is not None:
            assert isinstance(error, LayoutError), repr(error)
            assert not shared.changed(), f"refused, and yet written: {error}"
            check_words(error, (*operands, "out"))
            return
        for result in sorted(written):
            same(shared.values(places[result]), apart.values(separate[result]), result)

    run()
