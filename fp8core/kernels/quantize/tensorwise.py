"""One dynamic scale for a whole tensor, in one launch: read once, or partly twice if the device cannot hold it."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Final

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.quantize.configs import VEC8, TensorwiseConfig, tensorwise_configs
from fp8core.kernels.quantize.elementwise import plan_elementwise
from fp8core.kernels.quantize.prepare import Chosen, plan_of, prepare
from fp8core.problem import Quantize
from fp8core.runtime import launches, partitions
from fp8core.runtime.plans import Plan, QuantizeNumbers
from fp8core.table import Launch

STREAMS_KNOWN: Final = 4096
"""Streams for which a launch remembers that they have room for its blocks."""


def plan_tensorwise(problem: Quantize) -> Plan[QuantizeNumbers]:
    """Return the plan of cuda_src/quantize/tensorwise.cuh, or of elementwise where its blocks cannot be co-resident."""
    cols, multiprocessors = problem.cols, problem.target.multiprocessors
    configs = {flat: tensorwise_configs(problem, flat) for flat in (False, True)}

    @cache
    def run(config: TensorwiseConfig, flat: bool) -> launches.Launcher:
        constants = {
            "FP8_ALIGNMENT": problem.alignment,
            "FP8_CLUSTER": config.cluster,
            "FP8_REGISTER_VECS": config.register_vecs,
            "FP8_SHARED_VECS": config.shared_vecs,
            "FP8_CHUNK": config.chunk,
            "FP8_WHOLE": int(config.whole),
            "FP8_FLAT": int(flat),
        }
        return prepare(
            problem,
            "tensorwise",
            config.threads,
            constants,
            shared_bytes=config.shared_vecs * config.threads * VEC8 * ITEMSIZE[problem.x],
            cluster=max(config.cluster, 1),
            cooperative=config.cluster == 0,
        )

    def choose(numbers: QuantizeNumbers) -> Chosen:
        rows = numbers.rows
        flat = rows == 1 or numbers.x_stride == numbers.data_stride == cols
        keeps, sizes = configs[flat]
        vecs = ceil_div(rows * cols, VEC8) if flat else rows * ceil_div(cols, VEC8)
        config = sizes[bisect_left(keeps, vecs)]
        return run(config, flat), (config.cluster or multiprocessors, 1, 1)

    plan = plan_of(cols, choose)
    elementwise = cache(lambda: plan_elementwise(problem))

    def bind(numbers: QuantizeNumbers) -> Launch:
        return with_fallback(plan.bind(numbers), choose(numbers)[1][0], lambda: elementwise().bind(numbers))

    return Plan(QuantizeNumbers, bind)


def with_fallback(launch: Launch, blocks: int, make_fallback: Callable[[], Launch]) -> Launch:
    """Return ``launch``, whose ``blocks`` have to be co-resident, with a fallback for streams where they cannot be.

    With a green context or MPS, a stream has only some of the multiprocessors. The driver then refuses the launch, and
    nothing has run. But while the stream is captured, a refusal would come only from the graph, so a stream is checked
    before its first launch. (What is remembered may be wrong if a new stream gets the address of an old one: then the
    driver refuses.)
    """
    known: set[int] = set()
    fallback = cache(make_fallback)

    def fits(stream: int) -> bool:
        available = partitions.multiprocessors(stream)
        if available is not None and available < blocks:
            return False
        if len(known) >= STREAMS_KNOWN:
            known.clear()
        known.add(stream)
        return True

    def run(stream: int, x: int, data: int, scale: int, upper: int) -> None:
        if stream in known or fits(stream):
            try:
                return launch(stream, x, data, scale, upper)
            except launches.LaunchError as error:
                if error.status not in launches.TOO_LARGE:
                    raise
        return fallback()(stream, x, data, scale, upper)

    return run
