"""Verifies a checkpoint: reports every fault with the name of its tensor."""

import math
import os
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8core.checkpoint.disk.files import DTYPES, FLOATS, Entry, read_rows, stored_rows
from fp8core.checkpoint.disk.running import Progress, advancing
from fp8core.checkpoint.disk.source import path_of, scan
from fp8core.checkpoint.disk.writing import Advance
from fp8core.checkpoint.formats.naming import MARKER, OTHERS, WEIGHT, is_scale, module_of, other_quantizations
from fp8core.checkpoint.quantization.verdicts import TIED, is_tied
from fp8core.checkpoint.reading.experts import split_like
from fp8core.checkpoint.reading.faults import Fault, header_faults
from fp8core.checkpoint.reading.layers import Layer, Tensor
from fp8core.checkpoint.reading.measuring import Measured, measure, scale_faults, suspicious
from fp8core.checkpoint.reading.reader import SCALES, Checkpoint, checkpoint_of
from fp8core.checkpoint.reading.values import MOST_ITEMSIZE, dequantized, rows_of_a_group, sum_of_squares
from fp8core.errors import CheckpointError

TOLERANCE: Final = {"F8_E4M3": 0.08, "F8_E4M3FNUZ": 0.08, "F8_E5M2": 0.15, "F8_E5M2FNUZ": 0.15}
"""By dtype: the relative error of a whole weight above which it is reported as different from its original. Rounding
to e4m3 causes 2.6 %, rounding twice 3.7 %."""
OTHERS_TOLERANCE: Final = 0.01
"""The same limit for tensors that are not FP8 and have another dtype in the original."""
COMPUTED: Final = ".inv_freq"
"""The suffix of tensors that models compute anew, so that programs may leave them out."""


class Verification(NamedTuple):
    """The result of `verify_checkpoint`.

    Examples:
        >>> from fp8core.checkpoint import Verification
        >>> Verification._fields
        ('checkpoint', 'faults', 'errors')
    """

    checkpoint: Checkpoint
    faults: tuple[Fault, ...]
    """The faults; empty if there are none."""
    errors: dict[str, float]
    """With ``against``, by FP8 weight: the norm of the difference over the norm of the original."""


