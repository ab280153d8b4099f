"""The shapes of a checkpoint's mixtures of experts that can run in grouped products, for compiling."""

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from fp8core.checkpoint.formats.kinds import sizes_of
from fp8core.checkpoint.formats.naming import module_of
from fp8core.checkpoint.reading.experts import BACK, PARTS
from fp8core.checkpoint.shapes.linear import LayerShape
from fp8core.kernels.grouped.args import MOST_GROUPS
from fp8core.problem import BLOCK

EXPERTS: Final = ".experts"
EACH: Final = "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"
"""The names that config.json may have for the number of experts of a token, in all models of transformers 5.24."""


class MixtureShape(NamedTuple):
    """A mixture of experts: how many there are, how many a token has, and the extents and scheme of their layers.

    Examples:
        >>> from fp8core.checkpoint.shapes.mixtures import MixtureShape
        >>> MixtureShape(experts=128, each=8, hidden=2048, inner=768, scheme="block").gated
        True
    """

    experts: int
    each: int
    """The experts of a token."""
    hidden: int
    inner: int
    scheme: Literal["channel", "block"]
    """That of grouped products, in which a scale per tensor is repeated for each channel."""
    gated: bool = True
    """Whether an expert has a gate beside its up projection."""
    static: bool = False
    """Whether the scales of inputs are stored."""
    weight_dtype: str | None = "float8_e4m3fn"
    """The FP8 format of the weights."""


def mixtures_of(layers: Mapping[LayerShape, Sequence[str]], config: Mapping[str, Any]) -> dict[MixtureShape, list[str]]:
    """Return the distinct mixtures among layers, each with the names of its modules.

    Experts are found whose layers can be grouped: those of a projection are alike, without bias, and no block of
    128x128 covers rows of gate and of up.

    Args:
        layers: the layers of a checkpoint with the names of their weights, as `layers_of` returns them.
        config: its config.json, which has the number of experts of a token, maybe in a nested configuration.

    Warns:
        RuntimeWarning: there are such experts, and the config does not say how many of them a token has. They are left
            out.

    Examples:
        >>> from fp8core.checkpoint.shapes.linear import LayerShape
        >>> from fp8core.checkpoint.shapes.mixtures import mixtures_of
        >>> names = [f"mlp.experts.{i}.{name}_proj.weight" for i in range(8) for name in ("gate", "up", "down")]
        >>> found = mixtures_of({LayerShape(256, 256, "channel"): names}, {"num_experts_per_tok": 2})
        >>> [(shape.experts, shape.inner, modules) for shape, modules in found.items()]
        [(8, 256, ['mlp.experts'])]
    """
    modules: dict[str, dict[str, list[LayerShape]]] = defaultdict(lambda: defaultdict(list))
    for shape, names in layers.items():
        for name in names:
            before, found, expert = module_of(name).rpartition(f"{EXPERTS}.")
            number, _, projection = expert.partition(".")
            if found and number.isdecimal() and projection in PARTS:
                modules[before + EXPERTS][projection].append(shape)
    mixtures: dict[MixtureShape, list[str]] = {}
    unknown: dict[str, object] = {}
    for module, projections in modules.items():
        up = _up_of_alike(projections)
        if up is None:
            continue
        given = _given(config, module)
        each = _number(given)
        if each is None:
            unknown[module] = given
            continue
        scheme: Literal["channel", "block"] = "block" if up.scheme == "block" else "channel"
        experts, gated = len(next(iter(projections.values()))), len(projections) == 3
        mixture = MixtureShape(experts, each, up.k, up.n, scheme, gated, up.static, up.weight_dtype)
        mixtures.setdefault(mixture, []).append(module)
    if unknown:
        module, given = next(iter(unknown.items()))
        others = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        needed = f"one number for all layers as {', '.join(EACH[:-1])} or {EACH[-1]}"
        got = "none" if given is None else repr(given)
        text = f"config.json needs {needed}, got {got}: the grouped products of {module}{others} are left out"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return mixtures


def _given(config: Mapping[str, Any], module: str) -> object:
    """Return what a config says about the number of experts that a token has in a module, or None."""
    sizes = sizes_of(config, module)
    return next((sizes[name] for name in EACH if sizes.get(name) is not None), None)


def _number(given: object) -> int | None:
    """Return the number of experts of a token, or None if what a config says is no number, or several."""
    numbers = given if isinstance(given, list) else [given]  # Hunyuan's has one for each layer
    (each, *others) = numbers or [None]
    return each if type(each) is int and each > 0 and all(other == each for other in others) else None


def _up_of_alike(projections: Mapping[str, Sequence[LayerShape]]) -> LayerShape | None:
    """Return the up projection of experts with these layers by projection; None if they cannot be grouped."""
    first = [shapes for name, shapes in projections.items() if name not in BACK]
    last = [shapes for name, shapes in projections.items() if name in BACK]
    counts = {len(shapes) for shapes in projections.values()}
    if len(first) not in (1, 2) or len(last) != 1 or len(counts) != 1 or max(counts) > MOST_GROUPS:
        return None
    up, down = _only(shape for shapes in first for shape in shapes), _only(last[0])
    if up is None or down is None:
        return None
    across = up.scheme == "block" and up.n % BLOCK
    if down != up._replace(n=up.k, k=up.n) or up.bias or (len(first) == 2 and across):
        return None
    return up


def _only(shapes: Iterable[LayerShape]) -> LayerShape | None:
    """Return the shape that all have; None if there are several."""
    found = set(shapes)
    return found.pop() if len(found) == 1 else None
