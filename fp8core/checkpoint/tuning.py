"""`tune_checkpoint`: the products of a checkpoint's linear layers, tuned by their shapes."""

import os
from collections.abc import Iterable, Sequence
from typing import Final, Literal

from fp8core.checkpoint.linear_shapes import LayerShape, Scaled, layers_of
from fp8core.core.specs import counts
from fp8core.problem import ScaledMm, Target
from fp8core.tuning import Tuning
from fp8core.tuning.shapes import Told, layer_product, tuned

ROWS: Final = (1, 16, 64, 256, 1024, 4096)
"""Numbers of rows that each layer is tuned for if none are given."""


def tune_checkpoint(
    source: str | os.PathLike[str],
    rows: Sequence[int] = ROWS,
    *,
    scheme: Scaled = "channel",
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    device: int | str | Target | None = None,
    progress: Told | None = None,
) -> tuple[Tuning, ...]:
    """Tune the products of the linear layers of a safetensors file or folder: `tune_shapes` of their shapes.

    Of a checkpoint in high precision they are the layers that `quantize_checkpoint` would quantize; of one in FP8 those
    with FP8 weights, scaled as they are. Only headers are read. Layers of the same shape are tuned once.

    Args:
        source: a safetensors file, or a folder of them.
        rows: numbers of rows (m), each of which is a product of its own.
        scheme: how the layers would be scaled, where they are not FP8 yet: "channel", "tensor" or "block".
        dtype: of inputs and results.
        device: the GPU, as for `fp8core.capabilities`; None is the current one.
        progress: called after each product with its tuning, how many are done, and how many there are.

    Returns:
        A tuning for each product, which `fp8core.save_tunings` keeps.

    Raises:
        CheckpointError: the source cannot be read, or has no such layer.
        ShapeError: rows are not whole numbers from 1 to 2**31 - 1.
        TuningError: CuPy's current stream is being captured into a graph.
        UnsupportedProblemError: there is no GPU, or no kernel can run a product.

    Examples:
        >>> from fp8core.checkpoint import tune_checkpoint
        >>> tune_checkpoint("absent.safetensors")
        Traceback (most recent call last):
        fp8core.errors.CheckpointError: cannot read absent.safetensors: No such file or directory
    """
    return tuned(products_of(layers_of(source, scheme), rows, dtype, device=device), progress)


def products_of(
    layers: Iterable[LayerShape], rows: Sequence[int], dtype: str, *, device: int | str | Target | None = None
) -> list[ScaledMm]:
    """Return the products of layers for numbers of rows.

    Raises:
        ShapeError: rows are not whole numbers from 1 to 2**31 - 1.
    """
    numbers = counts(rows, "rows", least=1)
    return [
        layer_product((m, layer.n, layer.k), layer.scheme, dtype, bias=layer.bias, device=device)
        for layer in layers
        for m in numbers
    ]
