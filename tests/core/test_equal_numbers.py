"""What equals a number, a whole number or a flag: taken or refused alike in a first call and in later ones."""

from decimal import Decimal
from fractions import Fraction
from numbers import Number

import numpy as np
import pytest

import fp8core
from fp8core import GROUP_128
from fp8core.core.operation import forget

ONES, WEIGHT = np.ones((4, 128), np.float32), fp8core.quantize(np.ones((4, 128), np.float32))
SUMS = {"out": np.ones((4, 4), np.float32), "out_dtype": "float32"}
NUMBERS = {
    "beta": lambda number: fp8core.scaled_mm(WEIGHT, WEIGHT.T, beta=number, **SUMS),
    "beta of nt": lambda number: fp8core.scaled_mm_nt(WEIGHT, WEIGHT, beta=number, **SUMS),
    "epsilon": lambda number: fp8core.rms_norm_quant(ONES, ONES[0], number),
    "eps of a norm": lambda number: fp8core.rms_norm_quant(ONES, ONES[0], 1e-6, group_shape=GROUP_128, eps=number),
    "eps of silu": lambda number: fp8core.silu_and_mul_quant(ONES, group_shape=(1, 64), eps=number),
    "eps": lambda number: fp8core.quantize(ONES, group_shape=GROUP_128, eps=number),
}


@pytest.mark.parametrize(
    "number", [True, np.True_, Fraction(1), Decimal(1), 1 + 0j, None, "1", [1], np.ones(1)], ids=repr
)
@pytest.mark.parametrize("option", NUMBERS)
def test_what_is_no_number_is_refused_though_it_equals_that_of_a_cached_call(option, number):
    for _ in range(2):
        with pytest.raises(
            fp8core.DTypeError, match=f"{option.split()[0]} needs a number, got {type(number).__name__}"
        ):
            NUMBERS[option](number)
        for same in (1.0, 1, np.float32(1)):
            NUMBERS[option](same)


EQUALS = {
    "use_fast_accum": lambda one: fp8core.linear(ONES, WEIGHT, use_fast_accum=one),
    "batch_invariant": lambda one: fp8core.scaled_mm_nt(WEIGHT, WEIGHT, batch_invariant=one),
    "round_intermediate": lambda one: fp8core.silu_and_mul_quant(ONES, round_intermediate=one),
    "rows_padded": lambda one: fp8core.quantize(ONES, rows_padded=one),
    "group_shape": lambda one: fp8core.dequantize(WEIGHT.data, WEIGHT.scale, group_shape=(one, -1)),
}


class One(Number):
    """A number with no `real`, as those of SymPy are."""

    def __float__(self):
        return 1.0

    def __eq__(self, other):
        return other == 1

    def __hash__(self):
        return 1


@pytest.mark.parametrize(
    "one", [1, True, np.True_, 1.0, np.int8(1), Fraction(1), Decimal(1), 1 + 0j, One()], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("option", EQUALS)
def test_what_equals_a_flag_or_a_whole_number_is_taken_in_a_first_call_too(option, one):
    forget()
    EQUALS[option](one)


@pytest.mark.parametrize(
    "other",
    [Fraction(1, 2), Fraction(10**400), Fraction(2**60 + 1, 2**60), Decimal("sNaN"), Decimal("Infinity"), 1 + 1j],
    ids=["half", "large", "near one", "signaling", "infinite", "complex"],
)
@pytest.mark.parametrize("option", EQUALS)
def test_a_number_that_equals_no_whole_number_is_refused_by_name(option, other):
    with pytest.raises((fp8core.DTypeError, fp8core.ShapeError), match=f"{option} needs"):
        EQUALS[option](other)
