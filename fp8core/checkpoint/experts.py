"""Splits stacked experts into one tensor per expert and projection: the same bytes under other names.

``experts.gate_up_proj`` [E, 2 n, k] becomes ``experts.0.gate_proj.weight`` [n, k], ``experts.0.up_proj.weight``, and so
on. llm-compressor writes mixtures with these names, and readers of compressed-tensors look for scales under them. Gate
and up are the halves of the rows. Experts stored [in, out], such as Llama 4's, are read by columns; they are recognized
by the hidden size in config.json.
"""

import math
from collections.abc import Container, Iterator, Mapping
from typing import Final, NamedTuple

from fp8core.checkpoint.files import FLOATS, FP8, Entry
from fp8core.checkpoint.granularity import grouping
from fp8core.checkpoint.kinds import sizes_of
from fp8core.checkpoint.naming import STACKED, WEIGHT, module_of
from fp8core.checkpoint.source import Source
from fp8core.errors import CheckpointError

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    **{name: (name,) for name in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")},
}
"""By the last part of a stacked tensor's name: the projections that it holds for each expert, in the order of rows."""
BACK: Final = ("down_proj", "w2")
"""The projections whose outputs have the model's hidden size; in the others, the inputs have it."""


ALTERNATE: Final = ("gpt_oss",)
"""Model types in which the channels of gate and up alternate."""


class Stack(NamedTuple):
    """A stacked weight."""

    entry: Entry
    module: str
    """The name of the module that holds the experts."""
    part: str
    """The key in `PARTS`."""
    transposed: bool = False
    """Whether each expert is stored [in, out]."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The projections of each expert that the tensor holds."""
        return PARTS[self.part]

    @property
    def outputs(self) -> int:
        """The number of output channels of all these projections."""
        return self.entry.shape[2 if self.transposed else 1]


def split_experts(source: Source) -> Source:
    """Return a checkpoint whose stacked experts, and their scales, are split into one tensor per expert and projection.

    Raises:
        CheckpointError: there are no stacked experts; config.json has no hidden size, or it does not tell rows from
            columns; the experts have biases, alternating gate and up, or scales that do not split into gate and up; or
            a tensor has the name of a split one already.
    """
    stacks = _stacks(source)
    if not stacks:
        raise CheckpointError(f"split_experts needs experts in tensors of 3 axes, got none in {source.path}")
    stacks = _oriented(source, stacks)
    headers, files = [], dict(source.weight_map)
    origins = {entry.name: "" for entry in source.entries}  # by name: the tensor that it is split from
    for header in source.headers:
        entries: dict[str, Entry] = {}
        for entry in header.entries.values():
            made = list(_split(entry, stacks))
            for one in made:
                if origins.setdefault(one.name, entry.name) != entry.name:
                    raise CheckpointError(f"split_experts makes {one.name} of {entry.name}, but it already exists")
            entries |= {one.name: one for one in made or [entry]}
            if made and entry.name in files:
                file = files.pop(entry.name)
                files |= {one.name: file for one in made}
        headers.append(header._replace(entries=entries))
    return source._replace(headers=tuple(headers), weight_map=files)


def split_if_possible(source: Source) -> Source:
    """Return a checkpoint with its stacked experts split, or as it is if there are none or they cannot be split."""
    try:
        return split_experts(source) if _stacks(source) else source
    except CheckpointError:
        return source


def split_like(source: Source, names: Container[str]) -> Source:
    """Return a checkpoint with its stacked experts split, if another one, with tensors of these names, has them split.

    Raises:
        CheckpointError: as for `split_experts`.
    """
    split = any(f"{one.module}.0.{one.parts[0]}{WEIGHT}" in names for one in _stacks(source).values())
    return split_experts(source) if split else source


def _stacks(source: Source) -> dict[str, Stack]:
    found = ((entry.name, stack_of(entry)) for header in source.headers for entry in header.entries.values())
    return {name: stack for name, stack in found if stack is not None}


def stack_of(entry: Entry) -> Stack | None:
    """Return a stacked weight that `split_experts` knows by its name, or None if the tensor is none."""
    module, _, part = module_of(entry.name).rpartition(".")
    codes = entry.dtype in FP8 or entry.dtype in FLOATS
    if len(entry.shape) == 3 and codes and part in PARTS and module.rpartition(".")[2] == "experts":
        return Stack(entry, module, part)
    return None


