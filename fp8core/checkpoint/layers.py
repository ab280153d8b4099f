"""The linear layers of a checkpoint, as what can be tuned: their shapes and their scales."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from fp8core.checkpoint import plan_checkpoint
from fp8core.checkpoint.files import Entry, read_header
from fp8core.checkpoint.schemes import SchemeName
from fp8core.errors import CheckpointError
from fp8core.problem import BLOCK_128


class Layer(NamedTuple):
    """A linear layer: its output channels, its input's, how it is scaled, and whether it has a bias.

    Examples:
        >>> from fp8core.checkpoint.layers import Layer
        >>> Layer(4096, 14336, "channel").k
        14336
    """

    n: int
    k: int
    scheme: SchemeName
    bias: bool = False


def layers_of(
    source: str | os.PathLike[str],
    scheme: SchemeName = "channel",
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
) -> dict[Layer, list[str]]:
    """Return the different linear layers of a safetensors file or folder, each with the names of its weights.

    Of a checkpoint in high precision they are those that `quantize_checkpoint` would quantize; of one in FP8 all of its
    FP8 weights, scaled as their scales say. Only headers are read.

    Args:
        source: a safetensors file, or a folder of them.
        scheme: how the layers would be scaled, where they are not FP8 yet.
        include: patterns of modules, as for `quantize_checkpoint`; of a checkpoint in high precision.
        exclude: patterns of modules to leave out, likewise.

    Raises:
        CheckpointError: the source cannot be read, or has no such layer.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint.layers import layers_of
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"up.weight": np.ones((64, 32), np.float32)}, f"{folder}/model.safetensors")
        ...     layers_of(folder)
        {Layer(n=64, k=32, scheme='channel', bias=False): ['up.weight']}
    """
    entries = _entries(Path(source))
    names = {entry.name for entry in entries}
    quantized = [entry for entry in entries if entry.dtype.startswith("F8_E") and len(entry.shape) == 2]
    found: dict[Layer, list[str]] = {}

    def add(tensor: str, shape: Sequence[int], how: SchemeName) -> None:
        bias = f"{tensor.removesuffix('.weight')}.bias" in names
        found.setdefault(Layer(shape[0], shape[1], how, bias), []).append(tensor)

    if quantized:
        shapes = {entry.name: entry.shape for entry in entries}
        for entry in quantized:
            add(entry.name, entry.shape, _scheme_of(entry, shapes))
    else:
        plan = plan_checkpoint(source, scheme=scheme, include=include, exclude=exclude)
        for verdict in plan.verdicts:
            if verdict.status == "quantized":
                add(verdict.tensor, verdict.shape, scheme)
    if not found:
        raise CheckpointError(f"{source} has no linear layer to tune")
    return found


def _entries(source: Path) -> list[Entry]:
    files: Iterable[Path] = [source]
    if source.is_dir():
        files = sorted(file for file in source.glob("*.safetensors") if not file.name.startswith("."))
    found = [entry for file in files for entry in read_header(file).entries.values()]
    if not found:
        raise CheckpointError(f"{source} holds no safetensors file")
    return found


def _scheme_of(weight: Entry, shapes: dict[str, tuple[int, ...]]) -> SchemeName:
    """Return how the scale that is stored beside a weight scales it."""
    scale = next((shapes[name] for end in ("_scale", "_scale_inv") if (name := weight.name + end) in shapes), None)
    if scale is None:
        raise CheckpointError(f"{weight.name} needs a scale beside it, {weight.name}_scale or _scale_inv, got none")
    n, k = weight.shape
    known: dict[tuple[int, ...], SchemeName] = {
        (): "tensor",
        (1,): "tensor",
        (1, 1): "tensor",
        BLOCK_128.scale_shape(n, k): "block",
        (n,): "channel",
        (n, 1): "channel",
    }
    if scale not in known:
        raise CheckpointError(
            f"{weight.name} needs scales per tensor, channel or 128x128, got a scale of shape {scale}"
        )
    return known[scale]
