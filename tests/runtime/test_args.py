"""Each kernel's declared arguments are the parameters of its device source: their names, order and types."""

import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from fp8core.runtime import args, jit, sources
from support.problems import OPERATIONS, TARGETS

PLATFORMS = ("cuda", "hip")


def declared(platform: str) -> dict[tuple[str, str, bool], tuple[type, dict[str, Any]]]:
    """Return the declaration and the constants of each entry that the plans ask for, of every set of conditions."""
    found: dict[tuple[str, str, bool], tuple[type, dict[str, Any]]] = {}

    def prepare(target, source, entry, constants, signature, **_):
        if isinstance(signature, type):
            found[source, entry, bool(constants.get("A_VECTORS"))] = signature, dict(constants)
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
    if kinds == ["TensorMap"]:
        return name, "128s"
    return name, {"long long": "q", "int": "i", "float": "f"}.get(" ".join(kinds), "*i")


def parameters(text: str, entry: str, constants: dict[str, Any]) -> dict[str, str]:
    """Return the `struct` item of each parameter of the kernel ``entry`` in a flat source, by its name."""
    found = re.search(rf"\b{entry}\(([^{{]*?)\)\s*{{", text)
    assert found, f"no definition of {entry}"
    kept = " ".join(chosen_lines(found[1], constants))
    return dict(item_of(parameter) for parameter in kept.split(","))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_declarations_are_the_parameters(platform):
    found = declared(platform)
    entries = {entry for _, entry, _ in found}
    products = {"simt", "epilogue", "relayout", "clear_amax"}
    own = {"sm90_decode", "sm90_blockwise", "sm89_decode"} if platform == "cuda" else {"gfx9_decode"}
    assert products | own <= entries
    for (source, entry, _), (declaration, constants) in found.items():
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
