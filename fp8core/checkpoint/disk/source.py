"""The files of a checkpoint: weights, their index, config.json, and others."""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from fp8core.checkpoint.disk.extras import CONFIG, Extra, extras_of, names_in
from fp8core.checkpoint.disk.files import Entry, Header, read_header
from fp8core.checkpoint.formats.claims import MODELOPT_FILE, section
from fp8core.checkpoint.formats.naming import WEIGHT, module_of, other_quantizations
from fp8core.errors import CheckpointError
from fp8core.runtime.regular_files import read_regular

INDEX: Final = "model.safetensors.index.json"
SHARD: Final = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.safetensors")
"""The name of a shard, with its number and the number of all shards."""


class Source(NamedTuple):
    """The files of a checkpoint."""

    path: Path
    headers: tuple[Header, ...]
    config: dict[str, Any]
    """The config.json of a folder; for a file, the one beside it, which only tells the kind of model."""
    weight_map: dict[str, str]
    """The index, tensor -> file; empty if there is none."""
    extras: tuple[Extra, ...]
    index_name: str = INDEX
    """The name of the index, if there is one."""

    @property
    def is_folder(self) -> bool:
        """Whether the checkpoint is a folder, not a file."""
        return self.path.is_dir()

    @property
    def entries(self) -> list[Entry]:
        """All tensors of all files."""
        return [entry for header in self.headers for entry in header.entries.values()]

    @property
    def nbytes(self) -> int:
        """The bytes of the weight files."""
        return sum(header.path.stat().st_size for header in self.headers)

    def refuse_changed(self) -> None:
        """Refuse files that have changed since their headers were read: data may have been read at wrong offsets.

        Raises:
            CheckpointError: a file was written since its header was read.
        """
        for header in self.headers:
            header.refuse_changed()


OnFault = Callable[[str, str], None]
"""Called with a tensor's name and a fault of its entry in the index, or with no name and a lack of shards."""


def path_of(given: str | os.PathLike[str], operand: str) -> Path:
    """Return a path that a caller gave.

    Raises:
        CheckpointError: it is neither text nor a path, or holds a null character, which no file's name has.
    """
    try:
        path = Path(given)
    except TypeError as error:
        raise CheckpointError(f"{operand} needs a str or an os.PathLike of one, got {given!r}") from error
    if "\0" in str(path):
        raise CheckpointError(f"{operand} needs a path without null characters, got {given!r}")
    return path


def open_source(path: Path) -> Source:
    """Return the files of an unquantized checkpoint: a safetensors file, a folder, or the index in a folder.

    Raises:
        CheckpointError: a file cannot be read or is damaged, or the checkpoint is quantized already.
    """
    source = scan(path)
    _refuse_quantized(source)
    return source


def _raise(_: str, fault: str) -> None:
    raise CheckpointError(fault)


def scan(path: Path, on_fault: OnFault = _raise) -> Source:
    """Return the files of a checkpoint of any kind: a safetensors file, a folder, or the index in a folder.

    Args:
        path: the file or folder.
        on_fault: called for each fault of the index or of the set of shards; by default the first one is raised.

    Raises:
        CheckpointError: a file cannot be read or is damaged.
    """
    try:
        given = path.name.endswith(".index.json")
        return _open(path.parent, on_fault, path.name) if given else _open(path, on_fault)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename or path}: {error.strerror or error}") from error


def _open(path: Path, on_fault: OnFault, given: str | None = None) -> Source:
    """Return the files of a checkpoint; in a folder, those of the index that is ``given``, if one is."""
    path.stat()
    if not path.is_dir():
        return Source(path, (read_header(path),), _config_beside(path), {}, ())
    weight_map: dict[str, str] = {}
    names = names_in(path)
    index = given or _index(path, names)
    if given or index in names:
        weight_map = _weight_map(path / index, on_fault)
        files = sorted(set(weight_map.values()))
        if not files:
            raise CheckpointError(f"{path / index} names no file that is there")
    else:
        found = [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]
        files = ["model.safetensors"] if "model.safetensors" in found else found
        for text in _missing(files):
            on_fault("", f"{path} {text}")
    if not files:
        depths = "*/*.safetensors", "snapshots/*/*.safetensors"  # the latter in the cache of huggingface_hub
        below = sorted(str(one.parent.relative_to(path)) for depth in depths for one in path.glob(depth))
        there = f"; there are some in {', '.join(dict.fromkeys(below))}: give one of these" if below else ""
        raise CheckpointError(f"{path} holds no safetensors file{there}")
    headers = tuple(read_header(path / file) for file in files)
    _check(weight_map, headers, path / index, on_fault)
    extras = tuple(extras_of(path, names, (*files, index), headers))
    return Source(path, headers, read_json(path / CONFIG), weight_map, extras, index)


