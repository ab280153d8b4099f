"""Experts that are stacked in one tensor, as tensors of their own: the same bytes under other names.

``experts.gate_up_proj`` [E, 2 n, k] is ``experts.0.gate_proj.weight`` [n, k], ``experts.0.up_proj.weight``, and so on,
as llm-compressor writes mixtures and as readers of compressed-tensors look for their scales. Gate and up are the halves
of the rows. Nothing is moved: an expert's rows follow each other in the file.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from fp8core.checkpoint.files import FP8, WIDE, Entry
from fp8core.checkpoint.granularity import grouping
from fp8core.checkpoint.naming import STACKED, WEIGHT
from fp8core.checkpoint.source import Source
from fp8core.errors import CheckpointError

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    **{name: (name,) for name in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")},
}
"""What a stacked tensor holds of each expert, by its rows."""
BACK: Final = ("down_proj", "w2")
"""The layers whose rows are the model's hidden size; of the others the columns are."""


class Stack(NamedTuple):
    """A stacked weight."""

    entry: Entry
    module: str
    """The experts'."""
    part: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The layers of each expert that it holds."""
        return PARTS[self.part]


def split_experts(source: Source) -> Source:
    """Return a checkpoint whose stacked experts, and their scales, are tensors of their own.

    Raises:
        CheckpointError: there are none; config.json does not tell the hidden size; or they are stored [in, out], have
            biases, or scales whose halves do not belong to gate and up.
    """
    stacks = {
        entry.name: stack
        for header in source.headers
        for entry in header.entries.values()
        if (stack := _stack(entry)) is not None
    }
    if not stacks:
        raise CheckpointError(f"split_experts needs experts in tensors of 3 axes, got none in {source.path}")
    _check_orientation(source, list(stacks.values()))
    headers, files = [], dict(source.weight_map)
    for header in source.headers:
        entries: dict[str, Entry] = {}
        for entry in header.entries.values():
            made = list(_split(entry, stacks))
            entries |= {one.name: one for one in made or [entry]}
            if made and entry.name in files:
                file = files.pop(entry.name)
                files |= {one.name: file for one in made}
        headers.append(header._replace(entries=entries))
    return source._replace(headers=tuple(headers), weight_map=files)


def _stack(entry: Entry) -> Stack | None:
    module, _, part = entry.name.removesuffix(WEIGHT).rpartition(".")
    codes = entry.dtype in FP8 or entry.dtype in WIDE
    if len(entry.shape) == 3 and codes and part in PARTS and module.rpartition(".")[2] == "experts":
        return Stack(entry, module, part)
    return None


def _check_orientation(source: Source, stacks: list[Stack]) -> None:
    """Refuse experts whose rows are not known to be outputs."""
    text = source.config.get("text_config")
    sizes: dict[str, Any] = {**source.config, **(text if isinstance(text, dict) else {})}
    hidden = sizes.get("hidden_size")
    if not isinstance(hidden, int):
        raise CheckpointError(f"split_experts needs hidden_size in the config.json of {source.path}, got none")
    present = {entry.name for entry in source.entries}
    told: dict[str, bool] = {}
    for stack in stacks:
        _, rows, cols = stack.entry.shape
        outputs, inputs = (rows, cols) if stack.part in BACK else (cols, rows)
        if outputs != hidden:
            stored = "[in, out]" if inputs == hidden else f"neither way for a hidden size of {hidden}"
            shape = list(stack.entry.shape)
            raise CheckpointError(f"{stack.entry.name} needs experts stored [out, in], got {shape}, {stored}")
        told[stack.module] = told.get(stack.module, False) or inputs != hidden
        if rows % len(stack.parts):
            raise CheckpointError(f"{stack.entry.name} needs gate and up of equal rows, got {rows} rows")
        bias = {f"{stack.module}.{stack.part}{suffix}" for suffix in ("_bias", ".bias")} & present
        if bias:
            raise CheckpointError(f"split_experts needs experts without biases, got {min(bias)}")
    for module, sure in told.items():
        if not sure:
            raise CheckpointError(f"{module} needs shapes that tell rows from columns, got squares of {hidden}")


def _split(entry: Entry, stacks: Mapping[str, Stack]) -> Iterator[Entry]:
    """Give the tensors that one is split into: a stacked weight, or a scale of one."""
    stack = stacks.get(entry.name)
    if stack is not None:
        yield from _slices(entry, stack, WEIGHT, entry.shape)
        return
    for suffix, role, _ in STACKED:
        for weight in (entry.name.removesuffix(suffix), entry.name.removesuffix(f"{WEIGHT}{suffix}") + WEIGHT):
            stack = stacks.get(weight) if entry.name.endswith(suffix) else None
            if stack is not None:
                name = {"_scale_inv": ".weight_scale_inv", "_activation_scale": ".activation_scale"}.get(suffix)
                kept = name or (".weight_scale" if role == "scale" else ".input_scale")
                yield from _slices(entry, stack, kept, entry.shape)
                return


def _slices(entry: Entry, stack: Stack, suffix: str, shape: tuple[int, ...]) -> Iterator[Entry]:
    """Give every expert's part of a tensor; what all share, or gate and up do, is given to each."""
    experts, parts = stack.entry.shape[0], stack.parts
    shared = math.prod(shape) == 1
    if not shared and shape[0] != experts:
        raise CheckpointError(f"{entry.name} needs one part for each of {experts} experts, got shape {list(shape)}")
    of_one = () if shared else shape[1:]
    nbytes = entry.nbytes if shared else entry.nbytes // experts
    halves = 1 if math.prod(of_one) == 1 else len(parts)
    if halves > 1 and of_one[0] % halves:
        raise CheckpointError(f"{entry.name} needs scales that part gate from up, got shape {list(shape)}")
    if halves > 1 and suffix != WEIGHT and _straddles(stack, entry):
        raise CheckpointError(f"{entry.name} needs scales that part gate from up, got a block across both")
    small = (of_one[0] // halves, *of_one[1:]) if of_one else ()
    for expert in range(experts):
        for place, part in enumerate(parts):
            begin = entry.begin + (0 if shared else expert * nbytes) + (place * (nbytes // halves) if halves > 1 else 0)
            yield Entry(f"{stack.module}.{expert}.{part}{suffix}", entry.dtype, small, begin, nbytes // halves)


def _straddles(stack: Stack, scale: Entry) -> bool:
    """Return whether a block of rows has some of gate and some of up, or the scale's shape says nothing known."""
    how = grouping(stack.entry.name, stack.entry.shape, scale.shape, scale.dtype, None, {})
    of_each = stack.entry.shape[1] // len(stack.parts)
    return how is None or (how.group_shape.rows > 0 and of_each % how.group_shape.rows != 0)
