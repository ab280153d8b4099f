"""FP8 checkpoints in, bfloat16 or FP8 of another format or granularity out."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from fp8core.checkpoint import experts
from fp8core.checkpoint.changes import Change
from fp8core.checkpoint.planning import Planned
from fp8core.checkpoint.reader import Checkpoint, checkpoint_of
from fp8core.checkpoint.running import Progress, check, run
from fp8core.checkpoint.source import scan
from fp8core.errors import CheckpointError
from fp8core.types import ConversionName, ScaleFormat


class Conversion(NamedTuple):
    """What a conversion does, or did.

    Examples:
        `convert_checkpoint` and `plan_conversion` give one.

        >>> from fp8core.checkpoint import Conversion
        >>> Conversion._fields[:3]
        ('source', 'target', 'to')
    """

    source: Checkpoint
    target: Path | None
    to: str
    changes: tuple[Change, ...]
    """What is done to each FP8 layer that stays FP8; empty of bf16."""
    left_out: dict[str, str]
    """Tensors that the new format has no place for: name -> why."""
    bytes_before: int
    bytes_after: int
    quantization_config: dict[str, Any] | None
    """None where there is none any more, and of ComfyUI."""
    errors: dict[str, float]
    """By weight that was made anew: the norm of the difference over the norm of what it was. Empty of a plan."""

    @property
    def lossy(self) -> tuple[Change, ...]:
        """The layers whose codes have to be made anew."""
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
        source: as for `convert_checkpoint`, like the others.
        target: where it would be written, to have that checked, too.
        to: the format or granularity.
        scales: how scales would be stored.
        e4m3: which E4M3 codes would have.
        block_shape: the rows and columns of blocks.
        split_experts: whether stacked experts would be written one by one.
        unscaled: whether FP8 tensors without a scale would be taken for values.
        force: whether an existing target would be replaced.

    Raises:
        CheckpointError: as `convert_checkpoint` does before it writes; what needs ``lossy`` is in the plan.

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
    planned = Planned(_opened(source, split_experts, unscaled), to, scales, e4m3, block_shape)
    if target is not None:
        check(planned.work(), Path(target), force=force)
    return _conversion(planned, None if target is None else Path(target))


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

    Codes stay as they are, and every weight stands for the same numbers, where that is possible: names and shapes of
    scales may change, float32 takes bfloat16 and e8m0 scales, one scale per tensor or fused shard can be written once a
    channel or block, and e4m3fn and e4m3fnuz have the same codes under scales that differ by two. What cannot be kept
    is quantized anew from float32(code) * scale, and is refused unless ``lossy``. All other tensors are copied byte
    by byte. Some rows of a tensor are in memory at a time, and the new files appear whole or not at all.

    Args:
        source: as for `open_checkpoint`.
        target: the new file, or for a folder the new folder.
        to: "bf16" (float32(code) * scale, rounded once); the granularity "channel", "block" (128x128, or the source's),
            "tensor" or "mxfp8" (1x32), as compressed-tensors; or a format: "compressed-tensors" and "modelopt" with the
            granularity that the layers have, "modelopt-mxfp8", "deepseek" with blocks, "comfyui" with one scale per
            tensor.
        scales: "float32", powers of two in float32 ("ue8m0"), or these as bytes ("ue8m0_bytes", of "deepseek"; of
            MXFP8 always).
        e4m3: "fn" (OCP) or "fnuz" (MI300); by default fn, but compressed-tensors keeps what layers have.
        block_shape: the rows and columns of a block, of "block" and "deepseek"; by default the source's where all
            layers have the same, else 128x128. Codes stay where blocks become parts of what they were.
        split_experts: as for `quantize_checkpoint`; formats other than bf16 and deepseek have no other way for them.
        unscaled: as for `open_checkpoint`. Of such tensors those that are not matrices become bfloat16.
        lossy: allow codes to be made anew; `Conversion.errors` tells what that added.
        force: as for `quantize_checkpoint`.
        progress: as for `quantize_checkpoint`.

    Raises:
        CheckpointError: the source cannot be read, is not FP8, or has faults that `verify_checkpoint` names; codes
            would have to be made anew without ``lossy``; the format cannot say what was asked for; the target exists,
            or cannot be written. Nothing is left behind.

    Warns:
        RuntimeWarning: beside the target was what a run left that was killed; it is removed.

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
    planned = Planned(_opened(source, split_experts, unscaled), to, scales, e4m3, block_shape)
    refused = _conversion(planned, None).lossy
    if refused and not lossy:
        first, more = refused[0], len(refused) - 1
        others = f" ({more} more weights likewise: see --dry-run or plan_conversion)" if more else ""
        raise CheckpointError(
            f"converting {first.layer.weight.name} needs lossy (--lossy), for its codes have to be made anew: "
            f"{first.why}{others}"
        )
    found = run(planned.work(), Path(target), force=force, progress=progress)
    return _conversion(planned, found.given)


def _opened(source: str | os.PathLike[str], split_experts: bool, unscaled: bool) -> Checkpoint:
    found = scan(Path(source))
    return checkpoint_of(experts.split_experts(found) if split_experts else found, unscaled=unscaled)


def _conversion(planned: Planned, target: Path | None) -> Conversion:
    """Return what is, or was, done."""
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
