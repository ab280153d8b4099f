"""`compile_options`: inductor options and a graph pass for models of FP8 layers."""

from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from fp8core.kernels.encodings import ceil_div
from fp8core.problem import BLOCK_128
from fp8core.runtime.sources import digest_of
from fp8core.torch.joining import ARRAYS, LINEAR, LINEAR_JOINED, join_, runs
from fp8core.torch.layers import check_model

PDL: Final = "triton.enable_pdl"
"""The inductor option that launches inductor's own kernels with programmatic dependent launch."""
_PACKAGE: Final = Path(__file__).parents[1]


def compile_options(model: torch.nn.Module | None = None) -> dict[str, Any]:
    """Return options for ``torch.compile(model, options=...)`` that speed up models called with few rows.

    - Inductor launches its kernels with programmatic dependent launch (sm_90 and later), so that an FP8 layer reads its
      weight while the kernel before it still runs. Compiled code must not write to FP8 weights then
      (concepts/pdl-and-weights.md).
    - Layers that take the same input, such as q, k and v of an attention, become one product if their weights are
      adjacent in memory; otherwise they are only called one after the other.

    Add ``{"triton.cudagraphs": True}`` for what ``mode="reduce-overhead"`` does.

    Args:
        model: the model to compile, or None. The weights of its layers that may share an input are moved next to each
            other in memory, in place; values do not change. Move the model to its device first: moving it later
            separates the weights again.

    Raises:
        DTypeError: model is neither a ``torch.nn.Module`` nor None.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32))
        >>> report = fp8core.torch.quantize_model_(model)
        >>> compiled = torch.compile(model, options=fp8core.torch.compile_options(model))
    """
    from torch._inductor import config

    if model is not None:
        check_model(model)
        join_(model)
    options: dict[str, Any] = {"post_grad_custom_post_pass": _graph_pass(model is not None)}
    if hasattr(config.triton, PDL.partition(".")[2]):
        options[PDL] = True
    return options


def group_by_input(graph: torch.fx.Graph) -> list[list[Any]]:
    """Move layers that take the same input next to each other, so that all but the first prefetch their weights.

    Otherwise norms and rotary embeddings, for example, stand between q, k and v of an attention. No layer is moved past
    a node that writes to memory.

    Returns:
        Groups of two or more layers with the same input.
    """
    places = {node: at for at, node in enumerate(graph.nodes)}
    by_input: dict[Any, list[Any]] = {}  # the groups that later layers can still be moved to
    groups = []
    for node in list(graph.nodes):
        if _writes(node):
            by_input.clear()
        elif node.target is LINEAR:
            group = by_input.get(node.args[0])
            if group is not None and all(places[one] < places[group[0]] for one in node.all_input_nodes):
                group[-1].append(node)
                group.append(node)
            else:
                by_input[node.args[0]] = [node]
                groups.append(by_input[node.args[0]])
    return [group for group in groups if len(group) > 1]


def join_by_input(graph: torch.fx.Graph) -> None:
    """Replace layers that take the same input, and differ in their weights only, by one product.

    Layers are joined in the order of the graph's weight placeholders, which is usually the order of the model's layers.
    """
    inputs = {node: at for at, node in enumerate(graph.find_nodes(op="placeholder"))}
    for group in group_by_input(graph):
        alike: dict[Any, list[Any]] = {}
        for node in sorted(group, key=lambda node: inputs.get(node.args[1], 0)):
            weight, scale = node.args[1].meta["val"], node.args[2].meta["val"]
            of = _rows_of_a_scale(weight, scale)
            packed = of is not None and weight.is_contiguous()
            if packed and all(one is None for one in node.args[3:ARRAYS]):
                key = weight.dtype, weight.shape[1], of, scale.shape[1], repr(node.args[ARRAYS:])
                alike.setdefault(key, []).append(node)
        for several in alike.values():
            for nodes in runs(several, lambda node: (node.args[1].meta["val"], node.args[2].meta["val"])):
                _join(graph, nodes, min(nodes, key=group.index))


def _rows_of_a_scale(weight: Any, scale: Any) -> int | None:
    """Return how many rows of a weight share a scale: 1, or those of a block; None for any other number.

    Only scales of the same number of rows make one scale of the joined weight: one of ``[n, 1]`` behind one of
    ``[1, 1]`` does not.
    """
    if scale.ndim == weight.ndim:
        for rows in (1, BLOCK_128.rows):
            if scale.shape[0] == ceil_div(weight.shape[0], rows):
                return rows
    return None


def _join(graph: torch.fx.Graph, nodes: list[Any], first: Any) -> None:
    """Replace layers by contiguous slices of one joined product, inserted before ``first``, the first of the layers."""
    x, _, _, *options = nodes[0].args
    weights, scales = ([node.args[at] for node in nodes] for at in (1, 2))
    with graph.inserting_before(first):
        whole = graph.call_function(LINEAR_JOINED, (x, weights, scales, *options[ARRAYS - 3 :]))
        start = 0
        for node in nodes:
            end = start + node.args[1].meta["val"].shape[0]
            axis = node.meta["val"].ndim - 1
            part = graph.call_function(torch.ops.aten.slice.Tensor, (whole, axis, start, end))
            own: dict[str, Any] = {"memory_format": torch.contiguous_format}
            node.replace_all_uses_with(graph.call_function(torch.ops.aten.clone.default, (part,), own))
            start = end
    for node in nodes:
        graph.erase_node(node)


def _writes(node: Any) -> bool:
    """Return whether a node may write to one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


@cache
def _graph_pass(join: bool) -> Any:
    """Return `join_by_input` or `group_by_input` as a pass of inductor, with the uuid that inductor's cache needs."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class GraphPass(CustomGraphPass):
        """Joins layers that take the same input into one product, or moves them behind each other."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            (join_by_input if join else group_by_input)(graph)

        def uuid(self) -> Any:
            sources = digest(_PACKAGE)
            return sources and f"{sources} {join}"

    return GraphPass()


@cache
def digest(package: Path) -> str | None:
    """Return a hash of the Python modules in a folder; None, by which inductor keeps nothing, if there are none.

    What inductor keeps of a graph depends on more than the pass: on the alignments, block sizes and schemas that the
    pass reads from other modules, and on the shapes and strides that the operators declare for their results. So the
    hash is of the whole package: a list of modules would miss those that they import later.
    """
    found = sorted(package.rglob("*.py"))
    return digest_of(package, found) if found else None
