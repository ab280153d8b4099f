"""The order of a library's offers: tiles by their numbers, what they cost, and offers for vectors of scales."""

import re
import sys
from math import inf
from pathlib import Path

import pytest

from fp8core.kernels.gemm.blaslt import query
from fp8core.kernels.gemm.blaslt.library import find
from fp8core.kernels.gemm.blaslt.mapping import product
from fp8core.kernels.gemm.blaslt.ordering import CLUSTERS, LARGE_TILE_COST, LOAD_COST, cost, tiles
from support.blaslt_fixtures import built, stub  # noqa: F401
from support.blaslt_tools import BLACKWELL, MI300, forget, pretend, problem


@pytest.fixture(scope="session")
def header():
    found = (Path(folder) / "nvidia/cu13/include/cublasLt.h" for folder in sys.path)
    path = next((path for path in found if path.exists()), None)
    if path is None:
        pytest.skip("nvidia-cublas, which brings cublasLt.h, is not installed (extra test)")
    return path.read_text(encoding="utf-8")


def test_tiles_are_those_of_the_header(header):
    named = re.findall(r"CUBLASLT_MATMUL_TILE_(\d+)x(\d+)\s*=\s*(\d+)", header)
    want = {int(number): (int(rows), int(cols)) for rows, cols, number in named}
    assert len(tiles()) == 630
    assert {number: want[number] for number in tiles()} == tiles()


def test_clusters_are_those_of_the_header(header):
    named = re.findall(r"CUBLASLT_CLUSTER_SHAPE_(\d+)x(\d+)x1\s*=\s*(\d+)", header)
    want = {int(number): (int(rows), int(cols)) for rows, cols, number in named}
    assert {number: want[number] for number in CLUSTERS} == CLUSTERS


TILE_64X80, TILE_128X128, TILE_256X128, TILE_176X128, TILE_512X512 = 318, 20, 24, 201, 633


@pytest.mark.parametrize(
    ("tile", "cluster", "m", "n", "want"),
    [
        (TILE_64X80, 2, 80, 6144, 1 * LOAD_COST * (64 + 80)),  # 96 blocks
        (TILE_64X80, 3, 80, 6144, 1 * LOAD_COST * (64 + 80 / 2)),
        (TILE_64X80, 5, 80, 6144, 1 * LOAD_COST * (64 / 2 + 80)),
        (TILE_64X80, 7, 80, 6144, 1 * 64 * 80),
        (TILE_128X128, 3, 80, 6144, 1 * 128 * 128),
        (TILE_128X128, 3, 4096, 6144, 12 * 128 * 128),  # 1536 blocks on 132 multiprocessors
        (TILE_176X128, 5, 4096, 6144, 9 * 176 * 128),
        (TILE_256X128, 5, 4096, 6144, 6 * 256 * 128 * LARGE_TILE_COST),
        (TILE_512X512, 2, 4096, 6144, inf),  # a number that the rule does not know
    ],
)
def test_the_cost_is_rounds_times_the_longer_of_products_and_loads(stub, tile, cluster, m, n, want):
    stub.tile(1, tile, cluster)
    assert cost(find("cuda"), bytes([1]) * 64, m, n, 132) == want


def order(p):
    return [offer.algorithm[0] for offer in query.algorithms(product(p))]


def test_offers_on_hopper_are_in_the_order_of_their_cost(stub):
    stub.offers(4)
    for number, tile in enumerate((TILE_256X128, TILE_512X512, TILE_176X128, TILE_128X128), 1):
        stub.tile(number, tile, 5)
    assert order(problem(m=4096, n=6144, ldo=6144)) == [4, 3, 1, 2]


def test_equal_costs_leave_the_library_its_order(stub):
    stub.offers(4)
    assert order(problem()) == [1, 2, 3, 4]


@pytest.mark.parametrize(("platform", "target"), [("cuda", BLACKWELL), ("hip", MI300)])
def test_elsewhere_the_library_keeps_its_order(built, monkeypatch, platform, target):
    pretend(monkeypatch, built[platform], (target,))
    if platform == "cuda":
        built[platform].tile(2, TILE_64X80, 3)
    assert order(problem(target=target)) == [1, 2]
    forget()


def test_vectors_of_scales_get_the_offers_for_a_scale_each_that_can_apply_them(stub):
    stub.vectors(8)
    assert order(problem("row")) == [9, 10, 1, 2]
    checked = stub.lines("MatmulAlgoCheck")
    assert [line.split()[-1] for line in checked] == ["algorithm=1", "algorithm=2"]
    asked = int(checked[0].split()[1][1:])
    assert stub.attributes("d", asked)[31] == (4, 3)  # asked of vectors


def test_the_library_has_the_last_word_on_vectors_of_scales(stub):
    stub.vectors(8)
    stub.fail("MatmulAlgoCheck", 15)
    assert order(problem("row")) == [9, 10]


def test_the_library_is_asked_without_a_workspace_too(stub):
    order(problem())
    asked = [line.split() for line in stub.lines("MatmulPreferenceSetAttribute")]
    assert [words[-1] for words in asked if words[2] == "1"] == [str(32 << 20), "0"]


def test_what_is_offered_twice_stands_once(stub):
    assert order(problem("row")) == [1, 2]
    assert not stub.lines("MatmulAlgoCheck")
