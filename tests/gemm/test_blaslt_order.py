"""The order of a library's offers: tiles by their numbers, their estimated times, and offers for vectors of scales."""

import re
import sys
from functools import partial
from math import inf
from pathlib import Path

import pytest

from fp8core.kernels.gemm.blaslt import query
from fp8core.kernels.gemm.blaslt.corrections import corrected_us
from fp8core.kernels.gemm.blaslt.library import find
from fp8core.kernels.gemm.blaslt.mapping import product
from fp8core.kernels.gemm.blaslt.ordering import CLUSTERS, COUNTER_US, Config, Work, tiles, us
from fp8core.runtime import device
from support.blaslt_fixtures import built, stub  # noqa: F401
from support.blaslt_tools import forget, pretend, problem
from support.targets import BLACKWELL, MI300


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
    ("tile", "cluster", "want"),
    [
        (TILE_64X80, 2, (64, 80, 1, 1, 1, 1)),
        (TILE_64X80, 7, (64, 80, 1, 4, 2, 1)),
        (TILE_256X128, 5, (256, 128, 1, 1, 2, 1)),
        (TILE_512X512, 3, (0, 0, 1, 2, 1, 1)),  # a number that the rule does not know
    ],
)
def test_an_algorithm_says_its_tile_and_its_cluster(stub, tile, cluster, want):
    stub.tile(1, tile, cluster)
    assert Config.of(find("cuda"), bytes([1]) * 64) == want


def test_a_custom_option_is_believed_in_versions_whose_algorithms_were_measured(stub):
    stub.tile(1, TILE_176X128, 5)
    stub.version(130200)
    unknown = Config.of(find("cuda"), bytes([1]) * 64)
    assert (unknown.custom, unknown.channels_first, unknown.cooperative) == (None, False, False)
    known = [unknown._replace(custom=custom) for custom in range(8)]
    assert [config.channels_first for config in known] == [False, True] * 4
    assert [config.cooperative for config in known] == [False] * 4 + [True] * 4


def work(m, n, k, *, blockwise=False):
    return Work(m, n, k, False, blockwise, out_bytes=2, multiprocessors=132)


@pytest.mark.parametrize(
    ("product", "config", "workspace", "measured"),
    [
        (work(16384, 4096, 4096), (128, 160, 1, 2, 1), 4, 394.0),
        (work(2048, 36864, 7168), (168, 128, 1, 1, 2), 0, 804.0),
        (work(384, 10240, 5120), (80, 128, 1, 2, 1), 0, 32.9),
        (work(1000, 13312, 16384), (128, 128, 1, 4, 2), 0, 358.0),
        (work(96, 5376, 21504), (64, 96, 1, 4, 1), 0, 34.0),
        (work(96, 5376, 21504), (128, 96, 3, 2, 1), 6193168, 40.1),
        (work(64, 57344, 8192), (128, 128, 1, 4, 1), 0, 140.7),
        (work(128, 2112, 7168), (40, 64, 1, 4, 2), 0, 9.2),
        (work(3000, 4096, 14336, blockwise=True), (128, 128, 1, 2, 1), 0, 294.0),
        (work(384, 24576, 4096, blockwise=True), (128, 128, 1, 4, 1), 0, 70.2),
    ],
)
def test_estimates_are_near_what_an_h200_took(product, config, workspace, measured):
    assert us(product, Config(*config), workspace) == pytest.approx(measured, rel=0.15)


def test_what_is_more_work_takes_longer():
    base, config = work(512, 8192, 8192), Config(128, 128, 1, 2, 1)
    time = us(base, config, 0)
    assert us(base, config, 4) == pytest.approx(time + COUNTER_US)
    for more in (base._replace(m=640), base._replace(n=16384), base._replace(k=16384), base._replace(blockwise=True)):
        assert us(more, config, 0) > time
    assert us(base._replace(vectors=True), config, 0) > time
    assert us(base._replace(multiprocessors=66), config, 0) > 1.5 * time
    assert us(base, config._replace(cluster_channels=1), 0) > time  # its blocks share fewer loads
    assert us(base, config._replace(channels=0, tokens=0), 0) == inf