def verify_checkpoint(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    unscaled: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Return every fault of a checkpoint, with the names of tensors; nothing is written.

    It reports a wrong index; FP8 weights without a scale, with a scale whose shape does not match, or with several
    static scales of activations; scales without a weight; scales that are not finite, zero or negative; codes that are
    NaN or infinite; contradictions between the configuration and the tensors; and scales that are probably inverted,
    squared, or were raised to powers of two without changing the codes. The last three are guessed from the numbers,
    but not for weights that match ``against``. Only some rows of a tensor are in memory at a time.

    Experts that are stacked in the original, and split in this checkpoint, are compared one by one.

    What else makes weights, such as integers or zero points, is not verified, and is no fault: `Checkpoint.other` of
    the result's ``checkpoint`` names it.

    Args:
        path: as for `open_checkpoint`.
        against: the original of this checkpoint. Each FP8 weight may differ from it only by rounding (up to 8 % of its
            norm for e4m3, 15 % for e5m2). Every other tensor, except those of the quantization, has to be in both, and
            the same, or within 1 % of its norm in another dtype.
        unscaled: as for `open_checkpoint`.
        progress: as for `quantize_checkpoint`.

    Returns:
        The faults and, with ``against``, the errors of the FP8 weights.

    Raises:
        CheckpointError: a file cannot be read, is damaged, or changes during the call; or there is nothing to verify:
            no FP8 weight, no scale, and no configuration that claims one.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint import verify_checkpoint
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"up.weight_scale": np.ones((64, 1), np.float32)}, f"{folder}/model.safetensors")
        ...     [fault.text for fault in verify_checkpoint(folder).faults]
        ['the scale up.weight_scale has no weight up.weight']
    """
    faults: list[Fault] = []
    source = scan(path_of(path, "path"), lambda tensor, text: faults.append(Fault(tensor, "index", text)))
    checkpoint, other = checkpoint_of(source, unscaled=unscaled), None
    if against is not None:
        other = checkpoint_of(split_like(scan(path_of(against, "against")), checkpoint.all_tensors))
    faults += _unlisted(checkpoint)
    faults += header_faults(checkpoint)
    if not (checkpoint.layers or checkpoint.kv_scales() or faults):
        there = checkpoint.other
        got = "none: quantize makes them" if there is None else f"only {there[0]}, which is of {there[1]}"
        raise CheckpointError(f"{checkpoint.path} needs FP8 weights to be verified, got {got}")
    for tensor in _scales(checkpoint):
        faults += scale_faults(tensor)
    layers = [layer for layer in checkpoint.layers.values() if not layer.fault()]
    originals = 0 if other is None else sum(entry.nbytes for entry in other.source.entries)
    total = sum(layer.weight.nbytes for layer in layers) + originals
    advance = advancing(progress, total)
    errors: dict[str, float] = {}
    measured = [measure(layer, layer.scales(), advance) for layer in layers]
    faults += _nan_codes(measured)
    different: list[Fault] = []
    if other is not None:
        different += _differences(checkpoint, other, errors, advance)
        advance(other.path.name, total)  # count the originals that need not be read
    right = errors.keys() - {fault.tensor for fault in different}
    faults += [fault for fault in suspicious(measured) if fault.tensor not in right]
    faults += different
    checkpoint.source.refuse_changed()
    return Verification(checkpoint, tuple(dict.fromkeys(faults)), errors)


def _scales(checkpoint: Checkpoint) -> Iterator[Tensor]:
    """Yield the scales of the layers and of the KV cache, whose numbers can be read."""
    belong = (
        scale
        for layer in checkpoint.layers.values()
        for scale in (layer.scale, layer.input_scale, layer.input_scale_ub)
        if scale is not None
    )
    of_cache = (checkpoint.all_tensors[name] for name in checkpoint.kv_scales())
    yield from (scale for scale in (*belong, *of_cache) if scale.dtype in SCALES)


def _unlisted(checkpoint: Checkpoint) -> Iterator[Fault]:
    """Yield tensors that the index does not list: loaders ignore them."""
    source = checkpoint.source
    for header in source.headers if source.weight_map else ():
        for name in header.entries:
            if name not in source.weight_map:
                yield Fault(name, "index", f"{source.index_name} does not name {name}, which is in {header.path.name}")


def _nan_codes(measured: list[Measured]) -> Iterator[Fault]:
    for one in measured:
        if one.nans:
            codes = "1 code is" if one.nans == 1 else f"{one.nans:,} codes are"
            yield Fault(one.layer.weight.name, "NaN code", f"{one.layer.weight.name} needs numbers, but {codes} NaN")


def _differences(
    checkpoint: Checkpoint, other: Checkpoint, errors: dict[str, float], advance: Advance
) -> Iterator[Fault]:
    """Yield a fault for each tensor that differs from the other checkpoint; fill ``errors`` by FP8 weight."""
    there = other.all_tensors
    for layer in checkpoint.layers.values():
        name = layer.weight.name
        original = there.get(name)
        if original is None:
            yield Fault(name, "difference", f"{other.path} has no {name}")
        elif original.shape != layer.weight.shape or original.dtype not in FLOATS:
            wanted = f"{list(layer.weight.shape)} of {', '.join(FLOATS)}"
            got = f"{list(original.shape)} of {original.dtype}"
            yield Fault(name, "difference", f"{name} needs an original {wanted}, got {got} in {other.path}")
        elif not layer.fault():
            errors[name] = relative_error(layer, original)
            advance(name, original.nbytes)
            if not errors[name] <= TOLERANCE[layer.weight.dtype]:
                text = f"{name} differs from {other.path} by {100 * errors[name]:.3g} % of its norm"
                yield Fault(name, "difference", text)
    elsewhere = _quantized_otherwise(checkpoint)
    for tensor in checkpoint.tensors():
        original = there.get(tensor.name)
        if original is not None and module_of(tensor.name) not in elsewhere:
            text = _unlike(tensor, original)
            advance(tensor.name, original.nbytes)
            if text:
                yield Fault(tensor.name, "difference", f"{tensor.name} {text} in {other.path}")
    yield from _in_one_alone(checkpoint, other, elsewhere)
    other.source.refuse_changed()


def relative_error(layer: Layer, original: Tensor) -> float:
    """Return the norm of the difference between an FP8 weight and its original over the original's norm, in float64."""
    difference = norm = 0.0
    n, k = layer.matrix_shape
    nbytes = n * k * DTYPES[original.dtype].itemsize
    with original.path.open("rb") as beside:
        for index, matrix in enumerate(layer.matrices()):
            wide = Entry(original.name, original.dtype, (n, k), original.begin + index * nbytes, nbytes, original.pitch)
            numbers = read_rows(beside, wide, rows_of_a_group(layer), MOST_ITEMSIZE)
            for (_, found), (_, original_rows) in zip(dequantized(layer, index, matrix), numbers, strict=True):
                exact = original_rows.astype(np.float32)
                difference += sum_of_squares(found - exact)
                norm += sum_of_squares(exact)
    return math.sqrt(difference / norm) if norm else math.sqrt(difference)


