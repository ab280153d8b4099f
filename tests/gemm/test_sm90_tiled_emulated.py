"""sm90_tiled on the CPU: its loads, barriers and stores as the kernel has them, Hopper's instructions by hopper.h."""

import pytest

from fp8core.kernels.gemm.sm90.tiled_cost import SPLITS, TILES, Tile
from support.emulation import EmulationError, Schedule
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.hopper import SCHEDULES, launching, tiled_text
from support.emulation.tiled_products import TiledProduct

PINGPONG = [tile for tile in TILES if tile.pingpong]
ONE_AFTER_ANOTHER = Schedule("groups", "at once", 2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return the kernel's text with hopper.h in the place of PTX."""
    return tiled_text(tmp_path_factory.mktemp("hopper"))


@pytest.fixture
def launch(emulator, text, monkeypatch):
    """Return what checks a product under a schedule, by the kernel or by another text of it."""
    # A stage is released behind products that were begun after its scales were read: no fence for each k-block.
    emulator.reads_need_fences = False
    return launching(emulator, {"gemm/sm90/tiled": text}, monkeypatch)


@pytest.mark.parametrize("tile", [*PINGPONG, Tile(256, 128), Tile(192, 128), Tile(128, 192)], ids=str)
def test_a_product_is_near_float64_under_any_schedule(launch, tile):
    """Blocks of one tile, of some and of all; rows, channels and k that are no whole tiles."""
    for multiprocessors in (1, 3, 132):
        for schedule in SCHEDULES[multiprocessors % 3 :: 3]:
            launch(TiledProduct(tile, multiprocessors=multiprocessors), schedule)


@pytest.mark.parametrize(
    "product",
    [
        TiledProduct(Tile(128, 192, pingpong=True), activation="silu"),
        TiledProduct(Tile(128, 192, pingpong=True), multiprocessors=1, activation="gelu_tanh", beta=1.0),
        TiledProduct(Tile(256, 128), multiprocessors=2, activation="silu"),
        TiledProduct(Tile(256, 128), multiprocessors=2, beta=-0.5),
        # A result that threads store: its rows are at odd addresses.
        TiledProduct(Tile(128, 128, pingpong=True), (300, 335, 400), gap=1, beta=0.5),
        TiledProduct(Tile(128, 128, pingpong=True), multiprocessors=1, amax=True),
        # A k that is less than a k-block, and one that passes through the ring more than twice.
        TiledProduct(Tile(64, 256, pingpong=True), (128, 300, 96), multiprocessors=1, out="float16"),
        TiledProduct(Tile(64, 256, pingpong=True), (200, 300, 1680), multiprocessors=1, out="float16"),
        TiledProduct(Tile(64, 64, cluster=2), (200, 200, 1680), multiprocessors=2, bias=""),
        TiledProduct(Tile(192, 96), (330, 200, 1168), multiprocessors=1, scales="block"),
        TiledProduct(Tile(64, 128), (200, 336, 1168), multiprocessors=1, scales="promoted"),
        TiledProduct(Tile(64, 96), (200, 200, 1168), multiprocessors=1, scales="group", scale_tiles=False),
    ],
    ids=lambda product: f"{product.tile}-{product.scales}{product.shape[2]}{product.activation}{product.beta or ''}",
)
def test_ends_scales_and_clusters_under_any_schedule(launch, product):
    for schedule in SCHEDULES[1::2]:
        launch(product, schedule)


@pytest.mark.parametrize(
    "product",
    [
        TiledProduct(Tile(64, 64, split_k=4), (100, 150, 1040), out="float32"),
        TiledProduct(Tile(64, 64, split_k=2), (70, 77, 1168), gap=3, offset=6, activation="gelu"),
        TiledProduct(Tile(128, 128, split_k=4), (150, 200, 1680), scales="promoted", amax=True, early=True),
        TiledProduct(Tile(64, 32, split_k=2), (70, 61, 513), out="float8_e4m3fn", gap=3, amax=True),
        TiledProduct(Tile(128, 96, split_k=2), (130, 203, 400), scales="block", bias=""),
        TiledProduct(Tile(192, 64, split_k=2), (145, 203, 1300), scales="block", bias=""),
        TiledProduct(Tile(64, 96, split_k=4), (66, 200, 5200), scales="block", scale_tiles=False, activation="silu"),
        TiledProduct(Tile(64, 64, split_k=2), (66, 100, 4500), scales="block", bias="", early=True),
        TiledProduct(Tile(128, 64, split_k=4), (150, 139, 1300), out="float16", scales="group", gap=1, offset=2),
    ],
    ids=lambda product: f"{product.tile}-{product.scales}-{product.out}",
)
def test_a_split_k_under_any_schedule(launch, product):
    """Each block completes the rows of one or two warps of a warpgroup, of which some or all are past the last row."""
    for schedule in SCHEDULES[::2]:
        launch(product._replace(multiprocessors=132), schedule)


@pytest.mark.parametrize("split_k", SPLITS)
@pytest.mark.parametrize("scales", ["chain", "block"])
def test_equal_rows_have_equal_bits_whichever_block_completes_them(launch, scales, split_k):
    """Rows that two tiles have are written twice, so else a result could change from run to run."""
    product = TiledProduct(Tile(64, 64, split_k=split_k), (100, 77, 1300), 132, scales, "float32", alike=True)
    launch(product, SCHEDULES[0])


@pytest.mark.parametrize(
    "product",
    [
        TiledProduct(Tile(64, 64), (70, 130, 96), out="float32", gap=1, offset=4, beta=1.0),
        TiledProduct(Tile(64, 32), (70, 61, 96), out="float32", gap=2, offset=12),
        TiledProduct(Tile(64, 96), (130, 203, 96), gap=3, offset=6, beta=-0.5),
        TiledProduct(Tile(128, 128), (150, 139, 96), out="float16", scales="group", bias="", gap=1, offset=2, beta=1.0),
        TiledProduct(Tile(64, 64), (70, 75, 96), scales="block", gap=5, beta=1.0, amax=True),
        TiledProduct(Tile(64, 16), (67, 5, 96), gap=1, beta=1.0),
        TiledProduct(Tile(64, 64), (100, 77, 96), out="float8_e4m3fn", gap=6, offset=9, amax=True),
        TiledProduct(Tile(64, 32), (70, 16, 96), out="float8_e4m3fn", gap=1, amax=True),
        TiledProduct(Tile(128, 192, pingpong=True), (150, 401, 96), out="float8_e4m3fn", gap=1, offset=1),
    ],
    ids=lambda product: f"{product.tile}-{product.out}-{product.shape[1]}@{product.offset}",
)
def test_results_at_odd_addresses_are_whole_and_alone(launch, product):
    """Rows that begin and end at each residue of 16, some shorter than a vector, are stored and added to in vectors."""
    for multiprocessors, schedule in ((1, SCHEDULES[1]), (132, SCHEDULES[4])):
        launch(product._replace(multiprocessors=multiprocessors), schedule)


@pytest.mark.parametrize("tile", [Tile(256, 128), Tile(128, 192), Tile(64, 96)], ids=str)
def test_block_scales_of_more_k_blocks_than_a_warp_has_lanes(launch, tile):
    """TMA loads those of a; a warp loads those of the weight, some of which change within a tile. Blocks run in pairs."""
    product = TiledProduct(tile, (132, 200, 33 * 128 + 16), scales="block", bias="")
    for multiprocessors, schedule in ((1, ONE_AFTER_ANOTHER), (2, SCHEDULES[5]), (4, SCHEDULES[1])):
        launch(product._replace(multiprocessors=multiprocessors, early=multiprocessors == 1), schedule)


RING = TiledProduct(Tile(128, 128, pingpong=True), (300, 336, 1168), multiprocessors=1)
BLOCKS = TiledProduct(Tile(128, 128), (300, 336, 1296), multiprocessors=1, scales="block", bias="")
WITHOUT_THE_LAST_RELEASES = (r"if constexpr \(shared\)\s*for [^;]*; [^;]*; [^;]*;", "")
CLUSTER = TiledProduct(Tile(64, 64, cluster=2), (200, 200, 1680), multiprocessors=2, bias="")
SHARED = TiledProduct(Tile(64, 64, split_k=4), (100, 150, 1040), multiprocessors=132)


@pytest.mark.parametrize(
    ("fault", "edits", "product", "schedule", "report"),
    [
        (
            "a stage is released before its products are awaited",
            [
                (
                    r"wgmma_wait<C::m_slices>\(\);(\s*)release\(before\);",
                    r"release(before);\1wgmma_wait<C::m_slices>();",
                )
            ],
            *(RING, SCHEDULES[1], "that a product of thread .* read"),
        ),
        (
            "a warpgroup does not await its turn",
            [(r"if constexpr \(C::pingpong\) sequence\.await\(\);", "")],
            *(RING, SCHEDULES[1], "that a product of thread .* read|completes two phases"),
        ),
        (
            "no fence between threads' writes and TMA",
            [(r"accesses_fence\(\);\s*together", "together")],
            *(RING, SCHEDULES[0], "no fence.proxy.async stands between"),
        ),
        (
            "a buffer is written while TMA reads it",
            [(r"if \(leads\(\)\) stores_read<C::buffers / many - 1>\(\);", "")],
            *(RING, SCHEDULES[1], "that a store of TMA of thread .* still reads"),
        ),
        (
            "the wrong parity of a barrier",
            [(r"at\.parity \^ 1\)", "at.parity)")],
            *(RING, SCHEDULES[0], "race on shared memory|deadlock"),
        ),
        (
            "one arrives less than there are warps",
            [(r"(pipeline\.init\(C::full_arrivals, C::math_warps \* C::cluster)\);", r"\1 - 1);")],
            *(RING, SCHEDULES[2], "nothing tells that it was awaited|completes two phases|more arrive"),
        ),
        (
            "vectors are released before they are read",
            [(r"sequence\.take\(\);", "sequence.take(); if (lane == 0) vector_pipeline.release(vectors_at);")],
            *(RING, SCHEDULES[0], "race on shared|more arrive|deadlock"),
        ),
        (
            "a lane fills a stage that others still wait for",
            [(r"__syncwarp\(\);  // else the stage could be filled", "// ")],
            *(BLOCKS, ONE_AFTER_ANOTHER, "completes two phases while thread 7"),
        ),
        (
            "a block adds sums of others that have not arrived",
            [(r"barrier_wait\(full, 0\);", "")],
            *(SHARED, SCHEDULES[1], "which nobody wrote"),
        ),
        (
            "two blocks store their sums in one place",
            [(r"const int place = \(from \^ to\) - 1;", "const int place = 0;")],
            *(SHARED, SCHEDULES[0], "copies over what another thread wrote"),
        ),
        (
            "a block ends while another one signals to it",
            [WITHOUT_THE_LAST_RELEASES],
            *(CLUSTER, SCHEDULES[1], "of the cluster, which has ended|has not awaited a signal of block"),
        ),
        (
            "a block ends by a relaxed barrier, which its peer's signal may follow",
            [
                WITHOUT_THE_LAST_RELEASES,
                (r"(if constexpr \(!early && from == 0\) await_vectors)", r"if (!sequence.any()) cluster_arrive(); \1"),
                (r"(wgmma_wait<0>\(\);  // products issued after)", r"cluster_wait(); \1"),
            ],
            *(CLUSTER, SCHEDULES[1], "has not awaited a signal of block"),
        ),
    ],
)
def test_a_fault_of_order_is_reported(launch, tmp_path, fault, edits, product, schedule, report):
    with pytest.raises(EmulationError, match=report):
        launch(product, schedule, tiled_text(tmp_path, edits))
