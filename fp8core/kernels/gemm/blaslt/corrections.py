"""What times of cuBLASLt's algorithms differ from their estimates by: decision trees, for a model of GPU and a library.

`ordering.us` is off by what its terms cannot say, in a way that depends on the tile, the cluster and how full the
device is (experiments/2026-11-choice). `corrections.json` is written by `python -m bench.fit_estimates --write`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.blaslt.ordering import (
    MEASURED_VERSIONS,
    SECTOR,
    Config,
    Work,
    counts_tiles,
    moved_bytes,
    us,
    whole_tiles,
)
from fp8core.problem import BLOCK, Target
from fp8core.runtime import device

FILE: Final = "corrections.json"
LEAF: Final = 1e-5
"""Leaves are whole multiples of this, of the logarithm of a time."""

Tree = tuple[list[tuple[int, float]], list[int]]
"""Pairs of a feature's number and a threshold, one for each level, and a leaf for each answer to all of them."""


class Features(NamedTuple):
    """What the trees ask of a product and an algorithm."""

    m: float
    n: float
    k: float
    scales: float
    channels: float
    tokens: float
    columns: float
    results: float
    split_k: float
    cluster_channels: float
    cluster_tokens: float
    custom: float
    counter: float
    share: float
    idle: float
    moved: float
    row_padding: float
    channel_padding: float
    tiles_along_m: float
    tiles_along_n: float
    estimate: float
    load_rate: float
    memory_rate: float
    result_rate: float
    product_rate: float
    stage: float
    unaligned: float
    delivered_rate: float


def features(work: Work, config: Config, workspace_bytes: int, estimate: float) -> Features:
    """Return them; sizes that vary by orders of magnitude as logarithms, and rates over the estimated time."""
    m, n, k = work[:3]
    channels, tokens, split_k, along_n, along_m = config[:5]
    whole_n, whole_m = whole_tiles(work, config)
    blocks, log = whole_n * whole_m * split_k, math.log
    share = blocks / work.multiprocessors
    moved, k_blocks = moved_bytes(work), ceil_div(ceil_div(k, split_k), BLOCK)
    loaded = blocks * k_blocks * (channels / along_m + tokens / along_n)
    return Features(
        m=log(m),
        n=log(n),
        k=log(k),
        scales=2.0 if work.blockwise else 1.0 if work.vectors else 0.0,
        channels=channels,
        tokens=tokens,
        columns=tokens if config.channels_first else channels,
        results=channels * tokens,
        split_k=split_k,
        cluster_channels=along_n,
        cluster_tokens=along_m,
        custom=config.custom or 0,
        counter=float(counts_tiles(workspace_bytes)),
        share=share,
        idle=math.ceil(share) - share,
        moved=log(moved),
        row_padding=whole_m * tokens / m,
        channel_padding=whole_n * channels / n,
        tiles_along_m=whole_m,
        tiles_along_n=whole_n,
        estimate=log(estimate),
        load_rate=log(loaded / estimate),
        memory_rate=log(moved / estimate),
        result_rate=log(m * n / estimate),
        product_rate=log(m * n * k / estimate),
        stage=channels + tokens,
        unaligned=float(bool(k % BLOCK) + bool(k % SECTOR)),
        delivered_rate=log(blocks * k_blocks * (channels + tokens) / estimate),
    )


@cache
def trees() -> Mapping[str, tuple[Tree, ...]]:
    """Return the trees of the file by the names of the GPU models whose times were measured."""
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    return read(found["trees"])


def read(named: Mapping[str, Sequence[Any]]) -> Mapping[str, tuple[Tree, ...]]:
    """Return trees that ask for features by their names as ones that ask for them by their numbers."""
    names = {name: number for number, name in enumerate(Features._fields)}
    return {
        gpu: tuple(([(names[name], above) for name, above in cuts], leaves) for cuts, leaves in grown)
        for gpu, grown in named.items()
    }


def factor(asked: Features, gpu: str) -> float:
    """Return how many times its estimate a product takes on a model of GPU: 1 on one that was not measured."""
    total = 0
    for cuts, leaves in trees().get(gpu, ()):
        leaf = 0
        for number, above in cuts:
            leaf = 2 * leaf + (asked[number] > above)
        total += leaves[leaf]
    return math.exp(LEAF * total)


def corrected_us(work: Work, config: Config, workspace_bytes: int, gpu: str) -> float:
    """Return the microseconds that an algorithm takes on a model of GPU, by the library that was measured."""
    estimate = us(work, config, workspace_bytes)
    if not config.channels:
        return estimate
    return estimate * factor(features(work, config, workspace_bytes, estimate), gpu)


@cache
def gpu_of(target: Target, version: int | None) -> str | None:
    """Return the name of a GPU if it and a version of the library are among those that were measured."""
    name = device.name(target.device) if version in MEASURED_VERSIONS else None
    return name if name in trees() else None
