"""FP8 checkpoints in, bfloat16 or FP8 of another format or granularity out."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from fp8core.checkpoint import experts
from fp8core.checkpoint.changes import Change, Error, Goal, change_of
from fp8core.checkpoint.claims import MODELOPT_FILE
from fp8core.checkpoint.files import Header
from fp8core.checkpoint.naming import MARKER, METADATA
from fp8core.checkpoint.outputs import (
    FORMATS_OF,
    TARGETS,
    Named,
    OutputName,
    Target,
    configuration,
    granularity_for,
    input_scale_named,
    kv_scale_named,
    marker,
    modelopt_file,
    scale_named,
)
from fp8core.checkpoint.parts import Changed, ConvertedFile, Copied, Part, Small, Widened, as_bytes
from fp8core.checkpoint.reader import Checkpoint, Layer, Tensor, as_float32, checkpoint_of, open_checkpoint
from fp8core.checkpoint.running import Progress, Work, check, run
from fp8core.checkpoint.source import CONFIG, INDEX, RECORD, Extra, scan
from fp8core.checkpoint.writing import MARK, index_of, json_bytes, version
from fp8core.errors import CheckpointError
from fp8core.problem import Fp8Name, ScaleFormat

E4M3: Final[dict[str, Fp8Name]] = {"fn": "float8_e4m3fn", "fnuz": "float8_e4m3fnuz"}
SCALE_FORMATS: Final = ("float32", "ue8m0", "ue8m0_bytes")


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
    to: Target,
    scales: ScaleFormat = "float32",
    e4m3: str | None = None,
    split_experts: bool = False,
    force: bool = False,
) -> Conversion:
    """Return what `convert_checkpoint` would do with every layer, and why. Nothing is written.

    Args:
        source: as for `convert_checkpoint`, like the others.
        target: where it would be written, to have that checked, too.
        to: the format or granularity.
        scales: how scales would be stored.
        e4m3: which E4M3 codes would have.
        split_experts: whether stacked experts would be written one by one.
        force: whether an existing target would be replaced.

    Raises:
        CheckpointError: as `convert_checkpoint` does before it writes; what needs ``lossy`` is in the plan.

    Examples:
        See `convert_checkpoint`.
    """
    planned = _Planned(_opened(source, split_experts), to, scales, e4m3)
    if target is not None:
        check(planned.work(), Path(target), force=force)
    return planned.conversion(None if target is None else Path(target))


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Target,
    scales: ScaleFormat = "float32",
    e4m3: str | None = None,
    split_experts: bool = False,
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
        to: "bf16" (float32(code) * scale, rounded once); the granularity "channel", "block" (128x128, or the source's)
            or "tensor", as compressed-tensors; or a format: "compressed-tensors" and "modelopt" with the granularity
            that the layers have, "deepseek" with blocks, "comfyui" with one scale per tensor.
        scales: "float32", powers of two in float32 ("ue8m0"), or these as bytes ("ue8m0_bytes", "deepseek" alone).
        e4m3: "fn" (OCP) or "fnuz" (MI300); by default each layer keeps the one it has.
        split_experts: as for `quantize_checkpoint`; formats other than bf16 and deepseek have no other way for them.
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
    planned = _Planned(_opened(source, split_experts), to, scales, e4m3)
    refused = planned.conversion(None).lossy
    if refused and not lossy:
        first, more = refused[0], len(refused) - 1
        others = f" ({more} more weights likewise: see --dry-run or plan_conversion)" if more else ""
        raise CheckpointError(
            f"converting {first.layer.weight.name} needs lossy (--lossy), for its codes have to be made anew: "
            f"{first.why}{others}"
        )
    found = run(planned.work(), Path(target), force=force, progress=progress)
    return planned.conversion(found.given)


def _opened(source: str | os.PathLike[str], split_experts: bool) -> Checkpoint:
    return checkpoint_of(experts.split_experts(scan(Path(source)))) if split_experts else open_checkpoint(source)


class _Planned:
    """A conversion that has been thought through."""

    def __init__(self, checkpoint: Checkpoint, to: str, scales: str, e4m3: str | None) -> None:
        self.checkpoint, self.to = checkpoint, to
        _check_options(checkpoint, to, scales, e4m3)
        layers = list(checkpoint.layers.values())
        for layer in layers:
            if layer.fault():
                raise CheckpointError(layer.fault())
        self.output: OutputName | None = FORMATS_OF.get(to)
        self.static = self.output is not None and all(layer.input_scale is not None for layer in layers)
        self.goal: Goal | None = None
        self.changes: dict[str, Change] = {}
        self.errors: dict[str, Error] = {}
        self.left_out: dict[str, str] = {}
        if self.output is not None:
            granularity, group_shape = granularity_for(to, layers, self.static)
            self.static = self.static and granularity != "block"
            scale_format: ScaleFormat = next(one for one in SCALE_FORMATS if one == scales)
            for layer in layers:
                goal = Goal(granularity, group_shape, scale_format, self._dtype(layer, e4m3))
                self.goal = self.goal or goal
                self.changes[layer.name] = change_of(layer, goal)
        self.kv_scales = checkpoint.kv_scales()
        self.of_layers = {one.name: layer for layer in layers for one in layer.tensors()}
        places: dict[Path, list[Tensor]] = {header.path: [] for header in checkpoint.source.headers}
        for tensor in checkpoint.all_tensors.values():
            places[tensor.path].append(tensor)
        self.files = [self._file(header, places[header.path]) for header in checkpoint.source.headers]
        self.config = self._configuration()

    def _dtype(self, layer: Layer, e4m3: str | None) -> Fp8Name:
        if e4m3 is not None:
            return E4M3[e4m3]
        kept = ("float8_e4m3fn", "float8_e4m3fnuz", *(("float8_e5m2",) if self.output == "comfyui" else ()))
        return next((one for one in kept if one == layer.dtype), "float8_e4m3fn")

    def _file(self, header: Header, tensors: Sequence[Tensor]) -> ConvertedFile:
        """Return the new file in the place of one."""
        parts: list[Part] = []
        for tensor in tensors:
            layer = self.of_layers.get(tensor.name)
            if layer is None:
                parts += self._other(tensor)
            elif tensor == layer.weight:
                parts += self._layer(layer)
        metadata = {key: value for key, value in header.metadata.items() if key != METADATA}
        layers = [part.change for part in parts if isinstance(part, Changed)]
        if self.output == "comfyui" and layers:
            said = {change.layer.name: {"format": change.goal.dtype} for change in layers}
            metadata[METADATA] = json.dumps({"format_version": "1.0", "layers": said})
        nbytes = sum(one.nbytes for one in tensors)
        return ConvertedFile(header.path.name, parts, {"format": "pt", **metadata, MARK: version()}, nbytes)

    def _other(self, tensor: Tensor) -> Iterator[Part]:
        """Give what becomes of a tensor that belongs to no FP8 weight."""
        if tensor.name.rpartition(".")[2] == MARKER:
            self.left_out[tensor.name] = "ComfyUI's mark of its older files"
        elif tensor.name not in self.kv_scales:
            yield Copied(tensor, Named(tensor.name, tensor.shape))
        elif self.output is None:
            self.left_out[tensor.name] = "a scale of cached keys and values"
        else:
            yield Copied(tensor, kv_scale_named(self.output, self.kv_scales[tensor.name], tensor.shape))

    def _layer(self, layer: Layer) -> Iterator[Part]:
        """Give what becomes of an FP8 weight and what belongs to it."""
        if self.output is None:
            yield Widened(layer)
        else:
            change = self.changes[layer.name]
            yield Changed(change, scale_named(self.output, layer, change.goal, change.scale_shape), self.errors)
            if self.output == "comfyui":
                content = marker(change.goal)
                yield Small(f"{layer.name}.comfy_quant", "U8", (len(content),), content)
        for tensor in (layer.input_scale, layer.input_scale_ub):
            if tensor is None:
                continue
            if self.output is not None and self.static and tensor is layer.input_scale:
                yield self._input_scale(layer, tensor)
            else:
                self.left_out[tensor.name] = "activations are quantized with scales found at run time"
                if self.output is None:
                    self.left_out[tensor.name] = "a scale of activations"

    def _input_scale(self, layer: Layer, tensor: Tensor) -> Small:
        """Return the static scale of activations under its new name, as one float32."""
        assert self.output is not None
        if math.prod(tensor.shape) != 1:
            raise CheckpointError(f"{tensor.name} needs to be one number, got shape {list(tensor.shape)}")
        factor = np.float32(1.0)
        old, new = layer.dtype, self.changes[layer.name].goal.dtype
        if old != new and "fnuz" in old + new:
            factor = np.float32(2.0 if new.endswith("fnuz") else 0.5)
        named = input_scale_named(self.output, layer)
        return Small(named.name, "F32", named.shape, as_bytes(as_float32(tensor.read()) * factor))

    def _configuration(self) -> dict[str, Any] | None:
        if self.output is None or self.goal is None:
            return None
        kept = [(one.name, one.shape) for one in self.checkpoint.tensors()]
        return configuration(
            self.output, self.goal, kept, self.changes, static=self.static, kv_cache=bool(self.kv_scales)
        )

    def work(self) -> Work:
        """Return what is to be written."""
        source = self.checkpoint.source
        if not source.is_folder:
            beside = None if self.config is None else {"quantization_config": self.config}
            return Work(source, self.files, (), {}, beside)
        extras = tuple(self._extra(extra) for extra in source.extras)
        return Work(source, self.files, extras, self._documents(extras), None)

    def _extra(self, extra: Extra) -> Extra:
        if extra.name == MODELOPT_FILE:
            return extra._replace(copied=False, reason="says how the source was quantized")
        return extra

    def _documents(self, extras: Sequence[Extra]) -> dict[str, dict[str, Any]]:
        """Return the JSON files of a new folder."""
        documents: dict[str, dict[str, Any]] = {}
        config = _without_quantization(self.checkpoint.config)
        if self.config is not None:
            config["quantization_config"] = self.config
            if self.output == "modelopt":
                documents[MODELOPT_FILE] = modelopt_file(self.config)
        if config:
            documents[CONFIG] = config
        if self.checkpoint.source.weight_map:
            documents[INDEX] = index_of(self.files, {})
        files = {one.name: one.size() for one in self.files}
        files |= {name: len(json_bytes(value)) for name, value in documents.items()}
        files |= {extra.name: extra.nbytes for extra in extras if extra.copied}
        documents[RECORD] = {
            "fp8core": version(),
            "converted_to": self.to,
            "files": files,
            "left_out": {extra.name: extra.reason for extra in extras if not extra.copied} | self.left_out,
            "made_anew": {name: change.why for name, change in self.changes.items() if not change.exact},
        }
        return documents

    def conversion(self, target: Path | None) -> Conversion:
        """Return what is, or was, done."""
        return Conversion(
            source=self.checkpoint,
            target=target,
            to=self.to,
            changes=tuple(self.changes.values()),
            left_out=self.left_out,
            bytes_before=self.checkpoint.source.nbytes,
            bytes_after=sum(one.size() for one in self.files),
            quantization_config=self.config,
            errors={name: error.relative for name, error in self.errors.items()},
        )


def _check_options(checkpoint: Checkpoint, to: str, scales: str, e4m3: str | None) -> None:
    if to not in TARGETS:
        raise CheckpointError(f"to needs one of {', '.join(TARGETS)}, got {to!r}")
    if scales not in SCALE_FORMATS:
        raise CheckpointError(f"scales needs one of {', '.join(SCALE_FORMATS)}, got {scales!r}")
    if e4m3 is not None and e4m3 not in E4M3:
        raise CheckpointError(f"e4m3 needs one of {', '.join(E4M3)}, got {e4m3!r}")
    if to == "bf16" and (scales != "float32" or e4m3 is not None):
        raise CheckpointError("to needs an FP8 format where scales or e4m3 are given, got 'bf16'")
    if scales == "ue8m0_bytes" and to != "deepseek":
        raise CheckpointError(f"scales needs float32 or ue8m0 for {to}, got {scales!r}, which deepseek alone has")
    if e4m3 == "fnuz" and to in ("comfyui", "deepseek", "modelopt"):
        raise CheckpointError(f"e4m3 needs fn for {to}, got {e4m3!r}")
    if not checkpoint.layers:
        raise CheckpointError(f"{checkpoint.path} needs FP8 weights to be converted, got none: quantize makes them")


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json that names no quantization."""
    gone = "quantization_config", "compression_config"
    found = {name: value for name, value in config.items() if name not in gone}
    text = found.get("text_config")
    if isinstance(text, dict):
        found["text_config"] = {name: value for name, value in text.items() if name not in gone}
    return found
