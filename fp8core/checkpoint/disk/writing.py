"""Writes new checkpoints: a file from a file, a folder from a folder; and quantizes weights while writing."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fp8core.checkpoint.disk.extras import Extra
from fp8core.checkpoint.disk.files import DTYPES, Entry, Header, Piece, copy_tensor, lay_out, read_rows
from fp8core.checkpoint.disk.replacing import Pending, pending_file, pending_folder, reserve, sync_folder, take_name
from fp8core.checkpoint.disk.source import Source
from fp8core.checkpoint.disk.target import Destination
from fp8core.checkpoint.formats.naming import module_of
from fp8core.checkpoint.formats.schemes import Scheme
from fp8core.errors import CheckpointError
from fp8core.ops.quantize import quantize
from fp8core.problem import PER_TENSOR

MARK: Final = "fp8core"
"""The key in the metadata of safetensors files for the version that wrote them."""

Advance = Callable[[str, int], None]
"""Called with a tensor's name and the number of its bytes that have been read."""


class NewFile(Protocol):
    """One file to write."""

    @property
    def name(self) -> str:
        """The file's name in a folder."""

    def pieces(self) -> Iterable[Piece]:
        """Yield every tensor of the new file."""

    def size(self) -> int:
        """Return the length of the new file in bytes."""

    def write(self, target: BinaryIO, advance: Advance) -> None:
        """Write the new file; raises OSError if the system does."""


class Shard(NamedTuple):
    """A copy of a file in which some weights are quantized."""

    header: Header
    chosen: frozenset[str]
    scheme: Scheme
    input_scales: Mapping[str, float] = {}
    """By module: the static scales of activations, if the scheme has them."""

    @property
    def name(self) -> str:
        """The file's name in a folder."""
        return self.header.path.name

    def pieces(self) -> Iterator[Piece]:
        """Yield every tensor of the new file."""
        for entry in self.header.entries.values():
            if entry.name in self.chosen:
                rows, cols = entry.shape
                scale = self.scheme.scale_shape(entry.shape)
                yield Piece(entry.name, "F8_E4M3", entry.shape, rows * cols)
                dtype = "U8" if self.scheme.scale_format == "ue8m0_bytes" else "F32"
                yield Piece(scale_name(entry.name), dtype, scale, DTYPES[dtype].itemsize * math.prod(scale))
                if self.scheme.static:
                    yield Piece(input_scale_name(entry.name), "F32", (1,), 4)
            else:
                yield Piece(entry.name, entry.dtype, entry.shape, entry.nbytes)

    def size(self) -> int:
        """Return the length of the new file in bytes."""
        return lay_out(self.pieces(), self.metadata())[2]

    def metadata(self) -> dict[str, str]:
        """Return the new file's metadata, with a format, as transformers refuses files that do not name a framework."""
        return {"format": "pt", **self.header.metadata, MARK: version()}

    def write(self, target: BinaryIO, advance: Advance) -> None:
        """Write the new file; raises OSError if the system does."""
        first, begins, _ = lay_out(self.pieces(), self.metadata())
        with self.header.path.open("rb") as source:
            target.write(first)
            for entry in sorted(self.header.entries.values(), key=lambda e: e.begin):
                if entry.name in self.chosen:
                    self._quantize(entry, source, target, begins, advance)
                else:
                    for done in copy_tensor(source, entry, target, begins[entry.name]):
                        advance(entry.name, done)

    def _quantize(
        self, entry: Entry, source: BinaryIO, target: BinaryIO, begins: dict[str, int], advance: Advance
    ) -> None:
        """Quantize a weight, some rows at a time; raises CheckpointError if it is not finite."""
        given = self._tensor_scale(entry, source) if self.scheme.group_shape == PER_TENSOR else None
        scales = [] if given is None else [given]
        for first, weight in read_rows(source, entry):
            if given is None:
                how = self.scheme
                result = quantize(weight, group_shape=how.group_shape, scale_format=how.scale_format)
                scales.append(np.asarray(result.scale))
            else:
                result = quantize(weight, group_shape=PER_TENSOR, scale=given)
            data = np.asarray(result.data).view(np.uint8)
            # A NaN, and an infinity divided by its infinite scale, have the code of NaN: 0x7f or 0xff.
            if ((data & 0x7F) == 0x7F).any():
                raise CheckpointError(
                    f"{entry.name} of {self.header.path} needs finite values, got NaN, Inf or numbers beyond float32"
                )
            put(target, begins[entry.name] + first * entry.shape[1], data)
            advance(entry.name, weight.shape[0] * entry.nbytes // entry.shape[0])
        put(target, begins[scale_name(entry.name)], np.concatenate(scales))
        if self.scheme.static:
            given_scale = self.input_scales[module_of(entry.name)]
            put(target, begins[input_scale_name(entry.name)], np.array([given_scale], np.float32))

    def _tensor_scale(self, entry: Entry, source: BinaryIO) -> NDArray[np.float32]:
        """Return the scale of a whole tensor: the largest of the scales of its parts."""
        asked = [np.asarray(quantize(rows, group_shape=PER_TENSOR).scale) for _, rows in read_rows(source, entry)]
        largest: NDArray[np.float32] = np.max(np.concatenate(asked), keepdims=True)
        return largest


def version() -> str:
    """Return the version of this package."""
    import fp8core

    return fp8core.__version__


def scale_name(tensor: str) -> str:
    """Return the name of a weight's scale."""
    return f"{tensor}_scale"


def input_scale_name(tensor: str) -> str:
    """Return the name of the scale of a layer's activations, given the name of its weight."""
    return f"{module_of(tensor)}.input_scale"


def put(target: BinaryIO, begin: int, values: NDArray[Any]) -> None:
    """Write an array at an offset in a file; raises OSError if the system does."""
    target.seek(begin)
    target.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def json_bytes(value: dict[str, Any]) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(value, indent=2) + "\n").encode()


