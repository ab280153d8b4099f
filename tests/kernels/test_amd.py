"""Products in the format that the device at hand multiplies by instructions, which is fnuz on MI300: `test_product`
takes OCP formats, whose products MI300 decodes and multiplies by ordinary FMA. And what is said of AMD in words."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fp8core
from bench.amd_report import STEPS
from fp8core import interop
from fp8core.cli import UNPROVEN, app, proven, target_named
from fp8core.runtime import sources
from fp8core.target import native_e4m3
from support.engines import BOTH, engines, fresh, rng
from support.products import EXACT, operands
from support.reference import relative_error

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ((1, 256, 512), (3, 333, 272), (16, 520, 528), (16, 4096, 1024), (64, 256, 512), (300, 512, 1040))
FEW = 16
"""Rows that the kernel for few of them takes."""
MODES = ("tensor-tensor", "row-row", "tensor-row", "row-tensor", "group-block", "group-group")


def own(engine):
    """Return the device of an engine and its E4M3."""
    target = interop.view(engine.array(np.zeros(1, np.float32)), "x").target
    return target, native_e4m3(target)


@engines(*BOTH)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_in_the_devices_own_format(engine, shape, mode, mixed, record_property):
    target, e4m3 = own(engine)
    other = e4m3.replace("e4m3fnuz", "e5m2fnuz").replace("e4m3fn", "e5m2") if mixed else e4m3
    a, weight, scale_a, scale_b, exact = operands(*shape, mode, e4m3, other)
    bias = fresh((shape[1],), "bfloat16", spread=1)
    given = [engine.array(x) for x in (a, weight, scale_a, scale_b, bias)]
    given[1] = given[1].T
    call = (*given[:4],)
    options = {"bias": given[4], "use_fast_accum": False}
    chosen = fp8core.explain(fp8core.scaled_mm, *call, **options).chosen
    record_property("kernel", chosen)
    got, again = (engine.numpy(fp8core.scaled_mm(*call, **options)) for _ in range(2))
    assert relative_error(got, exact + bias.astype(np.float64)) <= EXACT
    assert got.tobytes() == again.tobytes()
    if target.platform == "hip" and target.arch in (0x942, 0x950, 0x1200, 0x1201) and "group" not in mode:
        assert (chosen == "gfx9_decode") == (shape[0] <= FEW)


@engines(*BOTH)
@pytest.mark.parametrize("mode", ["tensor-tensor", "row-row"])
def test_a_row_has_its_bits_whatever_is_beside_it(engine, mode):
    _, e4m3 = own(engine)
    a, weight, scale_a, scale_b, _ = operands(16, 520, 528, mode, e4m3, e4m3)
    right = engine.array(weight).T, engine.array(scale_b)

    def rows(m):
        scale = scale_a if scale_a.size == 1 else np.ascontiguousarray(scale_a[:m])
        left = engine.array(np.ascontiguousarray(a[:m])), engine.array(scale)
        return engine.numpy(fp8core.scaled_mm(left[0], right[0], left[1], right[1], batch_invariant=True))

    whole = rows(16)
    for m in rng(mode).permutation([1, 2, 7, 15]):
        assert rows(int(m)).tobytes() == whole[: int(m)].tobytes()


@pytest.mark.parametrize(
    ("target", "ran"), [("host", True), ("sm_90", True), ("gfx942", False), ("gfx950", False), ("gfx1201", False)]
)
def test_the_command_line_says_what_never_ran(target, ran):
    done = CliRunner().invoke(app, ["explain", "16", "4096", "4096", "--target", target])
    assert done.exit_code == 0
    text = " ".join(done.output.split())
    assert (UNPROVEN in text) is not ran
    assert proven(target_named(target)) is ran


def test_every_amd_row_of_the_support_matrix_is_marked():
    text = (ROOT / "docs" / "reference" / "kernels.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| gfx")]
    assert rows
    assert all(line.split("|")[1].strip().endswith("†") for line in rows)
    assert f"† {UNPROVEN}" in text


def test_the_page_has_every_step_of_the_report():
    text = (ROOT / "docs" / "how-to" / "amd.md").read_text(encoding="utf-8")
    section = text[text.index("## What the steps decide") : text.index("## What to know")]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    numbers = [name if not name.isdecimal() else f"bench {name}" for name in named]
    assert numbers == [step.name for step in STEPS]


def test_every_hip_source_is_in_the_table_of_what_stands_behind_it():
    text = (ROOT / "docs" / "how-to" / "amd.md").read_text(encoding="utf-8")
    missing = [name for name in sources.names("hip") if f"`{name}`" not in text]
    assert not missing