def order(p):
    return [offer.algorithm[0] for offer in query.algorithms(product(p))]


def test_offers_on_hopper_are_in_the_order_of_their_estimates(stub):
    stub.offers(4)
    for number, tile in enumerate((TILE_256X128, TILE_512X512, TILE_176X128, TILE_128X128), 1):
        stub.tile(number, tile, 5)
    offers = query.algorithms(product(problem(m=4096, n=6144, ldo=6144)))
    assert sorted(offer.algorithm[0] for offer in offers) == [1, 2, 3, 4]
    assert offers[-1].algorithm[0] == 2  # of a tile that is not known
    assert offers[-1].us is None
    times = [offer.us for offer in offers[:-1]]
    assert times == sorted(times)
    assert len(set(times)) == 3


@pytest.mark.parametrize(
    ("name", "version", "corrected"),
    [
        *(("NVIDIA H200", 130100, True), ("NVIDIA H200", 130200, False)),
        *(("NVIDIA H100 80GB HBM3", 130100, True), ("NVIDIA GH200 480GB", 130100, False)),
    ],
)
def test_estimates_are_corrected_for_the_gpu_and_the_library_that_were_measured(
    stub, monkeypatch, name, version, corrected
):
    monkeypatch.setattr(device, "name", lambda ordinal: name)
    stub.version(version)
    p = problem(m=4096, n=6144, ldo=6144)
    stub.tile(1, TILE_256X128, 5)
    stub.tile(2, TILE_176X128, 5)
    wanted = partial(corrected_us, gpu=name) if corrected else us
    for offer in query.algorithms(product(p)):
        config = Config.of(find("cuda"), offer.algorithm)
        assert offer.us == wanted(query.work_of(product(p)), config, offer.workspace_bytes)


def test_corrections_are_small_against_the_estimates():
    for m, n, k in ((96, 1280, 8192), (1024, 2112, 7168), (300, 32768, 512), (9000, 6144, 4096)):
        for config in (Config(128, 128, 1, 2, 1, 1), Config(64, 256, 1, 1, 2, 2), Config(192, 176, 1, 1, 2, 7)):
            assert 0.7 < corrected_us(work(m, n, k), config, 0, "NVIDIA H200") / us(work(m, n, k), config, 0) < 1.4


def test_equal_estimates_leave_the_library_its_order(stub):
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
    assert stub.attributes(asked)[31] == (4, 3)  # asked of vectors


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


@pytest.mark.parametrize(
    ("version", "given", "wanted", "taken"),
    [
        (130100, 4, 4, True),
        (130100, 0, 4, True),  # a counter of tiles, which this version runs without
        (130100, 0, 1 << 20, False),
        (130100, 1 << 20, 1 << 20, True),
        (130400, 0, 4, False),  # where it was not tried, what the library says counts
        (120900, 0, 4, False),
    ],
)
def test_a_counter_of_tiles_is_optional_where_that_was_tried(stub, monkeypatch, version, given, wanted, taken):
    stub.version(version)
    offer = query.Candidate(bytes([1]) * 64, given, 0.0)
    asked = query.HeuristicQuery(find("cuda"), find("cuda").handles.of_device(0), product(problem("row")))
    monkeypatch.setattr(query.HeuristicQuery, "_read", lambda *_: (offer._replace(workspace_bytes=wanted), 0))
    assert asked.takes(offer) is taken


def test_one_algorithm_with_and_without_a_workspace_has_two_names():
    bare = query.Candidate(bytes([1]) * 64, 0, 0.0)
    assert bare.name != bare._replace(workspace_bytes=4).name
    assert bare.name == bare._replace(us=3.0, waves=2.0).name
