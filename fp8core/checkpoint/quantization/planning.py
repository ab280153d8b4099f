"""Plans a quantization: what becomes of every tensor of a checkpoint, the new files and their configuration."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fp8core.checkpoint.disk.extras import CONFIG, RECORD, Extra
from fp8core.checkpoint.disk.running import Work
from fp8core.checkpoint.disk.source import Source, open_source, path_of
from fp8core.checkpoint.disk.writing import Shard, index_of, json_bytes, version
from fp8core.checkpoint.formats.naming import module_of
from fp8core.checkpoint.formats.schemes import MXFP8, STATIC, Scheme, quantization_config, scheme_of, static_scale
from fp8core.checkpoint.formats.selection import selection
from fp8core.checkpoint.quantization.verdicts import Verdict, verdicts_of
from fp8core.checkpoint.reading import experts
from fp8core.errors import CheckpointError


class Plan(NamedTuple):
    """A planned quantization of a checkpoint.

    Examples:
        `plan_checkpoint` returns one.

        >>> from fp8core.checkpoint import Plan
        >>> Plan._fields[:3]
        ('source', 'verdicts', 'extras')
    """

    source: Path
    verdicts: tuple[Verdict, ...]
    """The verdict on every tensor, in the order of the files."""
    extras: tuple[Extra, ...]
    """The other files and folders of the checkpoint, which are copied or left out."""
    bytes_before: int
    """The size of the old weight files."""
    bytes_after: int
    """The size of the new weight files."""
    quantization_config: dict[str, Any]

    @property
    def refused(self) -> tuple[Verdict, ...]:
        """The verdicts for which `quantize_checkpoint` would refuse the checkpoint."""
        return tuple(verdict for verdict in self.verdicts if verdict.status == "refused")

    @property
    def refusal(self) -> str:
        """Why `quantize_checkpoint` would refuse it: a tensor is refused, or no weight would be FP8; else empty."""
        refused = self.refused
        if refused:
            first, more = refused[0], len(refused) - 1
            others = f" ({more} more: see --dry-run or plan_checkpoint)" if more else ""
            return f"cannot quantize {first.tensor}: {first.reason}{others}"
        if any(verdict.status == "quantized" for verdict in self.verdicts):
            return ""
        reasons = dict.fromkeys(v.reason for v in self.verdicts if len(v.shape) > 1)
        why = "; ".join(list(reasons)[:4]) or "it has no matrices"
        return f"{self.source} has no weight to quantize: {why}"


class PlannedQuantization(NamedTuple):
    """A planned quantization, and what writes it."""

    source: Source
    scheme: str
    """Its name."""
    plan: Plan
    shards: list[Shard]

    def work(self) -> Work:
        """Return the files to write."""
        config = {"quantization_config": self.plan.quantization_config}
        documents = self._documents(config) if self.source.is_folder else {}
        return Work(self.source, self.shards, self.plan.extras, documents, config)

    def _documents(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the JSON files of a new folder: config.json, the record, and the index if the source has one."""
        source, plan = self.source, self.plan
        documents = {CONFIG: {**source.config, **config}}
        if source.weight_map:
            documents[source.index_name] = index_of(self.shards, source.weight_map)
        files = {shard.name: shard.size() for shard in self.shards}
        files |= {name: len(json_bytes(value)) for name, value in documents.items()}
        files |= {extra.name: extra.nbytes for extra in plan.extras if extra.copied}
        documents[RECORD] = {
            "fp8core": version(),
            "scheme": self.scheme,
            "files": files,
            "left_out": {extra.name: extra.reason for extra in plan.extras if not extra.copied},
            "quantized": [verdict.tensor for verdict in plan.verdicts if verdict.status == "quantized"],
            "kept": {verdict.tensor: verdict.reason for verdict in plan.verdicts if verdict.status == "kept"},
        }
        return documents


def planned_quantization(
    path: str | os.PathLike[str],
    scheme_name: str,
    include: Sequence[str] | None,
    exclude: Sequence[str],
    input_scales: Mapping[str, float] | None,
    split_experts: bool,
) -> PlannedQuantization:
    """Return the planned quantization of a checkpoint; the arguments are those of `quantize_checkpoint`."""
    source = open_source(path_of(path, "source"))
    if split_experts:
        source = experts.split_experts(source)
    scheme, entries = scheme_of(scheme_name, {**STATIC, "mxfp8": MXFP8}), source.entries
    picked = selection(include, exclude, (module_of(entry.name) for entry in entries))
    scales = _checked(input_scales, scheme)
    verdicts = verdicts_of(entries, source.config, picked, scheme, scales)
    _refuse_others(scales, verdicts)
    chosen = {verdict.tensor for verdict in verdicts if verdict.status == "quantized"}
    shards = [Shard(h, frozenset(chosen & set(h.entries)), scheme, scales) for h in source.headers]
    plan = Plan(
        source=source.path,
        verdicts=verdicts,
        extras=source.extras,
        bytes_before=source.nbytes,
        bytes_after=sum(shard.size() for shard in shards),
        quantization_config=quantization_config(
            scheme,
            [(verdict.tensor, verdict.shape) for verdict in verdicts if verdict.status != "quantized"],
            [verdict.module for verdict in verdicts if verdict.status == "quantized"],
            source.config,
        ),
    )
    return PlannedQuantization(source, scheme_name, plan, shards)


def _checked(input_scales: Mapping[str, float] | None, scheme: Scheme) -> dict[str, float]:
    """Return the scales of activations as Python numbers, after refusing invalid ones."""
    if not isinstance(input_scales, Mapping | None):
        raise CheckpointError(f"input_scales needs a mapping of layers to numbers, got {input_scales!r}")
    if scheme.static and input_scales is None:
        raise CheckpointError("scheme static needs input_scales (--input-scales) with a number per layer, got none")
    if input_scales is not None and not scheme.static:
        got = f"{len(input_scales):,} scales for another scheme"
        raise CheckpointError(f"input_scales (--input-scales) needs scheme static, got {got}")
    scales: dict[str, float] = {}
    for module, given in (input_scales or {}).items():
        scale = static_scale(given)
        if scale is None:
            raise CheckpointError(f"input_scales needs numbers above 0 that float32 holds, got {given!r} for {module}")
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
