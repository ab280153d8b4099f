"""`compile_options`: what inductor does not do by itself for models of FP8 layers."""

from functools import cache
from typing import Any, Final

import torch

from fp8core.torch.operators import OVERLOADS

PDL: Final = "triton.enable_pdl"
"""Inductor's option for programmatic dependent launch of its own kernels."""


def compile_options() -> dict[str, Any]:
    """Return options for torch.compile with which models of few rows run faster: ``torch.compile(m, options=...)``.

    - Kernels of inductor are launched programmatically (sm_90 and later), so that layers read their weights while what
      precedes them still runs. The compiled code must then not write to FP8 weights (concepts/pdl-and-weights.md).
    - Layers that take the same input follow each other.

    Add ``{"triton.cudagraphs": True}`` for what ``mode="reduce-overhead"`` does.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
        >>> report = fp8core.torch.quantize_model_(model)
        >>> compiled = torch.compile(model, options=fp8core.torch.compile_options())
    """
    from torch._inductor import config

    options: dict[str, Any] = {"post_grad_custom_post_pass": _together_pass()}
    if hasattr(config.triton, PDL.partition(".")[2]):
        options[PDL] = True
    return options


def together(graph: torch.fx.Graph) -> None:
    """Put layers that take the same input one behind the other, so that the later read their weights early.

    Between q, k and v of an attention there would be norms and rotations. Nothing is moved past a node that writes.
    """
    layers = {found for (name, _), found in OVERLOADS.items() if name == "linear"}
    places = {node: at for at, node in enumerate(graph.nodes)}
    met: dict[Any, tuple[int, Any]] = {}
    for node in list(graph.nodes):
        if _writes(node):
            met.clear()
        elif node.target in layers:
            first, behind = met.get(node.args[0], (places[node], None))
            if behind is not None and all(places[one] < first for one in node.all_input_nodes):
                behind.append(node)
            met[node.args[0]] = first, node


def _writes(node: Any) -> bool:
    """Return whether a node may write to memory of others."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


@cache
def _together_pass() -> Any:
    """Return `together` as inductor takes it: its cache of graphs needs to know it."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Together(CustomGraphPass):
        """Puts layers that take the same input one behind the other."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            together(graph)

        def uuid(self) -> Any:
            return f"{__name__}.together 1"

    return Together()
