"""The shapes and scale schemes of a checkpoint's linear layers, for tuning and compiling."""

import os
from typing import NamedTuple

from fp8core.checkpoint.layers import Layer
from fp8core.checkpoint.naming import module_of
from fp8core.checkpoint.quantizing import plan_checkpoint
from fp8core.checkpoint.reader import open_checkpoint
from fp8core.errors import CheckpointError
from fp8core.tuning.shapes import Scheme


class LayerShape(NamedTuple):
    """A linear layer: output channels n, input channels k, scheme of its scales, and whether it has a bias.

    Examples:
        >>> from fp8core.checkpoint.linear_shapes import LayerShape
        >>> LayerShape(4096, 14336, "channel").k
        14336
    """

    n: int
    k: int
    scheme: Scheme
    bias: bool = False


def layers_of(source: str | os.PathLike[str], scheme: Scheme = "channel") -> dict[LayerShape, list[str]]:
    """Return the distinct linear layers of a safetensors file or folder, each with the names of its weights.

    In an FP8 checkpoint these are all FP8 weights, with the schemes of their scales; in a high-precision checkpoint,
    the weights that `quantize_checkpoint` would quantize. Only headers are read.

    Args:
        source: a safetensors file, or a folder of them.
        scheme: the scheme of layers that are not FP8 yet.

    Raises:
        CheckpointError: the source cannot be read, or has no such layer.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint.linear_shapes import layers_of
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"up.weight": np.ones((64, 32), np.float32)}, f"{folder}/model.safetensors")
        ...     layers_of(folder)
        {LayerShape(n=64, k=32, scheme='channel', bias=False): ['up.weight']}
    """
    checkpoint = open_checkpoint(source)
    found: dict[LayerShape, list[str]] = {}

    def add(tensor: str, n: int, k: int, how: Scheme) -> None:
        bias = f"{module_of(tensor)}.bias" in checkpoint.all_tensors
        found.setdefault(LayerShape(n, k, how, bias), []).append(tensor)

    for layer in checkpoint.layers.values():
        add(layer.weight.name, *layer.matrix_shape, _scheme_of(layer))
    if not found:
        for verdict in plan_checkpoint(source, scheme=scheme).verdicts:
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
