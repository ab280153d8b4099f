"""Safetensors in, FP8 safetensors out, one tensor at a time."""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fp8core.checkpoint.files import Entry, leftovers, read_header, unwritable
from fp8core.checkpoint.schemes import NOT_LINEAR, SCHEMES, SchemeName, quantization_config, scheme_of, selection
from fp8core.checkpoint.writing import INDEX, Shard, config_beside, scale_name, write_file, write_folder
from fp8core.errors import CheckpointError

__all__ = ["NOT_LINEAR", "SCHEMES", "Progress", "SchemeName", "Summary", "quantize_checkpoint"]

Progress = Callable[[str, int, int], None]


class Summary(NamedTuple):
    """What was done: names of tensors, sizes of the weight files in bytes, and what belongs in config.json.

    Examples:
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


def quantize_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    scheme: SchemeName = "channel",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    force: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write an FP8 copy of a checkpoint, as vLLM and compressed-tensors read it.

    Every chosen ``weight`` [n, k] (fp32, fp16 or bf16) becomes F8_E4M3 of the same name and shape, and an fp32
    ``weight_scale`` joins it: [n, 1] per channel, [1] per tensor, or [ceil(n / 128), ceil(k / 128)] per block of
    128x128; ``weight * weight_scale`` is nearest to the original. All other tensors are copied byte by byte. Memory
    is bounded by the largest tensor. The new files appear whole or not at all, also when the run is interrupted.

    Args:
        source: a safetensors file, or a folder that holds model.safetensors or shards with their index (or that index).
        target: the new file, or for a folder the new folder. Beside a file ``NAME.safetensors`` goes
            ``NAME.config.json``; a folder's own config.json is extended.
        scheme: how weights and activations are scaled: "channel" with tokens, "tensor" with tensors, "block" of
            128x128 with groups of 1x128. Scales of activations are dynamic: found at run time.
        include: patterns over the modules' names (the tensors' without ".weight"): globs, or regular expressions
            after "re:". Without it, every 2-D weight but those of NOT_LINEAR: embeddings, norms, heads, routers.
        exclude: patterns of modules to leave as they are.
        force: replace an existing target.
        progress: called after every tensor with its name, the bytes of the source done so far, and all of them.

    Raises:
        CheckpointError: the source cannot be read, is damaged, is quantized already, holds nothing to quantize or a
            weight that is not finite; the target exists, or cannot be written. Nothing is left behind.

    Warns:
        RuntimeWarning: beside the target lies what a run left that was killed.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from safetensors.numpy import save_file
        >>> from fp8core.checkpoint import quantize_checkpoint
        >>> with TemporaryDirectory() as folder:
        ...     save_file({"layer.weight": np.ones((64, 256), np.float32)}, f"{folder}/model.safetensors")
        ...     summary = quantize_checkpoint(f"{folder}/model.safetensors", f"{folder}/fp8.safetensors")
        >>> summary.quantized, summary.target.name
        (('layer.weight',), 'fp8.safetensors')
    """
    chosen, picked = scheme_of(scheme), selection(include, exclude)
    source, target = Path(source), Path(target)
    if source.name.endswith(".index.json"):
        source = source.parent
    headers = [read_header(path) for path in _files_of(source)]
    entries = [entry for header in headers for entry in header.entries.values()]
    config = _config_of(source)
    _refuse_quantized(source, entries, config)
    shards = [Shard(h, frozenset(e.name for e in h.entries.values() if picked.takes(e)), chosen) for h in headers]
    quantized = tuple(sorted(name for shard in shards for name in shard.chosen))
    if not quantized:
        raise CheckpointError(f"{source} has no weight to quantize: none is selected, 2-D, and of fp32, fp16 or bf16")
    kept = [entry for entry in entries if entry.name not in set(quantized)]
    config["quantization_config"] = quantization_config(chosen, kept, quantized)
    after = sum(shard.size() for shard in shards)
    _refuse_target(source, target, after, force=force)
    _tell_of_leftovers(target)
    advance = _advance(progress, entries)
    try:
        if source.is_dir():
            write_folder(shards, target, config, advance)
        else:
            write_file(shards[0], target, config, advance)
    except OSError as error:
        raise unwritable(target, after, error) from error
    return Summary(
        target=target,
        config_file=target / "config.json" if source.is_dir() else config_beside(target),
        quantized=quantized,
        kept=tuple(sorted(entry.name for entry in kept)),
        bytes_before=sum(header.path.stat().st_size for header in headers),
        bytes_after=after,
        quantization_config=config["quantization_config"],
    )


