"""What a kernel's arguments are declared to be, beside what its source says."""

import re
from typing import Any

import pytest

from fp8core.kernels.fused.rms_norm import RmsNormArgs
from fp8core.kernels.fused.silu import SiluArgs
from fp8core.kernels.quantize.prepare import QuantizeArgs
from fp8core.kernels.weights.allclose import AllCloseArgs
from fp8core.kernels.weights.dequantize import DequantizeArgs
from fp8core.kernels.weights.expand import ExpandArgs
from fp8core.kernels.weights.fnuz import NormalizeArgs
from fp8core.kernels.weights.requantize import RequantizeArgs
from fp8core.runtime import args, plans, sources

DECLARED: dict[str, tuple[str, Any]] = {
    **{
        f"quantize/{name}": (f"quantize_{name}", QuantizeArgs)
        for name in ("rowwise", "rowwise_unaligned", "tensorwise", "elementwise")
    },
    "fused/rms_norm": ("rms_norm_quant", RmsNormArgs),
    "fused/silu": ("silu_and_mul_quant", SiluArgs),
    "weights/dequantize": ("dequantize", DequantizeArgs),
    "weights/requantize": ("requantize", RequantizeArgs),
    "weights/normalize": ("normalize", NormalizeArgs),
    "weights/expand": ("expand", ExpandArgs),
    "weights/all_close": ("all_close", AllCloseArgs),
}
"""Of each portable source: its kernel, and the declaration of the arguments."""


def parameters(platform: str, source: str, entry: str) -> list[tuple[str, str]]:
    """Return the name and the `struct` item of each parameter in the text that is compiled."""
    text = re.sub(r"//[^\n]*|^#line[^\n]*\n", "", sources.flatten(platform, source), flags=re.MULTILINE)
    text = text.replace("\\\n", " ")
    for name, body in re.findall(r"^#define (\w+_PARAMETERS)(.*)$", text, re.MULTILINE):
        text = re.sub(rf"(?<!define ){name}\b", body.replace("\\", ""), text)
    found = re.search(rf"KERNEL\([^()]*\)\s*{entry}\(([^()]*)\)", text)
    assert found, f"{source} has no kernel {entry}"
    items = []
    for parameter in found[1].split(","):
        kind, name = re.fullmatch(r"\s*(.*?[\s*])(\w+)\s*", parameter, re.DOTALL).groups()
        kind = kind.removeprefix("const").strip()
        item = {"long long": "q", "int": "i", "float": "f"}.get(kind, "P" if kind.endswith("*") else "*i")
        assert item != "*i" or kind.startswith("Shards<"), f"{source}: {kind} {name}"
        items.append((name, item))
    return items


@pytest.mark.parametrize("platform", ["cuda", "hip"])
@pytest.mark.parametrize("source", DECLARED)
def test_the_source_takes_what_is_declared(source, platform):
    entry, declared = DECLARED[source]
    assert parameters(platform, source, entry) == list(args.fields(declared).items())


def test_every_portable_kernel_is_declared():
    assert set(DECLARED) == set(sources.portable())


PLANS = {
    plans.QuantizeNumbers: (QuantizeArgs, {"cols": 7}),
    plans.DequantizeNumbers: (DequantizeArgs, {"cols": 7, "column_tiles": 8}),
    plans.RmsNormNumbers: (RmsNormArgs, {"cols": 7}),
    plans.SiluNumbers: (SiluArgs, {"cols": 7}),
    plans.NormalizeNumbers: (NormalizeArgs, {}),
    plans.AllCloseNumbers: (AllCloseArgs, {}),
    plans.RequantizeNumbers: (RequantizeArgs, {"shards": (1, 2), "rows": 5, "cols": 7, "column_tiles": 8}),
    plans.ExpandNumbers: (ExpandArgs, {"shards": (1, 2), "rows": 5}),
}


@pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind.__name__)
def test_numbers_become_the_arguments_of_their_names(kind):
    declared, others = PLANS[kind]
    numbers = kind(*range(100, 100 + len(kind._fields)))
    given = plans.arguments(declared, numbers, **others)
    known = {**numbers._asdict(), **others}
    for name, item in args.fields(declared).items():
        assert getattr(given, name) == (0 if item == "P" else known[name])
