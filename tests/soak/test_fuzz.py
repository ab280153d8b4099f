"""Every public function with right arguments of every kind: the right numbers, and nothing else is written.

`python -m pytest tests/soak/test_fuzz.py --hypothesis-profile=long` draws a hundred times as many, others each time.
"""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soak import grouped_cases, moe_cases, product_cases, quantize_cases, weight_cases
from soak.arena import ODD_KINDS, Arena
from soak.strategies import Case, examples
from soak.verdicts import judge
from support.engines import MAKERS

CASES = {
    "quantize": quantize_cases.quantize,
    "dequantize": quantize_cases.dequantize,
    "rms_norm_quant": quantize_cases.rms_norm_quant,
    "silu_and_mul_quant": quantize_cases.silu_and_mul_quant,
    "scaled_mm": product_cases.scaled_mm_kn,
    "scaled_mm_nt": product_cases.scaled_mm,
    "grouped_scaled_mm_nt": grouped_cases.grouped_scaled_mm_nt,
    "moe_permute": moe_cases.moe_permute,
    "moe_unpermute": moe_cases.moe_unpermute,
    "linear": product_cases.linear,
    "Fp8Linear": product_cases.layer,
    "requantize_with_max_scale": weight_cases.requantize_with_max_scale,
    "convert_to_channelwise": weight_cases.convert_to_channelwise,
    "normalize": weight_cases.normalize,
    "all_close_1d": weight_cases.all_close_1d,
    "per_tensor_dequantize": weight_cases.per_tensor_dequantize,
    "w8a8.scaled_fp8_quant": quantize_cases.scaled_fp8_quant,
    "w8a8.cutlass_w8a8_scaled_mm": product_cases.cutlass_w8a8_scaled_mm,
    "w8a8.Fp8LinearOp": product_cases.linear_op,
}
ENGINES = [
    "numpy",
    "torch-cpu",
    pytest.param("cupy", marks=pytest.mark.gpu),
    pytest.param("torch-cuda", marks=pytest.mark.gpu),
]


@cache
def engine_of(name: str) -> Any:
    return MAKERS[name]()


def names_of(case: Case) -> tuple[str, ...]:
    return (*case.names, *case.kwargs)


@pytest.mark.parametrize("engine_name", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_right_calls_give_the_right_numbers(name, engine_name):
    engine = engine_of(engine_name)

    @examples(60)
    @given(st.data())
    def run(data):
        arena = Arena(engine_name)
        case = CASES[name](data.draw, arena, engine)
        arena.seal()
        result = judge(arena, case.ready(arena), names_of(case), written=case.written, must=case.must)
        if result is not None:
            case.check(result)

    run()


@pytest.mark.parametrize("engine_name", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_odd_layouts_are_refused_or_give_the_right_numbers(name, engine_name):
    """One operand with strided columns, turned, reversed, not folding, or between two elements."""
    engine = engine_of(engine_name)
    kinds = ODD_KINDS[:-2] if engine_name.startswith("torch") else ODD_KINDS

    @examples(40)
    @given(st.data())
    def run(data):
        arena = Arena(engine_name)
        arena.odd = data.draw(st.tuples(st.integers(0, 5), st.sampled_from(kinds)))
        case = CASES[name](data.draw, arena, engine)
        arena.seal()
        must = "refuse" if arena.refused or case.must == "refuse" else None
        result = judge(arena, case.ready(arena), (*names_of(case), "scale", "out"), written=case.written, must=must)
        if result is not None:
            case.check(result)

    run()
