"""Opens checkpoints: finds their FP8 weights, the scales of these, and what the configuration claims about them.

Only headers and JSON files are read here; data is read on request, from a mapping of the file.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from fp8core.checkpoint.disk.extras import CONFIG
from fp8core.checkpoint.disk.files import FLOATS, FP8, Header, read_header
from fp8core.checkpoint.disk.source import Source, path_of, read_json, scan
from fp8core.checkpoint.formats import naming
from fp8core.checkpoint.formats.claims import MODELOPT_FILE, Claim, claim_of, section
from fp8core.checkpoint.formats.granularity import E8M0, Grouping, grouping, matrices
from fp8core.checkpoint.formats.naming import FormatName, belongings
from fp8core.checkpoint.reading.layers import Layer, Tensor, tensor_of
from fp8core.errors import CheckpointError
from fp8core.problem import PER_TENSOR

SCALES: Final = (*FLOATS, *E8M0)


class Checkpoint:
    """A checkpoint whose headers have been read; `open_checkpoint` returns it.

    Args:
        source: the files.
        claim: the configuration's claim about the quantization.
        unscaled: whether FP8 tensors without a scale are values, not codes of a scaled weight.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint import open_checkpoint
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"up.weight": np.ones((64, 32), np.float32)}, f"{folder}/model.safetensors")
        ...     checkpoint = open_checkpoint(folder)
        >>> checkpoint.format, [tensor.name for tensor in checkpoint.tensors()]
        ('unquantized', ['up.weight'])
    """

    def __init__(self, source: Source, claim: Claim, *, unscaled: bool = False) -> None:
        self.source: Final = source
        """The files."""
        self.claim: Final = claim
        """The configuration's claim about the quantization."""
        self.unscaled: Final = unscaled
        """Whether FP8 tensors without a scale are values, not codes of a scaled weight."""

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {self.format}, {len(self.layers)} FP8 layers)"

    @property
    def path(self) -> Path:
        """The file or folder."""
        return self.source.path

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of a folder, or the configuration beside a file; empty if there is none."""
        return self.source.config

    @cached_property
    def all_tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, in the order of the files."""
        found: dict[str, Tensor] = {}
        for header in self.source.headers:
            for entry in header.entries.values():
                if self.source.weight_map.get(entry.name, header.path.name) == header.path.name:
                    found[entry.name] = tensor_of(entry, header)
        return found

    @cached_property
    def other(self) -> tuple[str, str] | None:
        """What makes weights more than FP8 codes times scales: a tensor or a setting, and its quantization; or None.

        Examples are zero points, sparse weights, and transforms of activations at run time. Zero points are read, as
        those of symmetric schemes are zero and change nothing.
        """
        tensors = self.all_tensors
        for name, other in naming.other_quantizations({name: one.dtype for name, one in tensors.items()}):
            if not (name.endswith(naming.ZERO_POINTS) and _is_zero(tensors[name])):
                return name, other
        if self.claim.transforms:
            transform = f"{self.claim.transforms[0]} in the transform_config of {self.claim.file}"
            return transform, "compressed-tensors' transforms of activations"
        return None

    @cached_property
    def format(self) -> FormatName:
        """The format: the one that the configuration claims or, without a claim, that of the tensors' names."""
        return self._layers_and_format[1]

    @property
    def layers(self) -> Mapping[str, Layer]:
        """The FP8 weights, by the names of their modules."""
        return self._layers_and_format[0]

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that belongs to no FP8 weight."""
        taken = {one.name for layer in self.layers.values() for one in layer.tensors()}
        return (tensor for tensor in self.all_tensors.values() if tensor.name not in taken)

    def kv_scales(self) -> dict[str, str]:
        """Return the scales of the KV cache: name -> the name in compressed-tensors and vLLM."""
        found = ((tensor.name, naming.kv_scale(tensor.name)) for tensor in self.tensors())
        return {name: known for name, known in found if known is not None}

    @cached_property
    def _layers_and_format(self) -> tuple[dict[str, Layer], FormatName]:
        """The FP8 weights by the names of their modules, and the format."""
        present = self.all_tensors
        codes = (one for one in present.values() if one.dtype in FP8 and one.nbytes)
        others = naming.MARKER, *naming.OTHERS
        named = (one for one in codes if not naming.is_scale(one.name) and not one.name.endswith(others))
        weights = [one for one in named if len(one.shape) > 1 or (self.unscaled and one.shape)]
        around = {one.name: belongings(one.name, present) for one in weights}
        name = _format_of(self.claim, weights, around, present)
        layers = [self._layer(weight, around[weight.name], name) for weight in weights]
        return {layer.name: layer for layer in layers}, name

    def _layer(self, weight: Tensor, near: naming.Belongings, name: FormatName) -> Layer:
        """Return the layer of a weight, whose belongings are ``near``, in the format ``name``."""

        def named(tensor: str | None) -> Tensor | None:
            return None if tensor is None else self.all_tensors[tensor]

        scale = named(near.scale)
        how = None if near.repeated else self._grouping(weight, scale)
        experts = matrices(weight.name, weight.shape).experts
        return Layer(
            name=naming.module_of(weight.name),
            weight=weight,
            scale=scale,
            granularity=None if how is None else how.granularity,
            group_shape=None if how is None else how.group_shape,
            scale_shape=() if how is None else (*(() if experts is None else (experts,)), *how.scale_shape),
            widths=() if how is None else how.widths,
            input_scale=named(near.input_scale),
            input_scale_ub=named(near.input_scale_ub),
            marker=named(near.marker),
            format=name,
            repeated=near.repeated,
        )

    def _grouping(self, weight: Tensor, scale: Tensor | None) -> Grouping | None:
        """Return the groups of a weight that share a number of its scale, or None if nothing says which."""
        if scale is None:
            return Grouping("tensor", PER_TENSOR, (1, 1)) if self.unscaled else None
        if scale.dtype not in SCALES:
            return None
        claim = self.claim.of(naming.module_of(weight.name))
        return grouping(
            weight.name,
            weight.shape,
            scale.shape,
            claim.group_shape,
            self.source.config,
            blocks=claim.granularities == {"block"},
            transposed=claim.format == "fbgemm_fp8",
        )


def _is_zero(tensor: Tensor) -> bool:
    with np.errstate(invalid="ignore"):  # signaling NaN
        return not tensor.read().astype(np.bool_).any()


def _format_of(
    claim: Claim, weights: list[Tensor], around: Mapping[str, naming.Belongings], present: Mapping[str, Tensor]
) -> FormatName:
    """Return the format that is claimed or, without a claim, the one that the scales' names and shapes indicate."""
    if not weights:
        return "unquantized"
    hints = frozenset[FormatName]().union(*(one.formats for one in around.values()))
    if claim.format == "fp8":
        return "autofp8" if hints <= {"fbgemm_fp8"} and any(one.scale for one in around.values()) else "fp8"
    if claim.format is not None:
        return claim.format
    for one in ("comfyui", "fbgemm_fp8", "fp8", "mistral"):
        if one in hints or (one == "comfyui" and naming.MARKER in present):
            return one
    scales = [present[one.scale] for one in around.values() if one.scale is not None]
    if not scales:
        return "unscaled"
    if any(name.endswith(naming.PART_OF_MODELOPT) for name in present) or any(len(one.shape) == 4 for one in scales):
        return "modelopt"
    if all(one.dtype in E8M0 for one in scales):
        return "mxfp8"
    return "compressed-tensors" if any(one.shape for one in scales) else "autofp8"