def _missing(files: Sequence[str]) -> Iterator[str]:
    """Yield which shards are missing of those that the names count, as model-00001-of-00003.safetensors does."""
    there = set(files)
    numbered = [match for match in map(SHARD.fullmatch, files) if match]
    for (stem, total), example in {(match[1], match[3]): match[0] for match in numbered}.items():
        every = [f"{stem}-{number:05}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
        missing = [name for name in every if name not in there]
        if missing:
            more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
            yield f"needs the {len(every):,} shards that {example} counts, got none named {missing[0]}{more}"


def _index(folder: Path, names: Sequence[str]) -> str:
    """Return the name that the index of a folder has if there is one: diffusers and Mistral use names of their own."""
    others = [name for name in names if name.endswith(".safetensors.index.json") and not name.startswith(".")]
    if INDEX in names or "model.safetensors" in names or not others:
        return INDEX
    if len(others) > 1:
        raise CheckpointError(f"{folder} needs one index, got {' and '.join(others)}: give the path of one")
    return others[0]


def _weight_map(index: Path, on_fault: OnFault) -> dict[str, str]:
    """Return the index without entries of files that do not exist; these and repeated names are faults."""
    repeating: list[tuple[dict[str, Any], list[tuple[str, Any]]]] = []  # JSON objects with a repeated key

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            repeating.append((made, pairs))
        return made

    weight_map = _json(index, unique).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    files_of: dict[str, list[str]] = {}
    for name, value in next((pairs for made, pairs in repeating if made is weight_map), ()):
        files_of.setdefault(name, []).append(str(value))
    good: dict[str, str] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"weight_map of {index} needs names of files, got {file!r} for {tensor}")
        files = files_of.get(tensor, ())
        if len(files) > 1:
            on_fault(tensor, f"{index} names {tensor} {len(files)} times, in {' and '.join(dict.fromkeys(files))}")
        if Path(file).name != file or not (index.parent / file).is_file():
            on_fault(tensor, f"{index} names the file {file!r}, which is not there")
        else:
            good[tensor] = file
    return good


def _check(weight_map: dict[str, str], headers: tuple[Header, ...], index: Path, on_fault: OnFault) -> None:
    """Pass to ``on_fault`` index entries that do not match the files, and repeated tensors that no index resolves."""
    present = {header.path.name: header.entries for header in headers}
    for tensor, file in list(weight_map.items()):
        if tensor not in present[file]:
            on_fault(tensor, f"{index} says that {tensor} is in {file}, but it is not")
            del weight_map[tensor]
    seen: dict[str, str] = {}
    for file, entries in present.items():
        for tensor in entries:
            if tensor in seen and tensor not in weight_map:
                on_fault(
                    tensor, f"{index.parent} needs one tensor of each name, got {tensor} in {seen[tensor]} and {file}"
                )
            seen[tensor] = file


def config_of(path: Path) -> dict[str, Any]:
    """Return the config.json of a checkpoint of any kind, without reading its headers.

    Raises:
        CheckpointError: that of a folder cannot be read, or is not a JSON object.
    """
    top = path.parent if path.name.endswith(".index.json") else path
    return read_json(top / CONFIG) if top.is_dir() else _config_beside(top)


def _config_beside(path: Path) -> dict[str, Any]:
    """Return the config.json beside a file, or an empty mapping: one that cannot be read belongs to something else."""
    try:
        return read_json(path.parent / CONFIG)
    except (CheckpointError, OSError):
        return {}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is none; a link to a lost file is one.

    Raises:
        CheckpointError: the file cannot be read, is not a regular file, not JSON, or not a JSON object.
    """
    return _json(path) if os.path.lexists(path) else {}


def _json(path: Path, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(path), object_pairs_hook=pairs)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} needs a JSON object, got {type(value).__name__}")
    return value


def _refuse_quantized(source: Source) -> None:
    names = {entry.name for entry in source.entries}
    other = next(other_quantizations({entry.name: entry.dtype for entry in source.entries}), None)
    if other is not None:
        raise CheckpointError(f"{source.path} is quantized already: {other[0]} is of {other[1]}")
    for entry in source.entries:
        if entry.dtype.startswith("F8_"):
            raise CheckpointError(f"{source.path} is quantized already: {entry.name} is {entry.dtype}")
        beside = {f"{entry.name}_scale", f"{entry.name}_scale_inv"}
        if entry.name.endswith(WEIGHT) and len(entry.shape) == 2:  # beside a norm it could mean something else
            beside.add(f"{module_of(entry.name)}.input_scale")
        scales = names & beside
        if scales:
            raise CheckpointError(f"{source.path} is quantized already: {entry.name} has a scale, {min(scales)}")
    if source.is_folder:
        if source.config.get("quantization_config") is not None or section(source.config) is not None:
            raise CheckpointError(f"{source.path} is quantized already: its config.json has a quantization_config")
        modelopt = read_json(source.path / MODELOPT_FILE).get("quantization")
        if isinstance(modelopt, dict) and modelopt.get("quant_algo") is not None:
            raise CheckpointError(f"{source.path} is quantized already: its {MODELOPT_FILE} has a quant_algo")