def _files_of(source: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint."""
    if not source.exists():
        raise CheckpointError(f"there is no {source}")
    if not source.is_dir():
        return [source]
    index = source / INDEX
    if index.exists():
        return _files_of_index(index)
    whole = source / "model.safetensors"
    files = [whole] if whole.exists() else sorted(source.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{source} holds no safetensors file")
    return files


def _files_of_index(index: Path) -> list[Path]:
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names the file {name!r}, which is not there")
    for name in names:
        present = read_header(index.parent / name).entries
        absent = next((t for t, file in weight_map.items() if file == name and t not in present), None)
        if absent is not None:
            raise CheckpointError(f"{index} says that {absent} is in {name}, and it is not")
    return [index.parent / name for name in names]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object: got {type(value).__name__}")
    return value


def _config_of(source: Path) -> dict[str, Any]:
    """Return a folder's config.json; a file's is unknown, whatever lies beside it."""
    config = source / "config.json"
    return _json(config) if source.is_dir() and config.exists() else {}


def _refuse_quantized(source: Path, entries: list[Entry], config: dict[str, Any]) -> None:
    names = {entry.name for entry in entries}
    for entry in entries:
        if entry.dtype.startswith("F8_") or scale_name(entry) in names:
            raise CheckpointError(f"{source} is quantized already: {entry.name} is {entry.dtype} or has a scale")
    if "quantization_config" in config:
        raise CheckpointError(f"{source} is quantized already: its config.json has a quantization_config")


def _refuse_target(source: Path, target: Path, nbytes: int, *, force: bool) -> None:
    here, there = source.resolve(), target.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise CheckpointError(f"the target {target} must lie outside of the source {source}")
    if not target.parent.is_dir():
        raise CheckpointError(f"cannot write {target}: there is no folder {target.parent}")
    if not source.is_dir() and target.suffix != ".safetensors":
        raise CheckpointError(f"the target of a file must end in .safetensors: got {target}")
    for path in (target,) if source.is_dir() else (target, config_beside(target)):
        if path.exists() and not force:
            raise CheckpointError(f"{path} exists: give another name, or force (--force) to replace it")
    if target.exists() and target.is_dir() != source.is_dir():
        raise CheckpointError(f"cannot replace {target}: a {'folder' if source.is_dir() else 'file'} would be written")
    if target.is_dir() and any(target.iterdir()) and not any(target.glob("*.safetensors")):
        raise CheckpointError(f"will not replace {target}: it holds other things than a checkpoint")
    free = shutil.disk_usage(target.parent).free
    if nbytes > free:
        raise CheckpointError(
            f"cannot write {target}: no room on the disk: {nbytes:,} bytes are needed and {free:,} are free"
        )


def _tell_of_leftovers(target: Path) -> None:
    for path in (target.resolve(), config_beside(target)):
        for left in leftovers(path):
            state = "" if path.exists() else f"; there is no {path}, so it may be what was to be replaced"
            warnings.warn(
                f"{left} is of a run that was killed or is still at work: look at it and remove it{state}",
                RuntimeWarning,
                stacklevel=3,
            )


def _advance(progress: Progress | None, entries: list[Entry]) -> Callable[[Entry], None]:
    total = sum(entry.nbytes for entry in entries)
    done = 0

    def advance(entry: Entry) -> None:
        nonlocal done
        done += entry.nbytes
        if progress is not None:
            progress(entry.name, done, total)

    return advance
