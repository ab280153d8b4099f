"""The rows of tokens in the order of their experts, and back, on the host."""

from functools import partial
from typing import Final

import numpy as np

from fp8core.host.memory import matrix, vector
from fp8core.problem import MoePermute, MoeUnpermute
from fp8core.runtime.plans import MoePermuteNumbers, MoeUnpermuteNumbers, Plan

SCALES: Final = {0: "uint8", 1: "uint8", 4: "uint32"}
"""By the bytes of a scale: a dtype that holds its bits."""


def plan_moe_permute(problem: MoePermute) -> Plan[MoePermuteNumbers]:
    """Return the plan that sorts choices of experts and copies the row, and the scales, of the token of each."""
    scales = SCALES[problem.scale_bytes]

    def launch(
        n: MoePermuteNumbers,
        _stream: int,
        x: int,
        scale: int,
        topk_ids: int,
        rows: int,
        row_scale: int,
        offs: int,
        inverse: int,
        _counts: int,
    ) -> None:
        """Write the sorted rows, their scales, where each expert's end, and the place of each choice."""
        choices = n.tokens * problem.each
        chosen = vector(topk_ids, problem.ids, choices)
        known = (chosen >= 0) & (chosen < problem.experts)
        numbers = np.where(known, chosen, problem.experts)
        order = np.argsort(numbers, kind="stable")
        counts = np.bincount(numbers, minlength=problem.experts + 1)[: problem.experts]
        vector(offs, "int32", problem.experts)[:] = np.cumsum(counts)
        places = np.empty(choices, np.int32)
        places[order] = np.arange(choices)
        vector(inverse, "int32", choices)[:] = np.where(known, places, -1)
        of = order[: counts.sum()] // problem.each
        given = matrix(x, "uint8", (n.tokens, problem.row_bytes), (n.x_stride, 1))
        matrix(rows, "uint8", (choices, problem.row_bytes), (problem.row_bytes, 1))[: len(of)] = given[of]
        if problem.scale_bytes:
            given = matrix(scale, scales, (n.tokens, n.scale_cols), (n.scale_row_stride, n.scale_col_stride))
            strides = n.row_scale_row_stride, n.row_scale_col_stride
            matrix(row_scale, scales, (choices, n.scale_cols), strides)[: len(of)] = given[of]

    return Plan(MoePermuteNumbers, lambda numbers: partial(launch, numbers))


def plan_moe_unpermute(problem: MoeUnpermute) -> Plan[MoeUnpermuteNumbers]:
    """Return the plan that adds the weighted rows of each token in fp32, in the order of its choices."""

    @np.errstate(all="ignore")
    def launch(n: MoeUnpermuteNumbers, _stream: int, y: int, inverse: int, weights: int, out: int) -> None:
        """Write the sums; places that are no row of ``y`` are left out."""
        shape = n.tokens, problem.each
        places = matrix(inverse, "int32", shape, (problem.each, 1))
        known = (places >= 0) & (places < n.rows)
        given = matrix(y, problem.y, (n.rows, problem.cols), (n.y_stride, 1))
        shares = matrix(weights, problem.weights, shape, (problem.each, 1)) if problem.weights else None
        sums = np.zeros((n.tokens, problem.cols), np.float32)
        for choice in range(problem.each):
            of = np.flatnonzero(known[:, choice])
            values = given[places[of, choice]].astype(np.float32)
            if shares is not None:
                values *= shares[of, choice, None]
            sums[of] += values
        matrix(out, problem.out, (n.tokens, problem.cols), (n.out_stride, 1))[:] = sums

    return Plan(MoeUnpermuteNumbers, lambda numbers: partial(launch, numbers))