def _oriented(source: Source, stacks: Mapping[str, Stack]) -> dict[str, Stack]:
    """Return the stacks with `Stack.transposed` set, from the hidden size in config.json.

    The hidden size is the number of inputs of gate and up, and of outputs of down. All tensors of a module have the
    same orientation, so that a tensor whose sides differ decides for the others.
    """
    sizes = sizes_of(source.config)
    hidden = sizes.get("hidden_size")
    if not isinstance(hidden, int):
        raise CheckpointError(f"split_experts needs hidden_size in the config.json of {source.path}, got none")
    present = {entry.name for entry in source.entries}
    possible: dict[str, set[bool]] = {}
    for stack in stacks.values():
        _, rows, cols = stack.entry.shape
        by_rows, by_columns = (rows, cols) if stack.part in BACK else (cols, rows)
        fits = {transposed for transposed, extent in ((False, by_rows), (True, by_columns)) if extent == hidden}
        left = possible.setdefault(stack.module, {False, True})
        left &= fits
        if not left:
            wanted = f"the hidden size, {hidden}, on the axis where the module's others have it"
            raise CheckpointError(f"{stack.entry.name} needs {wanted}, got {list(stack.entry.shape)}")
        bias = {f"{stack.module}.{stack.part}{suffix}" for suffix in ("_bias", ".bias")} & present
        if bias:
            raise CheckpointError(f"split_experts needs experts without biases, got {min(bias)}")
        if len(stack.parts) > 1 and str(sizes.get("model_type", "")) in ALTERNATE:
            raise CheckpointError(
                f"{stack.entry.name} needs gate before up, got {sizes['model_type']}, which interleaves them"
            )
    found = {}
    for name, stack in stacks.items():
        if len(possible[stack.module]) > 1:
            raise CheckpointError(f"{stack.module} needs shapes that tell rows from columns, got {hidden} of both")
        found[name] = stack._replace(transposed=possible[stack.module] == {True})
        if found[name].outputs % len(stack.parts):
            axis = "columns" if found[name].transposed else "rows"
            raise CheckpointError(f"{name} needs gate and up of equal {axis}, got {found[name].outputs} {axis}")
    return found


def _split(entry: Entry, stacks: Mapping[str, Stack]) -> Iterator[Entry]:
    """Yield the tensors that a stacked weight, or a scale of one, is split into; nothing for any other tensor."""
    stack = stacks.get(entry.name)
    if stack is not None:
        yield from _slices(entry, stack, WEIGHT)
        return
    for suffix, role, _ in STACKED:
        for weight in (entry.name.removesuffix(suffix), entry.name.removesuffix(f"{WEIGHT}{suffix}") + WEIGHT):
            stack = stacks.get(weight) if entry.name.endswith(suffix) else None
            if stack is not None:
                name = {"_scale_inv": ".weight_scale_inv", "_activation_scale": ".activation_scale"}.get(suffix)
                kept = name or (".weight_scale" if role == "scale" else ".input_scale")
                yield from _slices(entry, stack, kept)
                return


def _slices(entry: Entry, stack: Stack, suffix: str) -> Iterator[Entry]:
    """Yield every expert's part of a tensor; a part that experts, or gate and up, share is repeated for each."""
    experts, parts, shape = stack.entry.shape[0], stack.parts, entry.shape
    shared = math.prod(shape) == 1
    if not shared and shape[0] != experts:
        raise CheckpointError(f"{entry.name} needs one part for each of {experts} experts, got shape {list(shape)}")
    of_one = () if shared else shape[1:]
    nbytes = entry.nbytes if shared else entry.nbytes // experts
    turned = stack.transposed and len(of_one) == 2 and of_one != (stack.outputs, 1)
    pitch = of_one[1] if turned else 0
    of_one = of_one[::-1] if turned else of_one
    halves = 1 if math.prod(of_one) == 1 or (turned and of_one[0] == 1) else len(parts)
    if halves > 1 and of_one[0] % halves:
        raise CheckpointError(f"{entry.name} needs separate scales for gate and up, got shape {list(shape)}")
    if halves > 1 and suffix != WEIGHT and _straddles(stack, entry):
        raise CheckpointError(f"{entry.name} needs separate scales for gate and up, got a block across both")
    small = (of_one[0] // halves, *of_one[1:]) if of_one else ()
    step = (nbytes // max(math.prod(of_one), 1)) * small[0] if turned else nbytes // halves
    for expert in range(experts):
        for place, part in enumerate(parts):
            begin = entry.begin + (0 if shared else expert * nbytes) + (place * step if halves > 1 else 0)
            name = f"{stack.module}.{expert}.{part}{suffix}"
            yield Entry(name, entry.dtype, small, begin, nbytes // halves, pitch)


def _straddles(stack: Stack, scale: Entry) -> bool:
    """Return whether a block of rows covers rows of gate and of up, or the shape of the scale is not recognized."""
    how = grouping(stack.entry.name, stack.entry.shape, scale.shape, scale.dtype, None, {})
    if how is None:
        return True
    group = how.group_shape.cols if stack.transposed else how.group_shape.rows
    return group > 0 and stack.outputs // len(stack.parts) % group != 0
