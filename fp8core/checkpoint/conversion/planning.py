"""Plans a conversion: what becomes of every tensor of a checkpoint, the new files and their configuration."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fp8core.checkpoint.conversion.changes import (
    Change,
    Error,
    Goal,
    change_of,
    refuse_scales_that_are_not_finite,
    refuse_scales_that_are_not_positive,
    scale_factor,
)
from fp8core.checkpoint.conversion.options import E4M3, SCALE_FORMATS, check_options, checked_blocks
from fp8core.checkpoint.conversion.outputs import (
    FORMATS_OF,
    KvStrategy,
    Named,
    OutputName,
    configuration,
    granularity_for,
    input_scale_named,
    keeps_static_scales,
    kv_scale_named,
    marker,
    modelopt_file,
    scale_named,
)
from fp8core.checkpoint.conversion.parts import Changed, ConvertedFile, Copied, Part, Small, Widened, as_bytes
from fp8core.checkpoint.disk.extras import CONFIG, RECORD, Extra
from fp8core.checkpoint.disk.files import FP8, Header
from fp8core.checkpoint.disk.running import Work
from fp8core.checkpoint.disk.source import read_json
from fp8core.checkpoint.disk.writing import MARK, index_of, json_bytes, version
from fp8core.checkpoint.formats.claims import MISTRAL_FILE, MODELOPT_FILE
from fp8core.checkpoint.formats.naming import MARKER, METADATA, ZERO_POINTS
from fp8core.checkpoint.formats.schemes import MXFP8
from fp8core.checkpoint.reading.faults import left_over, other_groups
from fp8core.checkpoint.reading.layers import Layer, Tensor, as_float32
from fp8core.checkpoint.reading.reader import SCALES, Checkpoint
from fp8core.dtypes import Fp8Name
from fp8core.errors import CheckpointError


class PlannedConversion:
    """A planned conversion."""

    def __init__(
        self, checkpoint: Checkpoint, to: str, scales: str, e4m3: str | None, block_shape: tuple[int, int] | None
    ) -> None:
        self.checkpoint, self.to = checkpoint, to
        check_options(to, scales, e4m3)
        blocks = checked_blocks(block_shape, to)
        _refuse_unfit(checkpoint)
        layers = list(checkpoint.layers.values())
        self.output: OutputName | None = FORMATS_OF.get(to)
        self.static = False
        """Whether the static scales of activations are kept."""
        self.changes: dict[str, Change] = {}
        """By module; empty for a conversion to bfloat16."""
        if self.output is not None:
            given = all(layer.input_scale is not None for layer in layers)
            granularity, group_shape = granularity_for(to, layers, given, blocks)
            self.static = given and keeps_static_scales(self.output, granularity)
            scale_format = MXFP8.scale_format if granularity == "group" else SCALE_FORMATS[scales]
            for layer in filter(_is_matrix, layers):
                goal = Goal(granularity, group_shape, scale_format, self._dtype(layer, e4m3))
                self.changes[layer.name] = self._change(layer, goal)
        self.errors: dict[str, Error] = {}
        """By requantized weight; filled while it is written."""
        self.left_out: dict[str, str] = {}
        """By tensor that the new format has no place for: the reason."""
        self.kv_scales = checkpoint.kv_scales()
        self.of_layers = {one.name: layer for layer in layers for one in layer.tensors()}
        places: dict[Path, list[Tensor]] = {header.path: [] for header in checkpoint.source.headers}
        for tensor in checkpoint.all_tensors.values():
            places[tensor.path].append(tensor)
        self.files = [self._file(header, places[header.path]) for header in checkpoint.source.headers]
        self._refuse_names_given_twice()
        self.config = self._configuration()

    def _refuse_names_given_twice(self) -> None:
        names = Counter(piece.name for file in self.files for piece in file.pieces())
        for name, number in names.items():
            if number > 1:
                raise CheckpointError(f"{self.to} needs one tensor of each name, got {number} that would be {name}")

    def _change(self, layer: Layer, goal: Goal) -> Change:
        """Return the change of a layer, after refusing one whose rows the goal's groups do not divide."""
        group_cols = goal.group_shape.cols
        if goal.granularity == "group" and layer.matrix_shape[1] % group_cols:
            wanted = f"k that is a multiple of {group_cols} for {self.to}"
            raise CheckpointError(f"{layer.weight.name} needs {wanted}, got {layer.matrix_shape[1]}")
        return change_of(layer, goal)

    def _dtype(self, layer: Layer, e4m3: str | None) -> Fp8Name:
        if e4m3 is not None:
            return E4M3[e4m3]
        if self.output == "compressed-tensors" and layer.dtype == E4M3["fnuz"]:
            return E4M3["fnuz"]
        return "float8_e5m2" if self.output == "comfyui" and layer.dtype == "float8_e5m2" else E4M3["fn"]

    def _file(self, header: Header, tensors: Sequence[Tensor]) -> ConvertedFile:
        """Return the new file for an old one."""
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
            formats = {change.layer.name: {"format": change.goal.dtype} for change in layers}
            metadata[METADATA] = json.dumps({"format_version": "1.0", "layers": formats})
        nbytes = sum(one.nbytes for one in tensors)
        return ConvertedFile(header.path.name, parts, {"format": "pt", **metadata, MARK: version()}, nbytes)

    def _other(self, tensor: Tensor) -> Iterator[Part]:
        """Yield the new part for a tensor that belongs to no FP8 weight, or note why it is left out."""
        if tensor.name.rpartition(".")[2] == MARKER:
            self.left_out[tensor.name] = "ComfyUI's marker of older files"
        elif tensor.name.endswith(ZERO_POINTS):  # others were refused
            self.left_out[tensor.name] = "a zero point of zero"
        elif tensor.name in self.kv_scales:
            if self.output is None:
                self.left_out[tensor.name] = "a scale of the KV cache"
            else:
                if tensor.dtype in SCALES:
                    refuse_scales_that_are_not_positive(tensor.name, as_float32(tensor.read()))
                yield Copied(tensor, kv_scale_named(self.output, self.kv_scales[tensor.name], tensor.shape))
        elif self.output is None and tensor.dtype in FP8 and tensor.shape and tensor.nbytes:
            raise CheckpointError(
                f"{tensor.name} needs to be a matrix with a scale, or unscaled (--unscaled) if its codes are values, "
                f"to become bfloat16, got {tensor.dtype} {list(tensor.shape)}"
            )
        else:
            yield Copied(tensor, Named(tensor.name, tensor.shape))

    def _layer(self, layer: Layer) -> Iterator[Part]:
        """Yield the new parts for an FP8 weight and the tensors that belong to it, or note why these are left out."""
        if self.output is None or not _is_matrix(layer):
            refuse_scales_that_are_not_finite(layer)
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
                dynamic = "activations are quantized with scales found at run time"
                self.left_out[tensor.name] = "a scale of activations" if self.output is None else dynamic

    def _input_scale(self, layer: Layer, tensor: Tensor) -> Small:
        """Return the static scale of activations under its new name, as one float32."""
        assert self.output is not None
        fault = layer.input_fault()
        if fault:
            raise CheckpointError(f"{fault}: bf16, and scales by blocks or groups, leave scales of activations out")
        factor = scale_factor(layer.dtype, self.changes[layer.name].goal.dtype)
        named = input_scale_named(self.output, layer)
        with np.errstate(over="ignore"):
            scale = as_float32(tensor.read()) * factor
        refuse_scales_that_are_not_positive(tensor.name, scale)
        return Small(named.name, "F32", named.shape, as_bytes(scale))

    def _configuration(self) -> dict[str, Any] | None:
        goal = next((change.goal for change in self.changes.values()), None)
        if self.output is None or goal is None:
            return None
        kept = [(one.name, one.shape) for one in self.checkpoint.tensors()]
        kv_cache: KvStrategy | None = "tensor" if self.kv_scales else None
        if any(self.checkpoint.all_tensors[name].elements > 1 for name in self.kv_scales):
            kv_cache = "attn_head"
        config = self.checkpoint.config
        return configuration(self.output, goal, kept, self.changes, config, static=self.static, kv_cache=kv_cache)

    def work(self) -> Work:
        """Return the files to write."""
        source = self.checkpoint.source
        if not source.is_folder:
            beside = None if self.config is None else {"quantization_config": self.config}
            return Work(source, self.files, (), {}, beside)
        extras = tuple(self._extra(extra) for extra in source.extras)
        return Work(source, self.files, extras, self._documents(extras), None)

    def _extra(self, extra: Extra) -> Extra:
        if extra.name == MODELOPT_FILE or (extra.name == MISTRAL_FILE and self._mistral_params):
            return extra._replace(copied=False, reason="says how the source was quantized")
        return extra

    @cached_property
    def _mistral_params(self) -> dict[str, Any]:
        """The content of params.json without its quantization; empty if it has none."""
        params = read_json(self.checkpoint.source.path / MISTRAL_FILE)
        return params if params.pop("quantization", None) else {}

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
        if self._mistral_params:
            documents[MISTRAL_FILE] = self._mistral_params
        if self.checkpoint.source.weight_map:
            documents[self.checkpoint.source.index_name] = index_of(self.files, {})
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


