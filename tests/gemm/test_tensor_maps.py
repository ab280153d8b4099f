"""Tensor maps: shared by geometry, found by address, and bounded for the process."""

import gc
import threading

import pytest

from fp8core.kernels.gemm.sm90 import tensor_maps as maps
from fp8core.kernels.gemm.sm90 import tiled
from fp8core.kernels.gemm.sm90.tensor_maps import TensorMaps, tensor_maps
from support.sm90_products import problem
from support.threads import in_time


@pytest.fixture(autouse=True)
def encoded(monkeypatch):
    """Return the list of what is encoded, by an encoder without a driver; nothing is kept before."""
    found = []

    def encode(pointer, *geometry):
        found.append((pointer, *geometry))
        return repr((pointer, *geometry)).encode()

    monkeypatch.setattr(maps, "encode", encode)
    monkeypatch.setattr(TensorMaps, "made", 0)
    gc.collect()
    for kept in list(maps._SHARED.values()):
        kept.clear()
    return found


def test_plans_of_one_geometry_share_their_maps(encoded):
    one, other, third = tensor_maps(64, 256, 256, 64), tensor_maps(64, 256, 256, 64), tensor_maps(64, 256, 272, 64)
    assert one is other
    assert one[4096] is other[4096]
    assert third[4096] != one[4096]
    assert encoded == [(4096, 64, 256, 256, 64, 128), (4096, 64, 256, 272, 64, 128)]


def test_maps_are_bounded_for_the_process(encoded, monkeypatch):
    monkeypatch.setattr(maps, "MOST_MAPS", 100)
    plans = [tensor_maps(m, 256, 256, 64) for m in range(1, 51)]
    for address in range(0, 16 * 1000, 16):
        for plan in plans[:: 1 + address % 3]:
            assert plan[address] == repr((address, *plan._geometry)).encode()
        assert sum(map(len, plans)) <= 100


def test_a_geometry_goes_with_its_last_plan():
    before = len(maps._SHARED)
    plan = tensor_maps(12345, 256, 256, 64)
    assert len(maps._SHARED) == before + 1
    del plan
    gc.collect()
    assert len(maps._SHARED) == before


@pytest.mark.parametrize(
    ("strides", "mapped"),
    [((1, 400), True), ((1, 0), True), ((1, -400), False), ((1, 402), False), ((-1, 400), False), ((7, 1), False)],
    ids=str,
)
def test_a_map_of_scales_needs_rows_in_ascending_order(strides, mapped):
    """Its strides are unsigned: k-blocks that lie in descending order, as a reversed array has them, are loaded."""
    asked = problem(400, 512, 1024, scale_a="group", scale_b="block", scale_a_strides=strides, vectors_alignment=16)
    assert tiled.loads_scale_tiles(asked) == mapped


@pytest.mark.parametrize(
    ("alignments", "mapped"),
    [((16, 1), True), ((4, 16), True), ((4, 8), False), ((4, 4), False)],
    ids=["all", "that of a alone", "8 bytes", "words"],
)
def test_a_map_of_scales_needs_their_own_address_aligned(alignments, mapped):
    """That of the weight's scales, of which a slice may begin anywhere, does not matter."""
    vectors, own = alignments
    asked = problem(400, 512, 1024, scale_a="group", scale_b="block", scale_a_strides=(1, 400))
    asked = asked._replace(vectors_alignment=vectors, scale_a_alignment=own)
    assert tiled.loads_scale_tiles(asked) == mapped


def test_a_destructor_amid_the_making_of_maps_may_make_others():
    """A collection of garbage may begin anywhere, and end in a call of the library."""
    found = []

    class Amid(TensorMaps):
        __slots__ = ()

        def __init__(self, *geometry):
            super().__init__(*geometry)
            found.append(tensor_maps(7, 256, 256, 64)[4096])

    in_time(maps.shared_maps, Amid, 9, 256, 256, 64, 128)
    assert found == [repr((4096, 7, 256, 256, 64, 128)).encode()]


def test_threads_get_right_maps_while_others_clear_them(monkeypatch):
    monkeypatch.setattr(maps, "MOST_MAPS", 20)
    wrong = []

    def work(seed):
        plans = [tensor_maps(m, 256, 256, 64) for m in range(1, 9)]
        for i in range(2000):
            plan, address = plans[(i * seed) % 8], 16 * (i % 37)
            if plan[address] != repr((address, *plan._geometry)).encode():
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
