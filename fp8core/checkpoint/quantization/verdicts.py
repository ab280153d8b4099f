"""Decides for every tensor whether it is quantized, kept, or refused, and why."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from fp8core.checkpoint.disk.files import FLOATS, Entry
from fp8core.checkpoint.formats import kinds
from fp8core.checkpoint.formats.naming import WEIGHT, module_of
from fp8core.checkpoint.formats.renames import Rules
from fp8core.checkpoint.formats.renaming import rules_for, split_into
from fp8core.checkpoint.formats.schemes import Scheme
from fp8core.checkpoint.formats.selection import Selection
from fp8core.checkpoint.reading.experts import stack_of
from fp8core.problem import BLOCK_128, PER_TENSOR

Status = Literal["quantized", "kept", "refused"]


class Verdict(NamedTuple):
    """Whether a tensor is quantized, kept or refused, and why.

    Examples:
        >>> from fp8core.checkpoint import Verdict
        >>> Verdict("up.weight", "BF16", (64, 32), "quantized", "a linear layer").module
        'up'
    """

    tensor: str
    dtype: str
    """The stored dtype, as safetensors names it."""
    shape: tuple[int, ...]
    status: Status
    reason: str
    """The kind of a quantized tensor, or why a tensor is kept or refused."""
    chosen: bool = False
    """Whether it is kept or refused because of the caller's arguments."""

    @property
    def module(self) -> str:
        """The module whose weight the tensor is, or the tensor's own name."""
        return module_of(self.tensor)


