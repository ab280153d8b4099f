"""The shapes and scale schemes of a checkpoint's linear layers, for tuning and compiling."""

import os
from typing import Any, NamedTuple

from fp8core.checkpoint.disk.source import path_of, scan
from fp8core.checkpoint.formats.naming import module_of
from fp8core.checkpoint.quantization.quantizing import plan_checkpoint
from fp8core.checkpoint.reading.experts import split_experts, split_if_possible
from fp8core.checkpoint.reading.layers import Layer
from fp8core.checkpoint.reading.reader import checkpoint_of
from fp8core.errors import CheckpointError
from fp8core.tuning.shapes import LayerOptions, Scheme, check_scheme


class LayerShape(NamedTuple):
    """A linear layer: output channels n, input channels k, scheme of its scales, and whether it has a bias.

    Examples:
        >>> from fp8core.checkpoint.shapes.linear import LayerShape
        >>> LayerShape(4096, 14336, "channel").k
        14336
    """

    n: int
    k: int
    scheme: Scheme
    bias: bool = False
    static: bool = False
    """Whether the scale of its input is stored."""
    weight_dtype: str | None = "float8_e4m3fn"
    """The FP8 format of the weight; None for the E4M3 format that the device multiplies."""

    @property
    def options(self) -> LayerOptions:
        """The options of `fp8core.tuning.shapes.layer_call`."""
        return {"bias": self.bias, "static": self.static, "weight_dtype": self.weight_dtype}


def layers_of(source: str | os.PathLike[str], scheme: Scheme = "channel") -> dict[LayerShape, list[str]]:
    """Return the distinct linear layers of a safetensors file or folder, each with the names of its weights.

    In an FP8 checkpoint these are all FP8 weights, with the schemes of their scales; in a high-precision checkpoint,
    the weights that `quantize_checkpoint` would quantize. Experts that are stacked in one tensor count as the layers
    that `split_experts` makes of them; those that it refuses are left out. Only headers are read.

    Args:
        source: a safetensors file, or a folder of them.
        scheme: the scheme of layers that are not FP8 yet.

    Raises:
        CheckpointError: the source cannot be read, or has no such layer.
        ScaleError: the scheme is not one of those.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint.shapes.linear import layers_of
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"up.weight": np.ones((64, 32), np.float32)}, f"{folder}/model.safetensors")
        ...     found = layers_of(folder)
        >>> [(shape.n, shape.k, shape.scheme, names) for shape, names in found.items()]
        [(64, 32, 'channel', ['up.weight'])]
    """
    check_scheme(scheme)
    stored = scan(path_of(source, "source"))
    split = split_if_possible(stored)
    checkpoint = checkpoint_of(split)
    found: dict[LayerShape, list[str]] = {}

    def add(tensor: str, n: int, k: int, how: Scheme, *others: Any) -> None:
        bias = f"{module_of(tensor)}.bias" in checkpoint.all_tensors
        found.setdefault(LayerShape(n, k, how, bias, *others), []).append(tensor)

    for layer in checkpoint.layers.values():
        if layer.experts is None:
            how = _scheme_of(layer)
            static = layer.input_scale is not None and how != "block"  # inputs of blocks are scaled by groups
            add(layer.weight.name, *layer.matrix_shape, how, static, layer.dtype)
    if checkpoint.layers and not found:
        split_experts(stored)  # says why stacked experts cannot be split
    elif not found:
        for verdict in plan_checkpoint(source, scheme=scheme, split_experts=split is not stored).verdicts:
            if verdict.status == "quantized":
                n, k = verdict.shape[-2:]
                add(verdict.tensor, n, k, scheme)
    if not found:
        raise CheckpointError(f"{source} has no linear layer")
    return found


def _scheme_of(layer: Layer) -> Scheme:
    if layer.group_shape is None:
        raise CheckpointError(layer.fault())
    if layer.scheme is None:
        raise CheckpointError(
            f"{layer.weight.name} needs scales per tensor, channel or 128x128, got scales per {layer.granularity}"
            f" of group shape {tuple(layer.group_shape)}"
        )
    return layer.scheme
