"""The parts of mesh axes that arrays may be divided over."""

from itertools import permutations
from math import prod

import pytest

pytest.importorskip("jax")

from fp8core.jax.sharding import _orders


def primes(number):
    """Return the prime factors of a number, by division."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


@pytest.mark.parametrize("number", [*range(1, 65), 72, 96, 210])
def test_prime_factors_come_in_every_order_once(number):
    orders = _orders(number)
    assert set(orders) == set(permutations(primes(number)))
    assert len(orders) == len(set(orders))


@pytest.mark.parametrize("number", [4096, 1 << 16, 3 << 15])
def test_an_axis_of_thousands_of_devices_has_few_orders(number):
    """A list of all permutations of so many factors would take hours."""
    orders = _orders(number)
    assert len(orders) == (1 if number % 3 else 16)
    assert all(prod(order) == number for order in orders)
