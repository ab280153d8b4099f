"""sm90_decode on the CPU: its loads, barriers, exchange and stores as the kernels have them, Hopper's instructions by
hopper.h."""

import pytest

from fp8core.kernels.gemm.sm90.decode_config import DecodeConfig
from support.emulation import EmulationError
from support.emulation.decode_products import DecodeProduct
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.hopper import SCHEDULES, decode_text, launching

KERNELS = ("decode", "decode_rows")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return the texts of the kernels with hopper.h in the place of PTX, by their names in cuda_src."""
    return {f"gemm/sm90/{name}": decode_text(tmp_path_factory.mktemp("hopper"), name) for name in KERNELS}


@pytest.fixture
def launch(emulator, texts, monkeypatch):
    """Return what checks a product under a schedule, by the kernels or by another text of sm90_decode."""
    return launching(emulator, texts, monkeypatch)


def laid_out(split_k=2, clusters=1, ctas_per_sm=2, a_stages=4, m_warpgroups=1, k_warpgroups=1, **more):
    return DecodeConfig(split_k, clusters, m_warpgroups, k_warpgroups, ctas_per_sm, a_stages, **more)


SHAPE = (3, 190, 1120)
"""Rows, channels and columns of no whole tile; three tiles, and up to nine k-blocks of a block."""
ALIGNED = {
    "rows": DecodeProduct(laid_out(), SHAPE),
    "blocks": DecodeProduct(laid_out(), SHAPE, ("group", "block"), out="float16", bias="float32", activation="gelu"),
    "groups": DecodeProduct(laid_out(4), SHAPE, ("group", "group")),
    "one-block": DecodeProduct(laid_out(1, 2, a_stages=3), SHAPE, ("group", "block"), beta=0.5),
    "late": DecodeProduct(laid_out(4), SHAPE, early=False),
    "limited": DecodeProduct(laid_out(prefetch_k_blocks=1), (16, 190, 1120), out="float32", beta=-1.0),
    "alternating": DecodeProduct(laid_out(k_warpgroups=2), (20, 190, 1120), ("group", "group"), bias="bfloat16"),
    "wide": DecodeProduct(laid_out(m_warpgroups=2, ctas_per_sm=1), (50, 300, 1120)),
    "shared": DecodeProduct(laid_out(multicast_tiles=2), (16, 500, 1120), ("group", "block")),
    "shared-more": DecodeProduct(laid_out(multicast_tiles=4, ctas_per_sm=1), (40, 500, 640), ("row", "tensor")),
    "of-rows": DecodeProduct(
        laid_out(ctas_per_sm=1, warpgroup_channels=88, rows_first=True), (50, 400, 1120), ("group", "block"), beta=0.5
    ),
    "of-rows-shared": DecodeProduct(
        laid_out(2, 1, 1, multicast_tiles=2, warpgroup_channels=64, rows_first=True), (33, 300, 1120), bias="float16"
    ),
    "quantizes": DecodeProduct(None, (8, 130, 1120), x="bfloat16"),
    "quantizes-more": DecodeProduct(None, (7, 130, 640), x="float16", out="float32", gaps=(0, 0, 1)),
}
"""Blocks that quantize fewer rows than 5 leave scales of those up to 8 unwritten, and read them for results that nobody
stores: the emulation would report that."""
UNALIGNED = {
    "one-residue": DecodeProduct(laid_out(phases=1), (3, 190, 1120), offsets=(3, 5, 2)),
    "odd-k": DecodeProduct(laid_out(phases=16), (3, 1100, 515), bias="float32", out="float32", beta=1.0),
    "gaps": DecodeProduct(laid_out(phases=4), (9, 300, 1001), ("group", "block"), gaps=(0, 11, 3), activation="silu"),
    "groups": DecodeProduct(laid_out(8, 2, 3, 8, prefetch_k_blocks=2, phases=1), (1, 187, 3200), ("group", "group"), offsets=(1, 1, 2)),
    "groups-ahead": DecodeProduct(laid_out(a_stages=7, phases=1), (12, 187, 3200), ("group", "group"), offsets=(1, 1, 2)),
    "alternating": DecodeProduct(laid_out(k_warpgroups=2, phases=2), (5, 300, 1112), ("group", "block"), offsets=(1, 0, 0)),
    "more-aligned": DecodeProduct(laid_out(ctas_per_sm=1, phases=16), (24, 1100, 515), ("group", "block"), offsets=(1, 3, 2)),
    "most-aligned": DecodeProduct(laid_out(1, 2, 1, 2, phases=16), (40, 1100, 255), offsets=(1, 3, 2), out="float8_e4m3fn", bias="float32", amax=True),
    "most-aligned-groups": DecodeProduct(laid_out(4, 2, 1, 2, phases=8), (39, 500, 514), ("group", "group"), offsets=(1, 3, 2), beta=0.5),
    "copied": DecodeProduct(laid_out(m_warpgroups=2, ctas_per_sm=1, phases=8), (40, 1100, 514), out="float8_e4m3fn", amax=True),
    "copied-shared": DecodeProduct(laid_out(multicast_tiles=2, phases=2), (64, 520, 1000), ("group", "group"), offsets=(0, 8, 0)),
    "amax": DecodeProduct(laid_out(phases=1), SHAPE, out="float32", bias="float32", beta=0.5, amax=True),
    "two-residues": DecodeProduct(laid_out(phases=16, residues=2), (3, 600, 515), bias="float32", out="float32", beta=1.0),
    "two-of-two": DecodeProduct(laid_out(8, phases=2, residues=2), (9, 150, 3112), ("group", "block"), offsets=(1, 0, 2), activation="silu"),
    "two-in-groups": DecodeProduct(laid_out(k_warpgroups=2, phases=4, residues=2), (5, 300, 1001), ("group", "group"), gaps=(0, 11, 3)),
    "two-copied": DecodeProduct(laid_out(m_warpgroups=2, ctas_per_sm=1, phases=8, residues=2), (40, 1100, 514), out="float8_e4m3fn", amax=True),
    "two-shared": DecodeProduct(laid_out(multicast_tiles=2, phases=16, residues=2), (64, 1900, 515), ("group", "block"), offsets=(0, 8, 0)),
    "more-rows": DecodeProduct(laid_out(a_stages=6, ctas_per_sm=1, phases=16), (90, 1100, 515), offsets=(1, 3, 2)),
    "more-rows-of-two": DecodeProduct(laid_out(a_stages=6, ctas_per_sm=1, phases=16, residues=2), (90, 600, 515), ("group", "block"), offsets=(1, 3, 2)),
    "panels": DecodeProduct(laid_out(phases=8, panels=3), (37, 600, 518), ("group", "block"), gaps=(10, 0, 0), out="float8_e4m3fn", bias="float32", amax=True),
    "panels-aligned": DecodeProduct(laid_out(phases=16, residues=2, panels=2), (20, 600, 515), bias="float32", activation="gelu", beta=1.0, amax=True, offsets=(1, 3, 2)),
    "panels-in-groups": DecodeProduct(laid_out(4, phases=8, panels=3), (33, 300, 514), ("group", "group"), offsets=(1, 3, 4), out="float32", beta=0.5),
    "more-panels": DecodeProduct(laid_out(panels=3, ctas_per_sm=1, phases=4, residues=2), (129, 140, 700), ("group", "group"), gaps=(4, 0, 1), offsets=(0, 4, 1), out="float8_e4m3fn", amax=True, activation="silu"),
    "more-panels-aligned": DecodeProduct(laid_out(panels=3, phases=16, residues=2), (70, 200, 131), offsets=(3, 1, 2), out="float16", bias="float16", beta=-1.0),
    "most-rows": DecodeProduct(laid_out(4, a_stages=6, ctas_per_sm=1, phases=8), (128, 600, 1030), ("group", "block"), bias="float32", activation="gelu"),
    "most-rows-groups": DecodeProduct(laid_out(8, a_stages=6, ctas_per_sm=1, phases=1), (101, 190, 3200), ("group", "group"), offsets=(1, 1, 0), out="float8_e4m3fn", amax=True),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIGNED)
def test_a_product_is_near_float64_under_any_schedule(launch, name):
    for schedule in SCHEDULES:
        launch(ALIGNED[name], schedule)


@pytest.mark.parametrize("name", UNALIGNED)
def test_a_product_at_any_address_is_near_float64_under_any_schedule(launch, name):
    """Each under every other schedule: what nothing orders is reported in whatever order the threads run."""
    for schedule in SCHEDULES[list(UNALIGNED).index(name) % 2 :: 2]:
        launch(UNALIGNED[name], schedule)


FIRST = ALIGNED["rows"]
GROUPS, AHEAD = UNALIGNED["groups"], UNALIGNED["groups-ahead"]
RELEASED = r"if \(block\.lane == 0\) block\.pipeline\.release\(oldest\);(.*?)"
"""What gives up a stage of the weight, and the text from there on."""
RELEASES = " __syncwarp(); if (lane == 0) block.pipeline.release(at.next);"


@pytest.mark.parametrize(
    ("fault", "edit", "product", "schedule", "report"),
    [
        (
            "a stage of the weight is released before it is in registers",
            (RELEASED + r"(block\.pipeline\.wait_full\(at\.next\);)(?=\s*C::Tile::align)", r"\1\2" + RELEASES),
            *(GROUPS, SCHEDULES[1], "copies over what another thread read|copy is under way|nobody wrote"),
        ),
        (
            "a stage of the weight is released right behind the loads of its rows",
            (RELEASED + r"(registers_fence\(w\.codes\);)", r"\1\2" + RELEASES),
            *(GROUPS, SCHEDULES[0], "TMA writes what thread .* read: no fence.proxy.async"),
        ),
        (
            "registers are loaded that a product still reads",
            (r"(issue_mma\(products\[0\], w\[0\]\);\s*if \(ahead\) load\(w\[)1(?=\]\);\s*promote\(products\[0\], true\);\s*if \(!ahead\) load\(w\[1\]\);\s*issue_mma\(products\[0\], w\[1\]\);\s*if \(ahead\))", r"\g<1>0"),
            *(AHEAD, SCHEDULES[0], "writes registers that a product reads"),
        ),
        (
            "the last products are not awaited",
            (r"if \(last\) wgmma_wait<0>\(\);\s*else wgmma_wait<1>\(\);", "wgmma_wait<1>();"),
            *(FIRST, SCHEDULES[0], "a product is under way|writes sums|returns while products"),
        ),
        (
            "a block does not wait until its partial sums were taken",
            (r"barrier_wait\(block\.reduce_empty, \(iteration - 1\) & 1\);", ""),
            *(FIRST, SCHEDULES[2], "copies over what another thread read|another copy is under way"),
        ),
        (
            "partial sums are sent before the other blocks have begun",
            (r"if \(C::cluster > 1\) cluster_wait\(\);  // the other blocks have initialized their barriers", ""),
            *(ALIGNED["late"], SCHEDULES[3], "no mbarrier was initialized"),
        ),
        (
            "one lane's scales are not awaited",
            (r"\(C::a_vectors == 0\) \+ C::blockwise \* C::scale_lanes", "(C::a_vectors == 0) + C::blockwise * (C::scale_lanes - 1)"),
            *(GROUPS, SCHEDULES[5], "race on shared scales|copy is under way"),
        ),
        (
            "scales are read before they are awaited",
            (r"if \(C::streams_a\) block\.a_pipeline\.wait_full\(at\.a_next\);", ""),
            *(GROUPS, SCHEDULES[1], "copy is under way|nobody wrote"),
        ),
        (
            "a stage of scales is released before they are read",
            (r"const auto promote = \[&\]\(float \(&d\)\[C::sums\], bool last\) \{", r"\g<0> if (lane == 0) block.a_pipeline.release(at.a_oldest);"),
            *(GROUPS, SCHEDULES[1], "more arrive|copies over what another thread read|completes two phases"),
        ),
        (
            "no fence between the rows that threads quantize and the tensor cores",
            (r"(store8\(tiles.*?)accesses_fence\(\);", r"\1"),
            *(ALIGNED["quantizes"], SCHEDULES[0], "a product reads what thread .* wrote: no fence.proxy.async"),
        ),
    ],
)  # fmt: skip
def test_a_fault_of_order_is_reported(launch, tmp_path, fault, edit, product, schedule, report):
    with pytest.raises(EmulationError, match=report):
        launch(product, schedule, decode_text(tmp_path, edits=(edit,)))
