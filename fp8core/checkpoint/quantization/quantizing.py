"""Quantizes safetensors checkpoints to FP8."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fp8core.checkpoint.disk.extras import CONFIG
from fp8core.checkpoint.disk.running import Progress, check, run
from fp8core.checkpoint.disk.source import path_of
from fp8core.checkpoint.quantization.planning import Plan, planned_quantization
from fp8core.errors import CheckpointError
from fp8core.types import SchemeName


class Summary(NamedTuple):
    """The result of a quantization: names of tensors, sizes of the weight files in bytes, and quantization_config.

    Examples:
        `quantize_checkpoint` returns one.

        >>> from fp8core.checkpoint import Summary
        >>> Summary._fields[:4]
        ('target', 'config_file', 'quantized', 'kept')
    """

    target: Path
    config_file: Path
    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    quantization_config: dict[str, Any]
    plan: Plan
    """The plan: what became of every tensor and every other file, and why."""


def plan_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    scheme: SchemeName = "channel",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    input_scales: Mapping[str, float] | None = None,
    split_experts: bool = False,
    force: bool = False,
) -> Plan:
    """Return what `quantize_checkpoint` would do with every tensor, and why. Nothing is written.

    Args:
        source: as for `quantize_checkpoint`.
        target: as for `quantize_checkpoint`; if given, it is checked, too.
        scheme: as for `quantize_checkpoint`.
        include: as for `quantize_checkpoint`.
        exclude: as for `quantize_checkpoint`.
        input_scales: as for `quantize_checkpoint`.
        split_experts: as for `quantize_checkpoint`.
        force: as for `quantize_checkpoint`.

    Raises:
        CheckpointError: the errors that `quantize_checkpoint` raises before it writes, except that tensors that are
            refused, or none that are quantized, are part of the plan (`Plan.refusal`).

    Warns:
        RuntimeWarning: files of a killed run are beside the target.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint import plan_checkpoint
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"up.weight": np.ones((64, 32), np.float32)}, f"{folder}/model.safetensors")
        ...     plan = plan_checkpoint(f"{folder}/model.safetensors")
        >>> [(verdict.tensor, verdict.status) for verdict in plan.verdicts]
        [('up.weight', 'quantized')]
    """
    planned = planned_quantization(source, scheme, include, exclude, input_scales, split_experts)
    if target is not None:
        check(planned.work(), path_of(target, "target"), force=force)
    return planned.plan


def quantize_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    scheme: SchemeName = "channel",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    input_scales: Mapping[str, float] | None = None,
    split_experts: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write an FP8 copy of a checkpoint that vLLM and compressed-tensors can read.

    Every chosen ``weight`` [n, k] (fp64, fp32, fp16 or bf16) becomes F8_E4M3 with the same name and shape, with an fp32
    ``weight_scale`` beside it: [n, 1] per channel, [1] per tensor, or [ceil(n / 128), ceil(k / 128)] per block of
    128x128; in MXFP8 the scale is an exponent in a byte, [n, k / 32]. ``weight * weight_scale`` is nearest to the
    original (for fp64, to its fp32 value). All other tensors are copied byte by byte. Only some rows of a tensor are in
    memory at a time. The new files appear complete or not at all, even if the run is interrupted.

    The weights of linear layers are chosen, by config.json's model_type and the names of the modules: no embeddings,
    heads, poolers, routers, Conv1D layers of GPT-2, vision or audio towers (`fp8core.checkpoint.formats.kinds`), and
    no modules outside of the numbered layers. Layers that vLLM joins, such as q_proj, k_proj and v_proj, are
    quantized together or not at all. `plan_checkpoint` returns what becomes of every tensor.

    Args:
        source: a safetensors file, or a folder that holds model.safetensors or shards with their index (or that index).
            Other files of the folder and its subfolders are copied, except other forms of the weights.
        target: the new file or, for a folder, the new folder. A file ``NAME.safetensors`` gets a ``NAME.config.json``
            beside it; in a folder, config.json is extended, and fp8core.json records what was done.
        scheme: the scaling of weights and activations: "channel" (per channel, and per token), "tensor" (both per
            tensor), "block" (128x128 blocks, and 1x128 groups; weights whose k is not a multiple of 128 are kept),
            "static" ("tensor", with the activations' scales in the file) or "mxfp8" (both in 1x32 groups, for k of a
            multiple of 32; `fp8core.scaled_mm` does not support them).
        include: patterns over the modules' names (tensor names without ".weight"): globs, or regular expressions
            after "re:". If given, exactly the matching linear layers, heads and towers are quantized.
        exclude: patterns of modules to keep, in the same syntax.
        input_scales: for the scheme "static": the scale of the activations of each quantized module, ``amax / 448``, by
            module name, as `fp8core.torch.calibrate` returns them.
        split_experts: write experts that are stacked in one tensor [E, n, k] as one tensor each, which can be
            quantized: ``experts.gate_up_proj`` as ``experts.0.gate_proj.weight``, ``experts.0.up_proj.weight``, ….
        force: replace an existing file, or a folder that this function wrote and that holds nothing else.
        progress: a function that is called as tensors are read, with the tensor's name, the bytes of the source that
            are done, and the bytes of all tensors.

    Returns:
        The names of the quantized and kept tensors, and the plan with the reasons.

    Raises:
        CheckpointError: the source cannot be read, is damaged, is quantized already, or holds nothing to quantize or a
            weight that is not finite; input_scales lacks a module, names another one, or holds a scale that is not a
            positive number; a pattern matches nothing, names a module that readers do not support in FP8, or separates
            layers that vLLM joins; the target exists, or cannot be written. No files are left behind.

    Warns:
        RuntimeWarning: files of a killed run were found beside the target, and removed.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint import quantize_checkpoint
        >>> tensors = {"up.weight": np.ones((64, 32), np.float32), "up.bias": np.ones(64, np.float32)}
        >>> with TemporaryDirectory() as folder:
        ...     save_file(tensors, f"{folder}/model.safetensors")
        ...     summary = quantize_checkpoint(f"{folder}/model.safetensors", f"{folder}/fp8.safetensors")
        >>> summary.quantized, summary.kept, summary.config_file.name
        (('up.weight',), ('up.bias',), 'fp8.config.json')
    """
    planned = planned_quantization(source, scheme, include, exclude, input_scales, split_experts)
    plan = planned.plan
    refuse(plan)
    found = run(planned.work(), path_of(target, "target"), force=force, progress=progress)
    return Summary(
        target=found.given,
        config_file=found.given / CONFIG if planned.source.is_folder else found.given.with_suffix(".config.json"),
        quantized=tuple(sorted(verdict.tensor for verdict in plan.verdicts if verdict.status == "quantized")),
        kept=tuple(sorted(verdict.tensor for verdict in plan.verdicts if verdict.status == "kept")),
        bytes_before=plan.bytes_before,
        bytes_after=plan.bytes_after,
        quantization_config=plan.quantization_config,
        plan=plan,
    )


def refuse(plan: Plan) -> None:
    """Refuse a plan whose result readers could not load, or that quantizes nothing."""
    if plan.refusal:
        raise CheckpointError(plan.refusal)
