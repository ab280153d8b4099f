"""Safetensors in, FP8 safetensors out: which weights become FP8, and how they are written."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fp8core.checkpoint import experts
from fp8core.checkpoint.running import Progress, Work, check, run
from fp8core.checkpoint.schemes import MXFP8, Scheme, quantization_config, scheme_to_write, static_scale
from fp8core.checkpoint.selection import module_of, selection
from fp8core.checkpoint.source import CONFIG, INDEX, RECORD, Extra, Source, open_source
from fp8core.checkpoint.verdicts import Verdict, verdicts_of
from fp8core.checkpoint.writing import Shard, index_of, json_bytes, version
from fp8core.errors import CheckpointError
from fp8core.types import SchemeName


class Plan(NamedTuple):
    """What would be done with a checkpoint. Nothing has been written.

    Examples:
        `plan_checkpoint` gives one.

        >>> from fp8core.checkpoint import Plan
        >>> Plan._fields[:3]
        ('source', 'verdicts', 'extras')
    """

    source: Path
    verdicts: tuple[Verdict, ...]
    """On every tensor, in the order of the files."""
    extras: tuple[Extra, ...]
    """What else a folder holds: copied, or left out."""
    bytes_before: int
    """Of the files with the weights."""
    bytes_after: int
    quantization_config: dict[str, Any]

    @property
    def refused(self) -> tuple[Verdict, ...]:
        """The tensors because of which the checkpoint would be refused."""
        return tuple(verdict for verdict in self.verdicts if verdict.status == "refused")


class Summary(NamedTuple):
    """What was done: names of tensors, sizes of the weight files in bytes, and what belongs in config.json.

    Examples:
        `quantize_checkpoint` gives one.

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
    """What became of every tensor and every other file, and why."""


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
        source: as for `quantize_checkpoint`, like the others.
        target: where it would be written, to have that checked, too.
        scheme: how weights and activations would be scaled.
        include: patterns of modules to quantize.
        exclude: patterns of modules to leave as they are.
        input_scales: of scheme "static": the scale of each module's activations.
        split_experts: whether stacked experts would be written one by one.
        force: whether an existing target would be replaced.

    Raises:
        CheckpointError: as `quantize_checkpoint` does before it writes; tensors that it would refuse are in the plan.

    Warns:
        RuntimeWarning: beside the target is what a run left that was killed.

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
    opened = open_source(Path(source))
    opened = experts.split_experts(opened) if split_experts else opened
    plan, shards = _planned(opened, _scheme(scheme), include, exclude, input_scales)
    if target is not None:
        check(_work(opened, shards, plan, scheme), Path(target), force=force)
    return plan


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
    """Write an FP8 copy of a checkpoint, as vLLM and compressed-tensors read it.

    Every chosen ``weight`` [n, k] (fp64, fp32, fp16 or bf16) becomes F8_E4M3 of the same name and shape, and an fp32
    ``weight_scale`` joins it: [n, 1] per channel, [1] per tensor, or [ceil(n / 128), ceil(k / 128)] per block of
    128x128; of MXFP8 it is an exponent in a byte, [n, k / 32]. ``weight * weight_scale`` is nearest to the original (of
    fp64, to its fp32 value). All other tensors are copied byte by byte. Some rows of a tensor are in memory at a time.
    The new files appear whole or not at all, also when the run is interrupted.

    Chosen are the weights of linear layers, which config.json's model_type and the names of the modules tell
    (`fp8core.checkpoint.kinds`): not embeddings, heads, poolers, routers, GPT-2's Conv1D, vision and audio towers,
    nor what is outside of the numbered layers. Layers that vLLM joins, such as q_proj, k_proj and v_proj, are quantized
    all or not at all. `plan_checkpoint` tells what becomes of every tensor.

    Args:
        source: a safetensors file, or a folder that holds model.safetensors or shards with their index (or that index).
            Other files of a folder and its subfolders are copied; other forms of the weights are left out.
        target: the new file, or for a folder the new folder. Beside a file ``NAME.safetensors`` goes
            ``NAME.config.json``; a folder's own config.json is extended, and fp8core.json says what was done.
        scheme: how weights and activations are scaled: "channel" with tokens, "tensor" with tensors, "block" of
            128x128 with groups of 1x128, which keeps weights whose k is not a multiple of 128, "static" as "tensor"
            with the activations' scales in the file, "mxfp8" by groups of 1x32 with groups of 1x32, whose k is
            a multiple of 32; `fp8core.scaled_mm` takes no such groups.
        include: patterns over the modules' names (the tensors' without ".weight"): globs, or regular expressions
            after "re:". With it, exactly the linear layers, heads and towers that it matches are quantized.
        exclude: patterns of modules to leave as they are.
        input_scales: of scheme "static": the scale of each quantized module's activations, ``amax / 448``, by its name;
            `fp8core.torch.calibrate` gives them.
        split_experts: write experts that are stacked in one tensor [E, n, k] as tensors of their own, which can be
            quantized: ``experts.gate_up_proj`` as ``experts.0.gate_proj.weight``, ``experts.0.up_proj.weight``, ….
        force: replace an existing file, or a folder that this function wrote and that holds nothing else.
        progress: called as tensors are read, with a name, the bytes of the source done so far, and all of them.

    Raises:
        CheckpointError: the source cannot be read, is damaged, is quantized already, holds nothing to quantize or a
            weight that is not finite; input_scales lack a module, name another one, or are not positive numbers; a
            pattern matches nothing, names what readers cannot take as FP8, or parts layers that vLLM joins; the target
            exists, or cannot be written. Nothing is left behind.

    Warns:
        RuntimeWarning: beside the target was what a run left that was killed; it is removed.

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
    opened = open_source(Path(source))
    opened = experts.split_experts(opened) if split_experts else opened
    plan, shards = _planned(opened, _scheme(scheme), include, exclude, input_scales)
    _refuse(plan)
    found = run(_work(opened, shards, plan, scheme), Path(target), force=force, progress=progress)
    return Summary(
        target=found.given,
        config_file=found.given / CONFIG if opened.is_folder else found.given.with_suffix(".config.json"),
        quantized=tuple(sorted(verdict.tensor for verdict in plan.verdicts if verdict.status == "quantized")),
        kept=tuple(sorted(verdict.tensor for verdict in plan.verdicts if verdict.status == "kept")),
        bytes_before=plan.bytes_before,
        bytes_after=plan.bytes_after,
        quantization_config=plan.quantization_config,
        plan=plan,
    )


def _scheme(name: str) -> Scheme:
    return scheme_to_write(name, {"mxfp8": MXFP8})


def _planned(
    opened: Source,
    scheme: Scheme,
    include: Sequence[str] | None,
    exclude: Sequence[str],
    input_scales: Mapping[str, float] | None,
) -> tuple[Plan, list[Shard]]:
    entries = opened.entries
    picked = selection(include, exclude, map(module_of, entries))
    scales = _checked(input_scales, scheme)
    verdicts = verdicts_of(entries, opened.config, picked, scheme, scales)
    _refuse_others(scales, verdicts)
    chosen = {verdict.tensor for verdict in verdicts if verdict.status == "quantized"}
    shards = [Shard(h, frozenset(chosen & set(h.entries)), scheme, scales) for h in opened.headers]
    plan = Plan(
        source=opened.path,
        verdicts=verdicts,
        extras=opened.extras,
        bytes_before=opened.nbytes,
        bytes_after=sum(shard.size() for shard in shards),
        quantization_config=quantization_config(
            scheme,
            [(verdict.tensor, verdict.shape) for verdict in verdicts if verdict.status != "quantized"],
            [verdict.module for verdict in verdicts if verdict.status == "quantized"],
        ),
    )
    return plan, shards


def _checked(input_scales: Mapping[str, float] | None, scheme: Scheme) -> dict[str, float]:
    """Return the scales of activations as Python numbers, after refusing those that are none."""
    if not isinstance(input_scales, Mapping | None):
        raise CheckpointError(f"input_scales needs a mapping of layers to numbers, got {input_scales!r}")
    if (input_scales is not None) != scheme.static:
        got = "none" if input_scales is None else f"{len(input_scales):,} scales for another scheme"
        raise CheckpointError(f"input_scales needs to be given with scheme static and with no other, got {got}")
    scales: dict[str, float] = {}
    for module, given in (input_scales or {}).items():
        scale = static_scale(given)
        if scale is None:
            raise CheckpointError(f"input_scales needs numbers above 0 that float32 has, got {given!r} for {module}")
        scales[module] = scale
    return scales


def _refuse_others(scales: Mapping[str, float], verdicts: Sequence[Verdict]) -> None:
    """Refuse scales for modules that are not quantized."""
    status = {verdict.module: verdict for verdict in verdicts}
    for module in scales:
        verdict = status.get(module)
        if verdict is None or verdict.status != "quantized":
            reason = "there is no such module" if verdict is None else f"it stays as it is: {verdict.reason}"
            raise CheckpointError(f"input_scales needs modules that are quantized, got {module!r}: {reason}")


def _refuse(plan: Plan) -> None:
    """Refuse a plan that would give a checkpoint that readers cannot read, or that would do nothing."""
    if plan.refused:
        first, more = plan.refused[0], len(plan.refused) - 1
        others = f" ({more} more: see --dry-run or plan_checkpoint)" if more else ""
        raise CheckpointError(f"cannot quantize {first.tensor}: {first.reason}{others}")
    if not any(verdict.status == "quantized" for verdict in plan.verdicts):
        reasons = dict.fromkeys(v.reason for v in plan.verdicts if len(v.shape) > 1)
        why = "; ".join(list(reasons)[:4]) or "it has no matrices"
        raise CheckpointError(f"{plan.source} has no weight to quantize: {why}")


def _work(opened: Source, shards: list[Shard], plan: Plan, scheme: str) -> Work:
    documents = _documents(opened, shards, plan, scheme) if opened.is_folder else {}
    return Work(opened, shards, plan.extras, documents, {"quantization_config": plan.quantization_config})


def _documents(opened: Source, shards: list[Shard], plan: Plan, scheme: str) -> dict[str, dict[str, Any]]:
    """Return the JSON files of a new folder: config.json, the index where there was one, and the record."""
    documents = {CONFIG: {**opened.config, "quantization_config": plan.quantization_config}}
    if opened.weight_map:
        documents[INDEX] = index_of(shards, opened.weight_map)
    files = {shard.header.path.name: shard.size() for shard in shards}
    files |= {name: len(json_bytes(value)) for name, value in documents.items()}
    files |= {extra.name: extra.nbytes for extra in plan.extras if extra.copied}
    documents[RECORD] = {
        "fp8core": version(),
        "scheme": scheme,
        "files": files,
        "left_out": {extra.name: extra.reason for extra in plan.extras if not extra.copied},
        "quantized": [verdict.tensor for verdict in plan.verdicts if verdict.status == "quantized"],
        "kept": {verdict.tensor: verdict.reason for verdict in plan.verdicts if verdict.status == "kept"},
    }
    return documents
