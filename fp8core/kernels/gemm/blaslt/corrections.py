"""The features of a product and an algorithm of cuBLASLt by which its estimate is corrected (`..corrections`)."""

import math
from functools import cache
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm import corrections
from fp8core.kernels.gemm.blaslt.ordering import (
    MEASURED_VERSIONS,
    Config,
    Work,
    counts_tiles,
    moved_bytes,
    us,
    whole_tiles,
)
from fp8core.kernels.gemm.sm90.decode_config import CLUSTERS, MEASURED_MULTIPROCESSORS
from fp8core.problem import BLOCK
from fp8core.target import Target

KERNEL: Final = "cublaslt"
"""The name of the trees of this kernel."""
HELD: Final = {
    cluster: cluster * count / MEASURED_MULTIPROCESSORS for cluster, count in CLUSTERS.items() if cluster <= 4
}
"""Fraction of the multiprocessors on which clusters of a size can run at a time; larger ones use that of size 4."""


class Features(NamedTuple):
    """The features of a product and an algorithm that the trees use.

    "busiest" features are those of the multiprocessor with the most tiles; "held" ones count only the multiprocessors
    on which clusters of the algorithm's size find room; "crossing" counts rows that cross cache lines, as 128 does not
    divide k.
    """

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
    k_alignment: float
    delivered_rate: float
    cluster: float
    fullness: float
    held: float
    held_rounds: float
    held_fullness: float
    busiest: float
    busiest_rate: float
    busiest_load_rate: float
    weight_rate: float
    crossing_rate: float


def features(work: Work, config: Config, workspace_bytes: int, estimate: float) -> Features:
    """Return the features; sizes of many magnitudes are logarithms, and rates are divided by the estimated time."""
    m, n, k = work[:3]
    channels, tokens, split_k, along_n, along_m = config[:5]
    whole_n, whole_m = whole_tiles(work, config)
    blocks, log = whole_n * whole_m * split_k, math.log
    share = blocks / work.multiprocessors
    moved, k_blocks = moved_bytes(work), ceil_div(ceil_div(k, split_k), BLOCK)
    loaded = blocks * k_blocks * (channels / along_m + tokens / along_n)
    cluster, rounds = along_n * along_m, math.ceil(share)
    held = share / HELD.get(cluster, HELD[4])
    delivered_rate = log(blocks * k_blocks * (channels + tokens) / estimate)
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
        idle=rounds - share,
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
        k_alignment=math.gcd(k, BLOCK).bit_length(),
        delivered_rate=delivered_rate,
        cluster=cluster,
        fullness=share / rounds,
        held=held,
        held_rounds=math.ceil(held),
        held_fullness=held / math.ceil(held),
        busiest=log(rounds * k_blocks),
        busiest_rate=log(rounds * k_blocks * channels * tokens / estimate),
        busiest_load_rate=log(rounds * k_blocks * (channels + tokens) / estimate),
        weight_rate=log(n * k / estimate),
        crossing_rate=delivered_rate if k % BLOCK else 0,
    )


def corrected_us(work: Work, config: Config, workspace_bytes: int, gpu: str | None) -> float:
    """Return the estimated microseconds of an algorithm, corrected by the measurements on a model of GPU."""
    estimate = us(work, config, workspace_bytes)
    if gpu is None or not config.channels:
        return estimate
    asked = features(work, config, workspace_bytes, estimate)
    return estimate * corrections.factor(KERNEL, asked, Features._fields, gpu)


@cache
def gpu_of(target: Target, version: int | None) -> str | None:
    """Return the name of a GPU if its model and the version of the library have been measured, or None."""
    return corrections.gpu_of(target) if version in MEASURED_VERSIONS else None
