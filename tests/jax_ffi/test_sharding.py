"""The mesh axes, and their parts, that arrays are divided over."""

from itertools import permutations
from math import prod

import pytest

pytest.importorskip("jax")

from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8core.jax.rules import Rule
from fp8core.jax.sharding import _orders, specs_of

MESH = AbstractMesh((2, 2, 3), ("a", "b", "c"))
ROWS, CHANNELS, GROUPS = (("r",), ("k",)), (("n",), ("k",)), (("r",), ("g", "inner"))


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


@pytest.mark.parametrize(
    ("given", "sizes", "chosen"),
    [
        ([(ROWS, P("a"))], {}, {"r": "a"}),
        ([(ROWS, P("a", "b"))], {}, {"r": "a"}),  # the sums over k stay on one device
        ([(ROWS, P("a")), (ROWS, P("b"))], {}, {"r": "a"}),
        ([(ROWS, P()), (ROWS, P("b"))], {}, {"r": "b"}),
        ([(ROWS, P("a")), (CHANNELS, P("b"))], {}, {"r": "a", "n": "b"}),
        ([(ROWS, P("a")), (CHANNELS, P("a"))], {}, {"r": "a"}),
        ([(ROWS, P(("a", "b"))), (CHANNELS, P("b"))], {}, {"r": ("a", "b")}),
        ([(GROUPS, P("c", "a"))], {"g": 4}, {"r": "c", "g": "a"}),
        ([(GROUPS, P("c", "a"))], {"g": 3}, {"r": "c"}),
        ([(GROUPS, P("c", ("a", "b")))], {"g": 4}, {"r": "c", "g": ("a", "b")}),
        ([(GROUPS, P("c", ("a", "b")))], {"g": 2}, {"r": "c"}),
    ],
)
def test_the_first_argument_that_is_sharded_along_a_factor_decides(given, sizes, chosen):
    arguments = tuple(axes for axes, _ in given)
    rule = Rule(arguments, (), frozenset({"k"}), {**sizes, "inner": 64})
    shardings = [NamedSharding(MESH, spec) for _, spec in given]
    assert specs_of(rule, shardings, [(24, 256)] * len(given), MESH) == chosen
