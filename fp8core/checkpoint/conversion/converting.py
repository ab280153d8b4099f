"""Converts FP8 checkpoints to bfloat16, or to FP8 of another format or granularity."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from fp8core.checkpoint.conversion.changes import Change
from fp8core.checkpoint.conversion.planning import PlannedConversion
from fp8core.checkpoint.disk.running import Progress, check, run
from fp8core.checkpoint.disk.source import path_of, scan
from fp8core.checkpoint.reading import experts
from fp8core.checkpoint.reading.reader import Checkpoint, checkpoint_of
from fp8core.errors import CheckpointError
from fp8core.types import ConversionName, ScaleFormat


class Conversion(NamedTuple):
    """A planned or finished conversion.

    Examples:
        `convert_checkpoint` and `plan_conversion` return one.

        >>> from fp8core.checkpoint import Conversion
        >>> Conversion._fields[:3]
        ('source', 'target', 'to')
    """

    source: Checkpoint
    target: Path | None
    """The new file or folder; None in a plan without one."""
    to: str
    changes: tuple[Change, ...]
    """The change of each FP8 layer that stays FP8; empty for a conversion to bfloat16."""
    left_out: dict[str, str]
    """The tensors that the new format has no place for: name -> reason."""
    bytes_before: int
    """The size of the old weight files."""
    bytes_after: int
    """The size of the new weight files."""
    quantization_config: dict[str, Any] | None
    """The new configuration; None for bfloat16 and ComfyUI, which have none."""
    errors: dict[str, float]
    """By requantized weight: the norm of the difference over the norm of the original. Empty in a plan."""

    @property
    def lossy(self) -> tuple[Change, ...]:
        """The changes whose codes have to be quantized anew."""
        return tuple(change for change in self.changes if not change.exact)


def plan_conversion(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    to: ConversionName,
    scales: ScaleFormat = "float32",
    e4m3: str | None = None,
    block_shape: tuple[int, int] | None = None,
    split_experts: bool = False,
    unscaled: bool = False,
    force: bool = False,
) -> Conversion:
    """Return what `convert_checkpoint` would do with every layer, and why. Nothing is written.

    Args:
        source: as for `convert_checkpoint`.
        target: as for `convert_checkpoint`; if given, it is checked, too.
        to: as for `convert_checkpoint`.
        scales: as for `convert_checkpoint`.
        e4m3: as for `convert_checkpoint`.
        block_shape: as for `convert_checkpoint`.
        split_experts: as for `convert_checkpoint`.
        unscaled: as for `convert_checkpoint`.
        force: as for `convert_checkpoint`.

    Raises:
        CheckpointError: the errors that `convert_checkpoint` raises before it writes, except that changes which need
            ``lossy`` are part of the plan (`Conversion.lossy`).

    Warns:
        RuntimeWarning: files of a killed run are beside the target.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint import plan_conversion, quantize_checkpoint
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"up.weight": np.ones((64, 32), np.float32)}, f"{folder}/model.safetensors")
        ...     summary = quantize_checkpoint(f"{folder}/model.safetensors", f"{folder}/fp8.safetensors")
        ...     plan = plan_conversion(f"{folder}/fp8.safetensors", to="bf16")
        >>> plan.to, plan.errors
        ('bf16', {})
    """
    planned = PlannedConversion(_opened(source, split_experts, unscaled), to, scales, e4m3, block_shape)
    given = None if target is None else path_of(target, "target")
    if given is not None:
        check(planned.work(), given, force=force)
    return _conversion(planned, given)


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: ConversionName,
    scales: ScaleFormat = "float32",
    e4m3: str | None = None,
    block_shape: tuple[int, int] | None = None,
    split_experts: bool = False,
    unscaled: bool = False,
    lossy: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write an FP8 checkpoint as bfloat16, or as FP8 of another format or granularity.

    Where possible, codes are kept and every weight stands for the same numbers: scales may get other names and shapes,
    bfloat16 and e8m0 scales become float32, one scale per tensor or fused shard may be repeated per channel or block,
    and e4m3fn and e4m3fnuz have the same codes under scales that differ by a factor of two. Other weights are quantized
    anew from float32(code) * scale, which needs ``lossy``. All other tensors are copied byte by byte. Only some rows of
    a tensor are in memory at a time, and the new files appear complete or not at all.

    Args:
        source: as for `open_checkpoint`.
        target: the new file or, for a folder, the new folder.
        to: "bf16" (float32(code) * scale, rounded once); a granularity, written as compressed-tensors: "channel",
            "block" (128x128, or the source's), "tensor" or "mxfp8" (1x32); or a format: "compressed-tensors" and
            "modelopt" with the granularity that the layers have, or per channel if they have several, or one that the
            format lacks, as ModelOpt's lacks one scale per tensor without static scales of activations;
            "modelopt-mxfp8", "deepseek" with blocks, "comfyui" with one scale per tensor.
        scales: the scale format: "float32", "ue8m0" (powers of two in float32), or "ue8m0_bytes" (their exponents as
            bytes, for "deepseek"; MXFP8 always has them).
        e4m3: "fn" (OCP) or "fnuz" (MI300). The default is "fn"; compressed-tensors keeps the layers' own.
        block_shape: the rows and columns of a block, for "block" and "deepseek". The default is the source's block
            shape if all layers have the same, else 128x128. Codes are kept if every new block is part of an old one.
        split_experts: as for `quantize_checkpoint`. For stacked experts, all formats but bf16 and deepseek require it.
        unscaled: as for `open_checkpoint`. Unscaled tensors that are not matrices become bfloat16.
        lossy: allow codes to be quantized anew; `Conversion.errors` holds the resulting errors.
        force: as for `quantize_checkpoint`.
        progress: as for `quantize_checkpoint`.

    Returns:
        The conversion, with the errors of the weights that were quantized anew.

    Raises:
        CheckpointError: the source cannot be read, is not FP8, or has faults that `verify_checkpoint` reports; codes
            would have to be quantized anew without ``lossy``; the format cannot express the request; the target exists,
            or cannot be written. No files are left behind.

    Warns:
        RuntimeWarning: files of a killed run were found beside the target, and removed.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint import convert_checkpoint, quantize_checkpoint
        >>> with TemporaryDirectory() as folder:
        ...     one, two, three = (f"{folder}/{name}.safetensors" for name in ("one", "two", "three"))
        ...     save_file({"up.weight": np.ones((64, 32), np.float32)}, one)
        ...     summary = quantize_checkpoint(one, two, scheme="tensor")
        ...     found = convert_checkpoint(two, three, to="channel")
        >>> [(change.layer.name, change.exact) for change in found.changes]
        [('up', True)]
    """
    planned = PlannedConversion(_opened(source, split_experts, unscaled), to, scales, e4m3, block_shape)
    anew = [change for change in planned.changes.values() if not change.exact]
    if anew and not lossy:
        first, more = anew[0], len(anew) - 1
        others = f" ({more} more weights: see --dry-run or plan_conversion)" if more else ""
        raise CheckpointError(
            f"converting {first.layer.weight.name} needs lossy (--lossy), as it has to be requantized: "
            f"{first.why}{others}"
        )
    found = run(planned.work(), path_of(target, "target"), force=force, progress=progress)
    return _conversion(planned, found.given)


def _opened(source: str | os.PathLike[str], split_experts: bool, unscaled: bool) -> Checkpoint:
    found = scan(path_of(source, "source"))
    return checkpoint_of(experts.split_experts(found) if split_experts else found, unscaled=unscaled)


def _conversion(planned: PlannedConversion, target: Path | None) -> Conversion:
    """Return the conversion that is planned, or was made."""
    return Conversion(
        source=planned.checkpoint,
        target=target,
        to=planned.to,
        changes=tuple(planned.changes.values()),
        left_out=planned.left_out,
        bytes_before=planned.checkpoint.source.nbytes,
        bytes_after=sum(one.size() for one in planned.files),
        quantization_config=planned.config,
        errors={name: error.relative for name, error in planned.errors.items()},
    )
