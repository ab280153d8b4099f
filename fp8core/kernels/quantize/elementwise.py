"""The fallback that quantizes one element at a time: any group shape, stride and alignment."""

from typing import NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.quantize.prepare import Chosen, plan_of, prepare
from fp8core.problem import Quantize
from fp8core.runtime import limits
from fp8core.runtime.plans import Plan, QuantizeNumbers


class ElementwiseConfig(NamedTuple):
    """The panel of a block: ``height`` rows (-1: all) of ``width`` columns (0: all), whole groups side by side."""

    threads: int
    height: int
    width: int
    groups: int


def config_of(problem: Quantize) -> ElementwiseConfig:
    """Return the panel of a block, with a shape for coalesced loads."""
    group = problem.group_shape
    if problem.static:
        return ElementwiseConfig(256, 16, 256, 1)
    if group.cols < 0:
        return ElementwiseConfig(1024, group.rows, 0, 1)
    threads, wanted = (256, 256) if group.rows == 1 else (1024, 64)
    groups = max(wanted // group.cols, 1)
    return ElementwiseConfig(threads, group.rows, groups * group.cols, groups)


def plan_elementwise(problem: Quantize) -> Plan[QuantizeNumbers]:
    """Return the plan of cuda_src/quantize/elementwise.cuh."""
    cols, config = problem.cols, config_of(problem)
    constants = {"FP8_HEIGHT": config.height, "FP8_WIDTH": config.width, "FP8_GROUPS": config.groups}
    run = prepare(problem, "elementwise", config.threads, constants)
    blocks_y = min(max(ceil_div(cols, config.width), 1), limits.BLOCKS_ALONG_YZ) if config.width else 1

    def choose(numbers: QuantizeNumbers) -> Chosen:
        blocks = 1 if config.height < 0 else ceil_div(numbers.rows_padded, config.height)
        return run, (blocks, blocks_y, 1)

    return plan_of(cols, choose)
