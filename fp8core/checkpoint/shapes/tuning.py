"""`tune_checkpoint`: tunes the products of a checkpoint's linear layers."""

import os
from collections.abc import Iterable, Sequence
from typing import Final, Literal

from fp8core.checkpoint.shapes.linear import LayerShape, layers_of
from fp8core.core import checks
from fp8core.problem import ScaledMm
from fp8core.target import Target
from fp8core.tuning import Tuning
from fp8core.tuning.shapes import Progress, Scheme, layer_product, tuned

ROWS: Final = (1, 16, 64, 256, 1024, 4096)
"""The default numbers of rows for which each layer is tuned."""


def tune_checkpoint(
    source: str | os.PathLike[str],
    rows: Sequence[int] = ROWS,
    *,
    scheme: Scheme = "channel",
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    device: int | str | Target | None = None,
    progress: Progress | None = None,
) -> tuple[Tuning, ...]:
    """Tune the products of the linear layers of a safetensors file or folder: `tune_shapes` for their shapes.

    In an FP8 checkpoint these are the layers with FP8 weights, with the schemes of their scales; in a high-precision
    checkpoint, the layers that `quantize_checkpoint` would quantize. Only headers are read. Layers of the same shape
    are tuned once.

    Args:
        source: a safetensors file, or a folder of them.
        rows: the numbers of rows (m) of the products; each layer has one product for each number.
        scheme: the scheme of layers that are not FP8 yet: "channel", "tensor" or "block".
        dtype: the dtype of inputs and results.
        device: the GPU, as for `fp8core.capabilities`; None is the current one.
        progress: called after each product with its tuning, the number of products that are done, and their total.

    Returns:
        A tuning for each product; `fp8core.save_tunings` stores them.

    Raises:
        CheckpointError: the source cannot be read, or has no such layer.
        ShapeError: rows are not whole numbers from 1 to 2**31 - 1.
        ScaleError: the scheme is not one of these.
        DTypeError: the dtype is not float32, float16 or bfloat16.
        DeviceError: there is no such device.
        TuningError: CuPy's current stream is being captured into a graph.
        UnsupportedProblemError: the device is not a GPU of this machine, or no kernel can run a product.

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
    numbers = checks.extents(rows, "rows", least=1)
    return [
        layer_product((m, layer.n, layer.k), layer.scheme, dtype, **layer.options, device=device)
        for layer in layers
        for m in numbers
    ]
