"""Write a quantized checkpoint: a file from a file, a folder from a folder."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8core.checkpoint.files import (
    Entry,
    Header,
    Piece,
    appearing,
    copy_tensor,
    exchange,
    lay_out,
    read_tensor,
    sync_folder,
    temporary_name,
)
from fp8core.checkpoint.schemes import Scheme
from fp8core.errors import CheckpointError
from fp8core.ops import quantize

INDEX: Final = "model.safetensors.index.json"
NOT_COPIED: Final = shutil.ignore_patterns(
    "*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf", ".*"
)
"""What the copy of a folder leaves out: weights in any form, and hidden files."""


class Shard(NamedTuple):
    """One file's part of the work."""

    header: Header
    chosen: frozenset[str]
    scheme: Scheme

    def pieces(self) -> Iterator[Piece]:
        """Give every tensor of the new file."""
        for entry in self.header.entries.values():
            if entry.name in self.chosen:
                rows, cols = entry.shape
                scale = self.scheme.scale_shape(entry.shape)
                yield Piece(entry.name, "F8_E4M3", entry.shape, rows * cols)
                yield Piece(scale_name(entry), "F32", scale, 4 * int(np.prod(scale)))
            else:
                yield Piece(entry.name, entry.dtype, entry.shape, entry.nbytes)

    def size(self) -> int:
        """Return the length of the new file in bytes."""
        return lay_out(self.pieces(), self.metadata())[2]

    def metadata(self) -> dict[str, str]:
        """Return the new file's metadata: transformers refuses a file that does not name a framework."""
        return {"format": "pt", **self.header.metadata}

    def write(self, path: Path, advance: Callable[[Entry], None]) -> None:
        """Write the new file; raises OSError as the system does."""
        first, begins, size = lay_out(self.pieces(), self.metadata())
        with self.header.path.open("rb") as source, appearing(path, size) as target:
            target.write(first)
            for entry in sorted(self.header.entries.values(), key=lambda e: e.begin):
                if entry.name in self.chosen:
                    data, scale = self.quantized(entry, read_tensor(source, entry))
                    _put(target, begins[entry.name], data)
                    _put(target, begins[scale_name(entry)], scale)
                else:
                    copy_tensor(source, entry, target, begins[entry.name])
                advance(entry)

    def quantized(self, entry: Entry, weight: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return a weight's bytes and scales; raises CheckpointError when it is not finite."""
        result = quantize(weight, group_shape=self.scheme.group_shape)
        data, scale = np.asarray(result.data).view(np.uint8), np.ascontiguousarray(result.scale)
        # An infinite weight makes its scale infinite; a NaN is ignored by the scale and stays a NaN: 0x7f or 0xff.
        if not np.isfinite(scale).all() or ((data & 0x7F) == 0x7F).any():
            raise CheckpointError(f"{entry.name} of {self.header.path} holds values that are not finite (NaN or Inf)")
        return data, scale


def scale_name(entry: Entry) -> str:
    """Return the name of a weight's scale."""
    return f"{entry.name}_scale"


def _put(target: BinaryIO, begin: int, values: NDArray[Any]) -> None:
    target.seek(begin)
    target.write(values.data.cast("B"))


def config_beside(target: Path) -> Path:
    """Return the name of the file with the quantization_config of a checkpoint that is one file."""
    return target.with_suffix(".config.json")


@contextmanager
def _json_appearing(path: Path, value: dict[str, Any]) -> Iterator[None]:
    text = (json.dumps(value, indent=2) + "\n").encode()
    with appearing(path, len(text)) as file:
        file.write(text)
        yield


def write_file(shard: Shard, target: Path, config: dict[str, Any], advance: Callable[[Entry], None]) -> None:
    """Write the new file and, beside it, its configuration: both appear, or none."""
    with _json_appearing(config_beside(target), config):
        shard.write(target, advance)


def write_folder(shards: list[Shard], target: Path, config: dict[str, Any], advance: Callable[[Entry], None]) -> None:
    """Write the new folder under another name, then let it take the name ``target``, replacing what had it.

    A symbolic link stays, and leads to the new folder.
    """
    source = shards[0].header.path.parent
    target = target.resolve()
    folder = temporary_name(target)
    try:
        shutil.copytree(source, folder, ignore=NOT_COPIED)
        for shard in shards:
            shard.write(folder / shard.header.path.name, advance)
        if (source / INDEX).exists():
            with _json_appearing(folder / INDEX, _index(shards)):
                pass
        with _json_appearing(folder / "config.json", config):
            pass
        _take_name(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _index(shards: list[Shard]) -> dict[str, Any]:
    places = {piece.name: shard.header.path.name for shard in shards for piece in shard.pieces()}
    total = sum(piece.nbytes for shard in shards for piece in shard.pieces())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


def _take_name(folder: Path, target: Path) -> None:
    """Give a folder the name of another, which is removed: in one step, or in two where the system has no other way.

    A run that is killed between these two leaves ``target`` under its temporary name, which the next run tells of.
    """
    if not target.exists():
        folder.rename(target)
    elif exchange(folder, target):
        shutil.rmtree(folder)
    else:
        old = temporary_name(target)
        target.rename(old)
        try:
            folder.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old)
    sync_folder(target.parent)
