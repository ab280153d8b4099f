"""The tables of docs/concepts and docs/dev that state facts: each is compared with what it describes."""

import re
from pathlib import Path
from typing import get_args

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core import table as tables
from fp8core import timing, tuning
from fp8core.checkpoint.reading.faults import FaultKind
from fp8core.core import calls
from fp8core.dtypes import FORMATS
from fp8core.runtime import releases
from support import reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def rows(lines: list[str]) -> list[list[str]]:
    """Return the cells of a table, without the line below its head."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if not all(set(cell) <= set("-: ") for cell in row)]


def table_below(name: str, heading: str) -> list[list[str]]:
    """Return the first table below a line that starts with ``heading``."""
    lines = text(name).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(heading))
    begin = next(i for i in range(start, len(lines)) if lines[i].startswith("|"))
    end = next((i for i in range(begin, len(lines)) if not lines[i].startswith("|")), len(lines))
    return rows(lines[begin:end])


# ---- concepts/formats.md ---------------------------------------------------------------------------------------


def formats_table() -> dict[str, dict[str, str]]:
    head, *body = table_below("concepts/formats.md", "# FP8 formats")
    names = [cell.strip("`") for cell in head[1:]]
    return {name: {row[0]: row[i] for row in body} for i, name in enumerate(names, 1)}


def number(cell: str) -> float:
    """Return the number that a cell states: 448 or 2^-9."""
    base, _, exponent = cell.partition("^")
    return float(base) ** int(exponent) if exponent else float(base)


def codes(cell: str) -> list[int]:
    return [] if cell == "none" else [int(code, 16) for code in cell.split(", ")]


def test_the_table_of_formats_has_every_format():
    assert list(formats_table()) == ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
    assert set(formats_table()) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_the_table_of_formats_is_that_of_ml_dtypes(name):
    said, dtype = formats_table()[name], np.dtype(getattr(ml_dtypes, name))
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    info = ml_dtypes.finfo(dtype)
    sign, exponent, mantissa = map(int, said["sign, exponent, mantissa bits"].split(", "))
    assert (sign, exponent, mantissa) == (1, info.nexp, info.nmant)
    assert values[1 << mantissa] == 2.0 ** (1 - int(said["exponent bias"]))  # exponent 1, mantissa 0
    assert number(said["largest number"]) == values[np.isfinite(values)].max()
    assert number(said["smallest normal number"]) == float(info.smallest_normal)
    assert number(said["smallest subnormal number"]) == values[values > 0].min()
    assert codes(said["NaN codes"]) == np.flatnonzero(np.isnan(values)).tolist()
    assert codes(said["Inf codes"]) == np.flatnonzero(np.isinf(values)).tolist()
    assert codes(said["zero codes"]) == np.flatnonzero(values == 0).tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_quantize_writes_what_the_table_of_formats_says(name):
    said = formats_table()[name]
    x = np.array([[3e38, -3e38, np.nan]], np.float32)
    got = fp8core.quantize(x, dtype=name, scale=1.0).data
    assert got[0, :2].astype(np.float64).tolist() == [
        number(said["largest number that `quantize` writes"]),
        -number(said["largest number that `quantize` writes"]),
    ]
    assert codes(said["NaN code that `quantize` writes"]) == got[:, 2].view(np.uint8).tolist() == [reference.NAN[name]]


# ---- dev/platform-ops.md ---------------------------------------------------------------------------------------

DEFINITIONS = (
    r"^DEVICE\s+[^;{(]*?(\w+)\s*\(",
    r"^constexpr\s+bool\s+(\w+)\s*=",
    r"^using\s+(\w+)\s*=",
    r"^struct\s+(?:alignas\(\d+\)\s*)?(\w+)\s*\{",
    r"^#define\s+([A-Z]\w+)",
)
PRIVATE = {
    "FP8CORE_PTX",
    "FP8CORE_FNUZ_CONVERSIONS",
    "FP8CORE_OCP_CONVERSIONS",
    "flushed",  # of the emulation
    "from_lane",  # what the shuffles of HIP are made of
}
"""What a platform's header defines for itself."""


def defined(name: str) -> set[str]:
    """Return what a device source defines for others."""
    source = (ROOT / name).read_text(encoding="utf-8")
    found = {match for pattern in DEFINITIONS for match in re.findall(pattern, source, re.MULTILINE)}
    for constants in re.findall(r"^constexpr\s+int\s+([^;]*);", source, re.MULTILINE):
        found |= set(re.findall(r"(\w+)\s*=", constants))
    return found - PRIVATE


def ops_in_the_page() -> list[str]:
    cells = [line.split("|")[1] for line in text("dev/platform-ops.md").splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_the_page_of_platform_ops_names_each_op_once():
    named = ops_in_the_page()
    assert len(named) == len(set(named)) > 60


@pytest.mark.parametrize("platform", ["cuda", "hip"])
def test_the_page_of_platform_ops_has_what_the_headers_define(platform):
    headers = [f"{platform}_src/{name}.cuh" for name in ("platform", "conversions")]
    named, found = set(ops_in_the_page()), set().union(*map(defined, headers))
    if platform == "cuda":  # ops of clusters are in a header of their own, beside what only Hopper's kernels use
        clusters = {
            name for row in table_below("dev/platform-ops.md", "## Clusters") for name in re.findall(r"`(\w+)`", row[0])
        }
        found |= clusters & defined("cuda_src/ptx/cluster.cuh")
    assert sorted(named - found) == [], f"docs/dev/platform-ops.md names ops that {headers} lack"
    assert sorted(found - named) == [], f"ops of {headers} that docs/dev/platform-ops.md lacks"


# ---- figures and paths in other pages --------------------------------------------------------------------------


def test_the_bounds_of_host_memory_are_those_of_the_code():
    said = text("concepts/safety.md")
    assert f"{calls.CALLS_KEPT:,} calls of each operation" in said
    assert f"{tables.PLANS_KEPT:,} plans of each table" in said
    assert f"{calls.SHORTCUTS_PER_SIZE} for equal options and each size of a first operand" in said


def test_the_table_of_faults_has_every_kind():
    rows_ = table_below("how-to/convert-a-checkpoint.md", "## Verify")[1:]
    assert {kind for row in rows_ for kind in re.findall("`([^`]+)`", row[0])} == set(get_args(FaultKind))


def test_the_figures_about_tune_are_those_of_the_code():
    said = text("how-to/tune.md")
    assert f"has to be {tuning.MARGIN * 100:.0f} % faster" in said
    assert f"about {round(timing.COLD_BYTES / 1e6, -2):.0f} MB" in said


def test_memory_is_let_go_of_within_the_milliseconds_that_the_pages_say():
    assert releases.LONGEST_PAUSE < 5e-3
    for page in ("concepts/arrays-and-streams.md", "concepts/safety.md"):
        assert "within a few milliseconds" in text(page)


@pytest.mark.parametrize(
    "page", ["how-to/add-a-kernel.md", "how-to/add-a-scale-mode.md", "dev/design.md", "dev/platform-ops.md"]
)
def test_the_files_that_contributors_are_sent_to_exist(page):
    paths = set(re.findall(r"`((?:fp8core|cuda_src|hip_src|tests|bench|docs)/[\w./-]+\.\w+)`", text(page)))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).is_file()] == []
