"""sm90_grouped and generic_grouped on the CPU: the table of groups, tiles of no group but one, and stores within it."""

from functools import partial

import pytest

from fp8core.kernels.gemm.sm90.tiled_cost import Tile
from fp8core.kernels.grouped.generic import plan_generic
from fp8core.kernels.grouped.sm90 import plan_grouped
from support.emulation import CUDA, HIP_32, HIP_64, Schedule
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.grouped_products import GroupedProduct
from support.emulation.hopper import SCHEDULES, TILED, hopper_text, launching

CASES = {
    "groups of every size": GroupedProduct((0, 3, 3, 70, 198, 200, 330), 330),
    "rows after the last end, a block without tiles": GroupedProduct((5, 20), 300, multiprocessors=9),
    "ends out of order and beyond": GroupedProduct((50, 20, -4, 60, 1000, 7), 200),
    "no group has rows": GroupedProduct((0, 0, -1), 64),
    "one group": GroupedProduct((300,), 300, bias=""),
    "more groups than lanes": GroupedProduct(tuple(range(0, 140, 2)), 140, n=64, multiprocessors=7),
    "blocks": GroupedProduct((10, 100, 100, 170), 180, mode="group-block", out="float32"),
    "blocks, scales loaded one by one": GroupedProduct((10, 100, 170), 180, mode="group-block", scale_tiles=False),
    "groups of 1x128 on both sides": GroupedProduct((1, 90, 130), 132, mode="group-group", out="float16"),
    "scales along k of the weight alone": GroupedProduct((5, 20), 24, n=136, mode="row-group"),
    "one scale per group": GroupedProduct((40, 40, 129), 140, mode="row-each"),
    "rows that threads store": GroupedProduct((40, 41, 129), 140, n=201, gap=2, out="float16", bias="float16"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return the kernel's text with hopper.h in the place of PTX."""
    return hopper_text(tmp_path_factory.mktemp("hopper"), "gemm/sm90/grouped.cu", TILED)


@pytest.fixture
def launch(emulator, text, monkeypatch):
    """Return what checks a product under a schedule."""
    emulator.reads_need_fences = False  # as for sm90_tiled
    return launching(emulator, {"gemm/sm90/grouped": text}, monkeypatch)


class Planned:
    """A case and how it is planned, as `launching` takes them."""

    def __init__(self, case, plan):
        self.case, self.plan = case, plan

    def check(self, memory):
        self.case.check(memory, self.plan)


@pytest.mark.parametrize(
    "tile",
    [Tile(64, 64), Tile(64, 128), Tile(128, 96), Tile(128, 128), Tile(192, 64), Tile(128, 128, cluster=2)],
    ids=str,
)
@pytest.mark.parametrize("name", CASES)
def test_each_group_has_the_product_with_its_own_weight(launch, name, tile):
    for schedule in SCHEDULES[::3]:
        launch(Planned(CASES[name], partial(plan_grouped, tile=tile)), schedule)


@pytest.mark.parametrize("columns", [96, 128])
def test_each_of_three_warpgroups_skips_tiles_without_rows_for_it(launch, columns):
    ends = (64, 130, 320, 321, 512, 640)  # one, two and three warpgroups, and a tile of each after a whole one
    for schedule in (SCHEDULES[0], Schedule("any", "sometime", 4)):
        case = GroupedProduct(ends, 650, mode="group-block", multiprocessors=5)
        launch(Planned(case, partial(plan_grouped, tile=Tile(192, columns))), schedule)


@pytest.mark.parametrize("columns", [192, 256])
def test_wide_tiles_that_share_rows(launch, columns):
    for schedule in (SCHEDULES[1], Schedule("any", "sometime", 4)):
        case = GroupedProduct((5, 70, 70, 199), 200, n=2 * columns - 8, multiprocessors=5)
        launch(Planned(case, partial(plan_grouped, tile=Tile(128, columns, cluster=2))), schedule)


EVERYWHERE = [(CUDA, name) for name in CASES] + [
    (target, name)
    for target in (HIP_64, HIP_64._replace(arch=0x90A), HIP_32._replace(arch=0x1100), HIP_32)
    for name in ("groups of every size", "more groups than lanes", "blocks", "rows that threads store")
]


@pytest.mark.parametrize(("target", "name"), EVERYWHERE, ids=[f"{target} {name}" for target, name in EVERYWHERE])
def test_the_fallback_multiplies_the_same_on_any_gpu(emulator, target, name):
    for k in (272, 333):
        with emulator.watch() as memory:
            CASES[name]._replace(k=k, target=target).check(memory, plan_generic)