def _refuse_unfit(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that is not FP8, or in which nothing says which numbers a scale belongs to."""
    other = checkpoint.other
    if other is not None:
        raise CheckpointError(
            f"{checkpoint.path} needs all of its quantized weights in FP8, got {other[0]}, which is of {other[1]}"
        )
    if not checkpoint.layers:
        claim = checkpoint.claim
        hint = f"{claim.file} says {claim.variant}" if claim.file else "quantize makes them"
        raise CheckpointError(f"{checkpoint.path} needs FP8 weights to be converted, got none: {hint}")
    for layer in checkpoint.layers.values():
        text = layer.fault() or other_groups(checkpoint.claim.of(layer.name), layer)
        if text:
            raise CheckpointError(text)
    for fault in left_over(checkpoint):
        raise CheckpointError(f"{fault.tensor} needs an FP8 weight, got none: {fault.text}")


def _is_matrix(layer: Layer) -> bool:
    """Return whether a layer has more than one axis: in an unscaled checkpoint, biases can be FP8, too."""
    return len(layer.weight.shape) > 1


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without its quantization sections."""
    gone = "quantization_config", "compression_config"
    found = {name: value for name, value in config.items() if name not in gone}
    text = found.get("text_config")
    if isinstance(text, dict):
        found["text_config"] = {name: value for name, value in text.items() if name not in gone}
    return found
