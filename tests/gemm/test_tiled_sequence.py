"""How the warpgroups of sm90_tiled walk through a block's tiles and its ring: compiled for the host, and run there."""

import re
import shutil
import subprocess
from itertools import product

import pytest

from fp8core.runtime import sources

STAGES = 4
TILES = (1, 2, 3, 4, 7, 8)
K_BLOCKS = (1, 2, 3, 4, 5, 8, 31, 416)
PROGRAM = """
#include <cstdio>
#include <initializer_list>
#define DEVICE
static void threads_sync(int barrier, int threads) { printf("sync %d %d\\n", barrier, threads); }
static void threads_arrive(int barrier, int threads) { printf("arrive %d %d\\n", barrier, threads); }
"""
WALK = f"""
template <int by_turns>
struct Layout {{
    static constexpr int pingpong = by_turns, groups = 2;
}};
template <int by_turns>
static void walk(int group, int tiles, int k_blocks) {{
    using C = Layout<by_turns>;
    TileSequence<C> sequence(group, tiles);
    Ring<{STAGES}> at(0);
    Ring<2> vectors_at(by_turns ? group : 0);
    if (by_turns && group == 1) at.skip(k_blocks);
    for (; sequence.any(); vectors_at.advance(sequence.step)) {{
        sequence.take();
        if (by_turns) sequence.await();
        printf("tile %d %d %d %d\\n", at.stage, at.parity, vectors_at.stage, vectors_at.parity);
        for (int i = 0; i < k_blocks; ++i) at.advance(1);
        if (sequence.followed()) printf("followed\\n");
        if (by_turns && sequence.followed()) sequence.pass();
        if (by_turns) at.skip(k_blocks);
    }}
}}
int main() {{
    for (int tiles : {{{", ".join(map(str, TILES))}}})
        for (int k_blocks : {{{", ".join(map(str, K_BLOCKS))}}})
            for (int group = 0; group < 2; ++group) {{
                puts("by turns");
                walk<1>(group, tiles, k_blocks);
                puts("together");
                walk<0>(group, tiles, k_blocks);
            }}
}}
"""


def struct_of(header, name):
    """Return a struct template of a header with what is said before it."""
    text = (sources.root() / "cuda_src" / "gemm" / header).read_text(encoding="utf-8")
    found = re.search(rf"template <[^>]*>\nstruct {name} {{.*?\n}};\n", text, re.DOTALL)
    assert found, (header, name)
    return found[0]


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """Return the lines of each walk, by (by turns?, tiles, k-blocks, group)."""
    if shutil.which("g++") is None:
        pytest.skip("the test needs g++")
    folder = tmp_path_factory.mktemp("walk")
    parts = (PROGRAM, struct_of("pipeline.cuh", "Ring"), struct_of("sm90/tiled_sequence.cuh", "TileSequence"), WALK)
    (folder / "walk.cpp").write_text("".join(parts), encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "-o", folder / "walk", folder / "walk.cpp"], check=True)
    said = subprocess.run([folder / "walk"], check=True, capture_output=True, text=True).stdout
    each = [walk.splitlines() for walk in re.split(r"by turns\n|together\n", said)[1:]]
    keys = [(kind, *case, group) for case in product(TILES, K_BLOCKS) for group in (0, 1) for kind in (True, False)]
    return dict(zip(keys, each, strict=True))


def places(tiles, k_blocks):
    """Return where each tile's first k-block and its vectors are, and how often each ring was passed, modulo 2."""
    for tile in range(tiles):
        first = tile * k_blocks
        yield f"tile {first % STAGES} {first // STAGES % 2} {tile % 2} {tile // 2 % 2}"


@pytest.mark.parametrize("k_blocks", K_BLOCKS)
@pytest.mark.parametrize("tiles", TILES)
def test_each_tile_is_read_where_it_is_loaded(walks, tiles, k_blocks):
    wanted = list(places(tiles, k_blocks))
    for group in (0, 1):
        by_turns, together = (walks[kind, tiles, k_blocks, group] for kind in (True, False))
        assert [line for line in by_turns if line.startswith("tile")] == wanted[group::2]
        assert [line for line in together if line.startswith("tile")] == wanted
        assert together.count("followed") == tiles - 1


@pytest.mark.parametrize("tiles", TILES)
def test_every_wait_has_its_arrival_and_tiles_are_multiplied_in_order(walks, tiles):
    """Run both walks as far as each gets: a wait ends after an arrival of the other warpgroup, at a barrier of its own."""
    left = [list(walks[True, tiles, 1, group]) for group in (0, 1)]
    wanted, arrived, made = list(places(tiles, 1)), {3: 0, 4: 0}, []
    while any(left):
        before = sum(map(len, left))
        for group, lines in enumerate(left):
            while lines and (not lines[0].startswith("sync") or arrived[3 + group]):
                line = lines.pop(0)
                if line.startswith("tile"):
                    made.append(line)
                elif line != "followed":
                    barrier = 3 + group if line.startswith("sync") else 4 - group
                    assert line.split()[1:] == [f"{barrier}", "256"]
                    arrived[barrier] += -1 if line.startswith("sync") else 1
                    assert arrived[barrier] in (0, 1), "a barrier is told twice"
        assert sum(map(len, left)) < before, f"both wait: {left}"
    assert made == wanted
    assert not any(arrived.values()), "an arrival that nobody waits for"