def _in_one_alone(checkpoint: Checkpoint, other: Checkpoint, elsewhere: set[str]) -> Iterator[Fault]:
    """Yield a fault for each tensor that one of the two lacks, except those that a quantization adds or replaces."""
    needless = elsewhere | ({*TIED} if is_tied(checkpoint.config) else set())
    of_quantization = tuple(module + mark for module in elsewhere for mark in "._")
    of_formats = {MARKER, *checkpoint.kv_scales()}
    here = [one.name for one in checkpoint.tensors()]
    added = [name for name in here if not (name in of_formats or is_scale(name) or name.startswith(of_quantization))]
    for names, one, lacking in ((added, checkpoint, other), (other.all_tensors, other, checkpoint)):
        for name in names:
            module = module_of(name)
            needed = not needless & {module, module.rpartition(".")[2]} and not name.endswith(COMPUTED)
            if needed and name not in lacking.all_tensors:
                yield Fault(name, "difference", f"{lacking.path} has no {name}, which is in {one.path}")


def _quantized_otherwise(checkpoint: Checkpoint) -> set[str]:
    """Return the modules whose weights are of another quantization."""
    names = [name for name, _ in other_quantizations({one.name: one.dtype for one in checkpoint.all_tensors.values()})]
    return {name.removesuffix(suffix) for name in names for suffix in (*OTHERS, WEIGHT) if name.endswith(suffix)}


def _unlike(tensor: Tensor, original: Tensor) -> str:
    """Return how a tensor that is not FP8 differs from the original; empty if it does not."""
    exact, floats = tensor.dtype == original.dtype, {tensor.dtype, original.dtype} <= FLOATS.keys()
    if tensor.shape != original.shape or not (exact or floats):
        return f"is {tensor.dtype} {list(tensor.shape)}, and {original.dtype} {list(original.shape)}"
    flat = not original.pitch  # experts stored by columns are read as matrices
    difference = norm = 0.0
    with tensor.path.open("rb") as file, original.path.open("rb") as beside:
        here = stored_rows(file, _column(tensor, floats) if flat else tensor.entry, itemsize=MOST_ITEMSIZE)
        there = stored_rows(beside, _column(original, floats) if flat else original.entry, itemsize=MOST_ITEMSIZE)
        for (_, found), (_, rows) in zip(here, there, strict=True):
            of_part = _squares(found, rows)
            difference, norm = difference + of_part[0], norm + of_part[1]
    if not floats:
        return "has other values than the one" if difference else ""
    if math.isinf(difference):
        return "has other NaN or Inf than the one"
    error = math.sqrt(difference / norm) if norm else math.sqrt(difference)
    same = difference == 0 if exact else error <= OTHERS_TOLERANCE
    return "" if same else f"differs by {100 * error:.3g} % of its norm from the one"


@np.errstate(over="ignore", invalid="ignore")  # invalid: signaling NaN
def _squares(found: NDArray[Any], exact: NDArray[Any]) -> tuple[float, float]:
    """Return the sums of squares of the differences (inf if others are not finite) and of the finite originals."""
    numbers, originals = found.astype(np.float64), exact.astype(np.float64)
    finite = np.isfinite(originals)
    norm = float(np.square(originals[finite]).sum())
    if found.dtype == exact.dtype and found.tobytes() == exact.tobytes():
        return 0.0, norm
    if not np.array_equal(numbers[~finite], originals[~finite], equal_nan=True):
        return math.inf, norm
    return float(np.square(numbers[finite] - originals[finite]).sum()), norm


def _column(tensor: Tensor, floats: bool) -> Entry:
    """Return a tensor as a column of its elements or, of other dtypes than floats, of its bytes."""
    entry = tensor.entry
    return entry._replace(shape=(tensor.elements, 1)) if floats else entry._replace(dtype="U8", shape=(entry.nbytes, 1))
