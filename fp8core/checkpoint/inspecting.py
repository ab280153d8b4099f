"""Summarizes a checkpoint: its layers by kind of scale, its other tensors, and what its configuration claims."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from fp8core.checkpoint.formats.claims import Claim
from fp8core.checkpoint.formats.naming import TITLES
from fp8core.checkpoint.reading.faults import Fault, header_faults
from fp8core.checkpoint.reading.layers import Layer, Tensor
from fp8core.checkpoint.reading.reader import Checkpoint
from fp8core.errors import CheckpointError


class Kind(NamedTuple):
    """A group of layers with the same format and scales, or of other tensors with the same dtype.

    Examples:
        `inspect_checkpoint` returns them.

        >>> from fp8core.checkpoint import Kind
        >>> Kind("BF16", "", "", 2, 96, 192, "norm.weight").nbytes
        192
    """

    what: str
    """The FP8 format of the weights, such as "e4m3fn", with the number of stacked experts if there are any; or
    safetensors' dtype name of the other tensors."""
    scales: str
    """Which elements share a scale, and how scales are stored; empty for other tensors."""
    activations: str
    """How activations are scaled: "static", "dynamic", or "dynamic, bounded" with an upper bound; empty for other
    tensors."""
    number: int
    """The number of layers or tensors."""
    elements: int
    """The number of elements of their weights."""
    nbytes: int
    """Their bytes, including scales."""
    example: str
    """The name of the first of them."""


class Inspection(NamedTuple):
    """The summary of a checkpoint.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint import inspect_checkpoint, open_checkpoint
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"up.weight": np.ones((64, 32), np.float32)}, f"{folder}/model.safetensors")
        ...     found = inspect_checkpoint(open_checkpoint(folder))
        >>> found.format, found.others[0].what, found.others[0].number
        ('unquantized', 'F32', 1)
    """

    path: str
    format: str
    title: str
    """The format's usual name."""
    claim: Claim
    files: int
    """The number of weight files."""
    nbytes: int
    """The size of the weight files."""
    layers: tuple[Kind, ...]
    """The FP8 layers, by kind."""
    others: tuple[Kind, ...]
    """The tensors that belong to no FP8 layer, by kind."""
    kv_scales: int
    """The number of scales of the KV cache."""
    faults: tuple[Fault, ...]
    """The faults that headers and configuration reveal; `verify_checkpoint` also reads the numbers."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values for ``json.dumps``."""
        claim = self.claim
        return {
            "path": self.path,
            "format": self.format,
            "title": self.title,
            "files": self.files,
            "bytes": self.nbytes,
            "claim": None
            if not claim.file
            else {
                "file": claim.file,
                "format": claim.format,
                "variant": claim.variant,
                "granularities": sorted(claim.granularities),
                "group_shape": None if claim.group_shape is None else list(claim.group_shape),
                "activations": claim.activations,
                "ignore": list(claim.ignore),
                "kv_cache": claim.kv_cache,
            },
            "layers": [kind._asdict() for kind in self.layers],
            "others": [kind._asdict() for kind in self.others],
            "kv_scales": self.kv_scales,
            "faults": [fault._asdict() for fault in self.faults],
        }


def inspect_checkpoint(checkpoint: Checkpoint) -> Inspection:
    """Return the summary of a checkpoint, from its headers, its configuration and its zero points.

    Args:
        checkpoint: a checkpoint from `open_checkpoint`.

    Raises:
        CheckpointError: checkpoint is something else, such as a path.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint import inspect_checkpoint, open_checkpoint
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"up.weight": np.ones((64, 32), np.float32)}, f"{folder}/model.safetensors")
        ...     inspect_checkpoint(open_checkpoint(folder)).files
        1
    """
    if not isinstance(checkpoint, Checkpoint):
        raise CheckpointError(f"checkpoint needs a Checkpoint, as open_checkpoint returns it, got {checkpoint!r}")
    return Inspection(
        path=str(checkpoint.path),
        format=checkpoint.format,
        title=_title(checkpoint),
        claim=checkpoint.claim,
        files=len(checkpoint.source.headers),
        nbytes=checkpoint.source.nbytes,
        layers=tuple(_layer_kinds(checkpoint.layers.values())),
        others=tuple(_other_kinds(checkpoint.tensors())),
        kv_scales=len(checkpoint.kv_scales()),
        faults=tuple(header_faults(checkpoint)),
    )


def scales_of(layer: Layer) -> str:
    """Return in words which elements share a scale, and how scales are stored."""
    if layer.repeated:
        return "two of a kind"
    if layer.scale is None:
        return "none"
    if layer.granularity is None or layer.group_shape is None:
        return f"{list(layer.scale.shape)} fits nothing"
    shape = "x".join(map(str, layer.group_shape))
    shown = f"{layer.granularity} {shape}" if layer.granularity in ("block", "group") else layer.granularity
    return f"{shown}, {layer.scale_kind}"


def _activations(layer: Layer) -> str:
    if layer.input_scale is not None:
        return "static"
    return "dynamic, bounded" if layer.input_scale_ub is not None else "dynamic"


def _title(checkpoint: Checkpoint) -> str:
    """Return the format's usual name, with the name of another quantization if there is one."""
    other = checkpoint.other
    if checkpoint.layers:
        return TITLES[checkpoint.format] + ("" if other is None else f", some weights {other[1]}")
    if other is not None:
        return f"no FP8, but {other[1]}"
    return "no FP8 weights" if checkpoint.claim.file else TITLES[checkpoint.format]


def _layer_kinds(layers: Iterable[Layer]) -> Iterable[Kind]:
    found: dict[tuple[str, str, str], list[Layer]] = {}
    for layer in layers:
        experts = "" if layer.experts is None else f" x {layer.experts} experts"
        key = layer.dtype.removeprefix("float8_") + experts, scales_of(layer), _activations(layer)
        found.setdefault(key, []).append(layer)
    for key, alike in found.items():
        nbytes = sum(one.nbytes for layer in alike for one in layer.tensors())
        yield Kind(*key, len(alike), sum(one.weight.nbytes for one in alike), nbytes, alike[0].name)


def _other_kinds(tensors: Iterable[Tensor]) -> Iterable[Kind]:
    found: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    for dtype, alike in found.items():
        elements = sum(one.elements for one in alike)
        yield Kind(dtype, "", "", len(alike), elements, sum(one.nbytes for one in alike), alike[0].name)