def open_checkpoint(path: str | os.PathLike[str], *, unscaled: bool = False) -> Checkpoint:
    """Open a checkpoint of any format, FP8 or not. Only its headers and JSON files are read.

    Args:
        path: a safetensors file, a folder with one or with shards and their index, or that index. The configuration of
            a file is ``NAME.config.json`` beside it or, for model.safetensors, also config.json.
        unscaled: treat FP8 tensors without a scale as values, as a plain cast to FP8 makes them (ComfyUI has such
            files).

    Returns:
        The checkpoint; its tensors and scales are read on request.

    Raises:
        CheckpointError: a file cannot be read or is damaged, the index does not match the files, or path is no path.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint import open_checkpoint
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"up.weight": np.ones((64, 32), np.float32)}, f"{folder}/model.safetensors")
        ...     checkpoint = open_checkpoint(folder)
        >>> checkpoint.format, len(checkpoint.layers), [tensor.name for tensor in checkpoint.tensors()]
        ('unquantized', 0, ['up.weight'])
    """
    return checkpoint_of(scan(path_of(path, "path")), unscaled=unscaled)


def checkpoint_of(source: Source, *, unscaled: bool = False) -> Checkpoint:
    """Return the checkpoint in a source's files, with the claim of its configuration."""
    headers = [header.metadata for header in source.headers]
    if source.is_folder:
        claim = claim_of(source.config, read_json(source.path / MODELOPT_FILE), headers)
        return Checkpoint(source, claim, unscaled=unscaled)
    own = source.path.with_suffix(".config.json")
    beside = read_json(own)
    config = {**source.config, **beside}
    of_folder = source.path.name == "model.safetensors"  # whose folder's configuration is its own, too
    modelopt = read_json(source.path.parent / MODELOPT_FILE) if of_folder else {}
    file = CONFIG if section(beside) is None else own.name
    claim = claim_of(config if of_folder else beside, modelopt, headers, file)
    return Checkpoint(source._replace(config=config), claim, unscaled=unscaled)


def open_files(
    files: Iterable[str | os.PathLike[str]],
    config: Mapping[str, Any] | None = None,
    modelopt: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open the checkpoint that consists of a list of safetensors files, for use in loaders.

    Args:
        files: the files of one model. If two of them have a tensor of the same name, the last one is used.
        config: the content of config.json, with its quantization_config.
        modelopt: the content of hf_quant_config.json, which is used if config has no quantization_config.

    Returns:
        The checkpoint; its tensors and scales are read on request.

    Raises:
        CheckpointError: a file cannot be read or is damaged, or files is not a list of paths, or empty.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint import open_files
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"up.weight": np.ones((64, 32), np.float32)}, f"{folder}/model.safetensors")
        ...     open_files([f"{folder}/model.safetensors"], {"model_type": "llama"}).config
        {'model_type': 'llama'}
    """
    if isinstance(files, str | os.PathLike) or not isinstance(files, Iterable):
        got = str(files) if isinstance(files, os.PathLike) else files
        raise CheckpointError(f"files needs a list of paths, got {got!r}")
    headers: tuple[Header, ...] = tuple(read_header(path_of(file, "files")) for file in files)
    if not headers:
        raise CheckpointError("files needs at least one safetensors file, got none")
    known = dict(config or {})
    source = Source(headers[0].path.parent, headers, known, {}, ())
    return Checkpoint(source, claim_of(known, modelopt or {}, [header.metadata for header in headers]))
