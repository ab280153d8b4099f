"""Splits stacked experts into one tensor per expert and projection: the same bytes under other names.

``experts.gate_up_proj`` [E, 2 n, k] becomes ``experts.0.gate_proj.weight`` [n, k], ``experts.0.up_proj.weight``, and so
on. llm-compressor writes mixtures with these names, and readers of compressed-tensors look for scales under them. Gate
and up are the halves of the rows. Experts stored [in, out], such as Llama 4's, are read by columns; they are recognized
by the hidden size in config.json.
"""

import math
from collections.abc import Container, Iterator, Mapping
from typing import Final, NamedTuple

from fp8core.checkpoint.disk.files import FLOATS, FP8, Entry
from fp8core.checkpoint.disk.source import Source
from fp8core.checkpoint.formats.granularity import grouping
from fp8core.checkpoint.formats.kinds import sizes_of
from fp8core.checkpoint.formats.naming import WEIGHT, module_of, namings
from fp8core.errors import CheckpointError

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    **{name: (name,) for name in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")},
}
"""By the last part of a stacked tensor's name: the projections that it holds for each expert, in the order of rows."""
BACK: Final = ("down_proj", "w2")
"""The projections whose outputs have the model's hidden size; in the others, the inputs have it."""
OF_ONE_EXPERT: Final[Mapping[str, str]] = {
    "_scale_inv": ".weight_scale_inv",
    "_scale": ".weight_scale",
    "_weight_scale": ".weight_scale",
    "_activation_scale": ".activation_scale",
    "_input_scale": ".input_scale",
}
"""By the suffix of a tensor beside a stacked weight: its suffix beside the weight of one expert; others keep theirs."""
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
    split = _new_suffixes(stacks, origins)
    for header in source.headers:
        entries: dict[str, Entry] = {}
        for entry in header.entries.values():
            made = list(_parts(entry, *split[entry.name])) if entry.name in split else []
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
    present = {entry.name for entry in source.entries}
    possible: dict[str, set[bool]] = {}
    for stack in stacks.values():
        sizes = sizes_of(source.config, stack.module)
        hidden = sizes.get("hidden_size")
        if not isinstance(hidden, int):
            raise CheckpointError(f"split_experts needs hidden_size in the config.json of {source.path}, got none")
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
            raise CheckpointError(
                f"{stack.module} needs shapes that tell rows from columns, got {list(stack.entry.shape[1:])}"
            )
        found[name] = stack._replace(transposed=possible[stack.module] == {True})
        if found[name].outputs % len(stack.parts):
            axis = "columns" if found[name].transposed else "rows"
            raise CheckpointError(f"{name} needs gate and up of equal {axis}, got {found[name].outputs} {axis}")
    return found


def _new_suffixes(stacks: Mapping[str, Stack], present: Container[str]) -> dict[str, tuple[Stack, str]]:
    """Return, by tensor that is split: the stack that it belongs to, and the suffix of the names of its parts."""
    found: dict[str, tuple[Stack, str]] = {}
    for weight, stack in stacks.items():
        found[weight] = stack, WEIGHT
        for suffix, role, _ in namings(weight):
            name = module_of(weight) + suffix
            if role != "marker" and name in present:
                found[name] = stack, OF_ONE_EXPERT.get(suffix, suffix)
    return found


def _parts(entry: Entry, stack: Stack, suffix: str) -> Iterator[Entry]:
    """Yield every expert's part of a tensor; a part that experts, or gate and up, share is repeated for each."""
    experts, projections = stack.entry.shape[0], stack.parts
    for_all = math.prod(entry.shape) == 1
    if not for_all and entry.shape[0] != experts:
        got = f"shape {list(entry.shape)}"
        raise CheckpointError(f"{entry.name} needs one part for each of {experts} experts, got {got}")
    shape = () if for_all else entry.shape[1:]  # that of one expert
    nbytes = entry.nbytes if for_all else entry.nbytes // experts
    itemsize = nbytes // max(math.prod(shape), 1)
    # Matrices stored [in, out] are read by columns; a scale [out, 1] has its outputs along rows all the same.
    by_columns = stack.transposed and len(shape) == 2 and shape != (stack.outputs, 1)
    pitch = shape[1] if by_columns else 0
    if by_columns:
        shape = shape[::-1]
    shared = math.prod(shape) == 1 or (by_columns and shape[0] == 1)  # by the projections
    number = 1 if shared else len(projections)
    if number > 1:
        if shape[0] % number:
            got = f"shape {list(entry.shape)}"
            raise CheckpointError(f"{entry.name} needs separate scales for gate and up, got {got}")
        if suffix != WEIGHT and _straddles(stack, entry):
            raise CheckpointError(f"{entry.name} needs separate scales for gate and up, got a block across both")
        shape = (shape[0] // number, *shape[1:])
    apart = shape[0] * itemsize if by_columns else nbytes // number  # bytes from a projection to the next
    for expert in range(experts):
        for place, projection in enumerate(projections):
            begin = entry.begin + (0 if for_all else expert * nbytes) + (0 if shared else place * apart)
            name = f"{stack.module}.{expert}.{projection}{suffix}"
            yield Entry(name, entry.dtype, shape, begin, nbytes // number, pitch)


def _straddles(stack: Stack, scale: Entry) -> bool:
    """Return whether a block of rows covers rows of gate and of up, or the shape of the scale is not recognized."""
    how = grouping(stack.entry.name, stack.entry.shape, scale.shape, None, {})
    if how is None:
        return True
    group = how.group_shape.cols if stack.transposed else how.group_shape.rows
    return group > 0 and stack.outputs // len(stack.parts) % group != 0