JOINED: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("wq", "wk", "wv"),
    ("w1", "w3"),
    ("query", "key", "value"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Layers that vLLM joins into one (its packed_modules_mapping), which is FP8 as a whole or not at all."""
EXPERTS: Final = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "linear_fc1", "linear_fc2")
"""Projections of experts; vLLM joins those of all experts of a module into one layer."""
TIED: Final = ("lm_head", "embed_out", "output", "output_layer", "head", "decoder")
"""Heads over the vocabulary, which may be tied to the embedding (tie_word_embeddings in config.json)."""


def verdicts_of(
    entries: Sequence[Entry],
    config: Mapping[str, Any],
    picked: Selection,
    scheme: Scheme,
    input_scales: Mapping[str, float],
) -> tuple[Verdict, ...]:
    """Return the verdict on every tensor of a checkpoint, in the order of the entries."""
    matrices = [module_of(entry.name) for entry in entries if entry.name.endswith(WEIGHT) and len(entry.shape) == 2]
    names = kinds.names_of(matrices, (entry.name for entry in entries), config)
    tied, rules = is_tied(config), rules_for(config)
    alone = [_verdict(entry, names, picked, scheme, tied, rules) for entry in entries]
    joined = _joined(alone, scheme)
    return tuple(_scaled(verdict, input_scales) for verdict in joined) if scheme.static else tuple(joined)


def _scaled(verdict: Verdict, input_scales: Mapping[str, float]) -> Verdict:
    """Return the verdict, or a refusal if the weight's activations have no scale."""
    if verdict.status != "quantized" or verdict.module in input_scales:
        return verdict
    reason = f"scheme static needs an input scale for {verdict.module}, got none: give one, or exclude the layer"
    return verdict._replace(status="refused", reason=reason, chosen=True)


def _verdict(
    entry: Entry, names: kinds.Names, picked: Selection, scheme: Scheme, tied: bool, rules: tuple[Rules, ...]
) -> Verdict:
    """Return the verdict on a tensor, regardless of layers that vLLM joins with its layer."""

    def verdict(status: Status, reason: str, *, chosen: bool = False) -> Verdict:
        return Verdict(entry.name, entry.dtype, entry.shape, status, reason, chosen)

    unable = _not_a_matrix(entry, names)
    if unable:
        return verdict("kept", unable)
    module = module_of(entry.name)
    kind = kinds.kind_of(module, entry.shape, names)
    excluded, included = picked.excluded_by(module), picked.included_by(module)
    if excluded is not None:
        return verdict("kept", f"excluded by '{excluded}'", chosen=True)
    if included is not None:
        wanted = f"'{included}' of include matches it"
        if not kind.able:
            return verdict("refused", f"{kind.name}: {kind.reason}, but {wanted}", chosen=True)
        if tied and kind is kinds.HEAD and module.rpartition(".")[2] in TIED:
            return verdict("refused", f"{kind.name}: tied to the embedding (config.json), but {wanted}", chosen=True)
    elif kind is not kinds.LINEAR:
        return verdict("kept", f"{kind.name}: {kind.reason}")
    elif picked.include is not None:
        return verdict("kept", "not included", chosen=True)
    cols = scheme.group_shape.cols
    if cols > 0 and entry.shape[1] % cols:
        name = "block" if scheme.group_shape == BLOCK_128 else "mxfp8"
        return verdict("kept", f"scheme {name} needs k in multiples of {cols}, got {entry.shape[1]}")
    count = split_into(entry.name, rules) if scheme.group_shape == PER_TENSOR else 1
    if count > 1:
        reason = (
            f"transformers splits it into {count} layers, but not its only scale: scheme channel has one for each row"
        )
        return verdict("kept", reason)
    return verdict("quantized", kind.name)


def _not_a_matrix(entry: Entry, names: kinds.Names) -> str:
    """Return why a tensor cannot be the weight of a linear layer; empty if it can."""
    beside_router = module_of(entry.name).rpartition(".")[0] in names.mixtures
    if len(entry.shape) == 3 and ("expert" in entry.name or beside_router):
        splits = " (split_experts splits it)" if stack_of(entry) is not None else ""
        return f"experts in one tensor of 3 axes: compressed-tensors has no layer for it{splits}"
    if len(entry.shape) != 2:
        return f"{len(entry.shape)}-D: {'a norm or bias' if len(entry.shape) < 2 else 'not a matrix'}"
    if entry.dtype not in FLOATS:
        return f"{entry.dtype}: scheme needs one of {', '.join(FLOATS)}"
    if not math.prod(entry.shape):
        return "no elements"
    if not entry.name.endswith(WEIGHT):
        return "not the .weight of a module"
    return ""


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json says that the head is tied to the embedding."""
    text = config.get("text_config")
    return bool(config.get("tie_word_embeddings") or (isinstance(text, dict) and text.get("tie_word_embeddings")))


def _joined(alone: list[Verdict], scheme: Scheme) -> Iterator[Verdict]:
    """Yield the verdicts, with the same verdict on all layers that vLLM joins."""
    changed: dict[str, Verdict] = {}
    for members in _groups(alone).values():
        changed |= _agreed(members, scheme)
    for verdict in alone:
        yield changed.get(verdict.tensor, verdict)


def _groups(alone: Iterable[Verdict]) -> dict[tuple[str, tuple[str, ...]], list[Verdict]]:
    """Return the verdicts on layers that vLLM joins, by their parent and the names of the parts."""
    found: dict[tuple[str, tuple[str, ...]], list[Verdict]] = {}
    for verdict in alone:
        if len(verdict.shape) != 2 or not verdict.tensor.endswith(WEIGHT):
            continue
        parent, _, name = verdict.module.rpartition(".")
        above, _, number = parent.rpartition(".")
        if number.isdigit() and above.rpartition(".")[2] == "experts" and name in EXPERTS:
            found.setdefault((above, EXPERTS), []).append(verdict)
            continue
        for parts in JOINED:
            if name in parts:
                found.setdefault((parent, parts), []).append(verdict)
    for (_, names), members in found.items():
        members.sort(key=lambda verdict: names.index(verdict.module.rpartition(".")[2]))
    return found


def _agreed(members: list[Verdict], scheme: Scheme) -> dict[str, Verdict]:
    """Return the verdicts that have to change so that all members of a joined layer have the same status."""
    quantized = [member for member in members if member.status == "quantized"]
    if not quantized or len(members) == 1:
        return {}
    parts = ", ".join(dict.fromkeys(member.module.rpartition(".")[2] for member in members))
    left = [member for member in members if member.status != "quantized"]
    if not left:
        ragged = next((m for m in members[:-1] if m.shape[0] % BLOCK_128.rows), None)
        if scheme.group_shape != BLOCK_128 or ragged is None or _of_experts(members):
            return {}
        reason = f"scheme block needs n in multiples of 128 where vLLM joins {parts}, got {ragged.shape[0]}"
        return {member.tensor: member._replace(status="kept", reason=reason) for member in members}
    culprit = left[0]
    if any(member.chosen for member in left):
        reason = f"vLLM joins {parts}, all or none of which have to be FP8, but {culprit.module} is {culprit.reason}"
        return {member.tensor: member._replace(status="refused", reason=reason, chosen=True) for member in quantized}
    reason = f"vLLM joins {parts}, and {culprit.module} is kept: {culprit.reason}"
    return {member.tensor: member._replace(status="kept", reason=reason) for member in quantized}


def _of_experts(members: list[Verdict]) -> bool:
    return ".experts." in members[0].module
