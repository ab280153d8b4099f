"""The files and folders beside the weights of a checkpoint: which are copied to a new folder, and which are not."""

import stat
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NamedTuple

from fp8core.checkpoint.disk.files import Header, read_header

CONFIG: Final = "config.json"
RECORD: Final = "fp8core.json"
"""The record that `fp8core quantize` writes into a folder: the files it wrote, and what became of every tensor."""

LEFT_OUT: Final = {
    "another form of the weights": (
        *("consolidated*.safetensors", "consolidated*.json", "pytorch_model*", "tf_model*", "flax_model*"),
        *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.ot"),
        *("*.onnx", "*.onnx_data", "*.tflite"),
    ),
    "the index of files that are left out": ("*.index.json",),
    "hidden": (".*",),
}
"""By reason: globs of files beside the weights that are not copied."""
LEFT_OUT_FOLDERS: Final = {
    "another form of the weights": ("onnx", "openvino", "original", "coreml", "gguf", "metal"),
    "hidden": (".*",),
}
ODD: Final = "not a regular file"
"""The reason to leave out a FIFO, a socket or a device, or a link to one."""


class Extra(NamedTuple):
    """A file or folder beside the weights that are quantized, and whether it is copied.

    Examples:
        >>> from fp8core.checkpoint import Extra
        >>> Extra("tokenizer.json", copied=True, reason="", nbytes=2).copied
        True
    """

    name: str
    """Its path relative to the folder."""
    copied: bool
    reason: str
    """Why it is left out or, for copied weights, why they are not quantized; else empty."""
    nbytes: int


def extras_of(root: Path, there: Sequence[str], files: tuple[str, ...], headers: tuple[Header, ...]) -> Iterator[Extra]:
    """Yield what is ``there`` in a folder beside ``files``, the weights and their index, and beside the config."""
    names = {name for header in headers for name in header.entries}
    for name in there:
        one = root / name
        if name in (*files, CONFIG, RECORD):
            continue
        reason = _reason(name, LEFT_OUT_FOLDERS if one.is_dir() else LEFT_OUT)
        if one.is_dir():
            if not reason and one.is_symlink():
                reason = "a symbolic link to a folder"
            if reason:
                yield Extra(f"{name}/", False, reason, 0)
            else:
                yield from _below(root, one)
        elif reason:
            yield Extra(name, False, reason, one.lstat().st_size)
        elif name.endswith(".safetensors"):
            shared = names & set(read_header(one).entries)
            reason = "another form of the weights: its tensors have the same names" if shared else "not in the index"
            yield Extra(name, not shared, reason, one.stat().st_size)
        else:
            yield _copied(name, one)


def _below(root: Path, folder: Path) -> Iterator[Extra]:
    """Yield the files of a subfolder. Weights are copied, too: they are other modules, as in sentence-transformers."""
    for name in names_in(folder):
        one = folder / name
        place = str(one.relative_to(root))
        if name.startswith("."):
            yield Extra(place, False, "hidden", 0)
        elif one.is_symlink() and one.is_dir():
            yield Extra(f"{place}/", False, "a symbolic link to a folder", 0)
        elif one.is_dir():
            yield from _below(root, one)
        else:
            weights = name.endswith((".safetensors", ".bin", ".pt", ".pth"))
            yield _copied(place, one, "in a subfolder" if weights else "")


def _copied(name: str, path: Path, reason: str = "") -> Extra:
    """Return a file to be copied, unless it is a FIFO, a socket or a device, whose end may never come."""
    status = path.stat()
    return Extra(name, True, reason, status.st_size) if stat.S_ISREG(status.st_mode) else Extra(name, False, ODD, 0)


def _reason(name: str, table: Mapping[str, tuple[str, ...]]) -> str:
    return next((why for why, globs in table.items() if any(fnmatchcase(name, one) for one in globs)), "")


def names_in(folder: Path) -> list[str]:
    """Return the sorted names of the files and folders in a folder."""
    return sorted(one.name for one in folder.iterdir())
