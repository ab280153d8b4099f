"""What a kernel's arguments are declared to be: the parameters of its device source, and the numbers of its calls."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest

from fp8core.errors import UnsupportedProblemError
from fp8core.kernels.fused.rms_norm import RmsNormArgs
from fp8core.kernels.fused.silu import SiluArgs
from fp8core.kernels.quantize.prepare import QuantizeArgs
from fp8core.kernels.weights.allclose import AllCloseArgs
from fp8core.kernels.weights.dequantize import DequantizeArgs
from fp8core.kernels.weights.expand import ExpandArgs
from fp8core.kernels.weights.fnuz import NormalizeArgs
from fp8core.kernels.weights.requantize import RequantizeArgs
from fp8core.runtime import args, jit, plans, sources
from support.plans import OPERATIONS
from support.targets import TARGETS

PLATFORMS = ("cuda", "hip")


def declared(platform: str) -> dict[tuple[object, ...], tuple[type, dict[str, Any]]]:
    """Return the declaration and the constants of each entry that the plans ask for, of every set of conditions."""
    found: dict[tuple[object, ...], tuple[type, dict[str, Any]]] = {}

    def prepare(target, source, entry, constants, signature, **_):
        conditions = (bool(constants.get(name)) for name in ("FP8_A_VECTORS", "FP8_PHASES"))
        found[(source, entry, *conditions)] = signature, dict(constants)
        return mock.Mock()

    with mock.patch.object(jit, "prepare", prepare):
        for operation in OPERATIONS.values():
            for target in TARGETS:
                if target.platform == platform:
                    for plan in operation(target):
                        plan()
    return found


def chosen_lines(text: str, constants: dict[str, Any]) -> Iterator[str]:
    """Give the lines of a parameter list that the preprocessor leaves: its conditions are constants that are not 0."""
    keep = [True]
    for line in text.splitlines():
        word = line.strip().split()
        if word[:1] == ["#if"]:
            keep.append(bool(constants[word[1]]))
        elif word[:1] == ["#else"]:
            keep[-1] = not keep[-1]
        elif word[:1] == ["#endif"]:
            keep.pop()
        elif all(keep) and not line.startswith("#"):
            yield re.sub(r"//.*", "", line)


def item_of(parameter: str) -> tuple[str, str]:
    """Return the name of a C++ parameter and its `struct` item."""
    *words, name = re.findall(r"\w+|\*", parameter)
    kinds = [word for word in words if word not in ("const", "__restrict__", "__grid_constant__")]
    if "*" in kinds:
        return name, "P"
    if kinds[0] == "Shards":
        return name, "*i"
    return name, {"long long": "q", "int": "i", "float": "f", "TensorMap": "128s", "PhasedMaps": "2112s"}[
        " ".join(kinds)
    ]


def parameters(text: str, entry: str, constants: dict[str, Any]) -> dict[str, str]:
    """Return the `struct` item of each parameter of the kernel ``entry`` in a flat source, by its name."""
    text = text.replace("\\\n", " ")
    for name, list_ in re.findall(r"^#define (\w+_PARAMETERS) (.*)$", text, re.MULTILINE):
        text = re.sub(rf"(?<!define ){name}\b", list_, text)
    found = re.search(rf"\b{entry}\(([^{{]*?)\)\s*{{", text)
    assert found, f"no definition of {entry}"
    kept = " ".join(chosen_lines(found[1], constants))
    return dict(item_of(parameter) for parameter in kept.split(","))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_declarations_are_the_parameters(platform):
    found = declared(platform)
    assert {source for source, *_ in found} == set(sources.names(platform))
    for (source, entry, *_), (declaration, constants) in found.items():
        got = parameters(sources.flatten(platform, source), entry, constants)
        assert list(args.fields(declaration).items()) == list(got.items()), f"{declaration.__name__} of {entry}"


def test_a_difference_is_seen():
    text = """KERNEL(256)
    kernel(const __grid_constant__ TensorMap map, // a comment, with a comma
    #if A_VECTORS
           const byte *x, long long x_stride,
    #else
           float upper,
    #endif
           const float *__restrict__ scale, int m) { body(); }"""
    assert parameters(text, "kernel", {"A_VECTORS": 0}) == {"map": "128s", "upper": "f", "scale": "P", "m": "i"}
    assert list(parameters(text, "kernel", {"A_VECTORS": 4})) == ["map", "x", "x_stride", "scale", "m"]
    with pytest.raises(AssertionError, match="no definition"):
        parameters(text, "other", {})
    shared = "#define OUR_PARAMETERS const byte *x, \\\n int m\nKERNEL(256)\nkernel(OUR_PARAMETERS) {"
    assert parameters(shared, "kernel", {}) == {"x": "P", "m": "i"}
    with pytest.raises(KeyError, match="unsigned"):
        parameters("kernel(unsigned m) {", "kernel", {})


PLANS = {
    plans.QuantizeNumbers: (QuantizeArgs, {"cols": 7}),
    plans.DequantizeNumbers: (DequantizeArgs, {"cols": 7, "column_tiles": 8}),
    plans.RmsNormNumbers: (RmsNormArgs, {"cols": 7, "inverse_cols": 0.5}),
    plans.SiluNumbers: (SiluArgs, {"cols": 7}),
    plans.NormalizeNumbers: (NormalizeArgs, {}),
    plans.AllCloseNumbers: (AllCloseArgs, {}),
    plans.RequantizeNumbers: (RequantizeArgs, {"shards": (1, 2), "rows": 5, "cols": 7, "column_tiles": 8}),
    plans.ExpandNumbers: (ExpandArgs, {"shards": (1, 2), "rows": 5}),
}


class Nested(NamedTuple):
    """Another declaration among the fields, whose fields stand in its place."""

    stride: args.Int64
    ends: args.Int32Array
    data: args.Pointer


class Outer(NamedTuple):
    x: args.Pointer
    rows: args.Int32
    nested: Nested
    scale: args.Float32
    map: args.TensorMap


def test_a_declaration_within_another_is_its_fields():
    of_nested = {"stride": "q", "ends": "*i", "data": "P"}
    assert args.fields(Outer) == {"x": "P", "rows": "i", **of_nested, "scale": "f", "map": "128s"}
    assert args.items(Outer, ends=2) == ("P", "i", "q", "2i", "P", "f", "128s")
    assert args.numbers(Outer(0, 3, Nested(4, (5, 6), 0), 0.5, b"")) == (3, 4, 5, 6, 0.5)


@pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind.__name__)
def test_numbers_become_the_arguments_of_their_names(kind):
    declared, others = PLANS[kind]
    numbers = kind(*range(100, 100 + len(kind._fields)))
    given = plans.arguments(declared, numbers, **others)
    known = {**numbers._asdict(), **others}
    for name, item in args.fields(declared).items():
        assert getattr(given, name) == (0 if item == "P" else known[name])


def test_an_extent_that_32_bits_do_not_hold_is_refused():
    fits = DequantizeArgs(0, 1, 0, 1, 1, 0, 1, 1 << 40, (1 << 31) - 1, 1)
    assert args.numbers(fits)[-3:-1] == (1 << 40, (1 << 31) - 1)
    with pytest.raises(UnsupportedProblemError, match=r"cols needs to be below 2\*\*31 on a GPU, got 2,147,483,648"):
        args.numbers(fits._replace(cols=1 << 31))