def write_file(
    new: NewFile, found: Destination, config: dict[str, Any] | None, advance: Advance, recheck: Callable[[], None]
) -> None:
    """Write the new file and, if given, its configuration beside it: both appear, or neither.

    Args:
        new: the file.
        found: the target.
        config: the configuration, or None.
        advance: see `Advance`.
        recheck: called when all is written and before anything is replaced; if it raises, nothing is replaced.
    """
    if config is None:
        with pending_file(found.path, new.size()) as weights:
            new.write(weights.file, advance)
            recheck()
            weights.appear()
        found.config_file.unlink(missing_ok=True)  # it described the file that was replaced
        return
    text = json_bytes(config)
    with ExitStack() as stack:
        beside = stack.enter_context(pending_file(found.config_file, len(text)))
        beside.file.write(text)
        weights = stack.enter_context(pending_file(found.path, new.size()))
        new.write(weights.file, advance)
        recheck()
        _appear_together(beside, weights)


def _appear_together(beside: Pending, weights: Pending) -> None:
    before = beside.path.read_bytes() if beside.path.exists() else None
    beside.appear()
    try:
        weights.appear()
    except BaseException:
        if before is None:
            beside.path.unlink()
        else:
            beside.path.write_bytes(before)
        raise


def write_folder(
    source: Source,
    files: Sequence[NewFile],
    found: Destination,
    extras: Iterable[Extra],
    documents: Mapping[str, dict[str, Any]],
    advance: Advance,
    recheck: Callable[[], None],
) -> None:
    """Write the new folder under a hidden name, then give it its own, replacing the folder of that name.

    Args:
        source: the checkpoint, whose other files are copied.
        files: the files with weights.
        found: the target.
        extras: the source's other files and folders.
        documents: the JSON files to write: name -> content.
        advance: see `Advance`.
        recheck: as for `write_file`.
    """
    with pending_folder(found.path) as folder:
        for extra in extras:
            if extra.copied:
                place = folder / extra.name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source.path / extra.name, place)
                _flush(place)
        for new in files:
            with (folder / new.name).open("x+b") as file:
                reserve(file, new.size())
                new.write(file, advance)
                file.flush()
                os.fsync(file.fileno())
        for name, value in documents.items():
            (folder / name).write_bytes(json_bytes(value))
            _flush(folder / name)
        sync_folder(folder)
        recheck()
        take_name(folder, found.path)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def index_of(files: Sequence[NewFile], weight_map: dict[str, str]) -> dict[str, Any]:
    """Return the index of the new files."""
    places = {piece.name: new.name for new in files for piece in new.pieces()}
    for tensor, file in weight_map.items():  # if two files have a tensor, the old index says which of them counts
        places[tensor] = file
        for beside in (scale_name(tensor), input_scale_name(tensor)):
            if beside in places:
                places[beside] = file
    total = sum(piece.nbytes for new in files for piece in new.pieces())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
