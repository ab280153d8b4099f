"""The models that are fitted to times: the modules that hold their constants, and the source lines of the constants."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from bench.choice_records import Record
from bench.fitting.samples import Sample, of_decode, of_fallbacks, of_library, of_tiles
from fp8core.kernels.gemm import fallback_cost
from fp8core.kernels.gemm.blaslt import ordering
from fp8core.kernels.gemm.sm90 import decode_cost, tiled_cost

DIGITS: Final = 4
BY_ROWS: Final = "ROWS", "SMALL_ROWS"
"""The constants of `decode_cost` for layouts with rows on the M side."""


class Constant(NamedTuple):
    """The value of a constant in a source, and a function that sets it, to a number or to a batch of numbers."""

    value: float
    put: Callable[[Any], None]


def globals_of(module: ModuleType, names: Iterable[str]) -> Iterator[Constant]:
    """Yield the constants of a module that have these names."""
    for name in names:
        yield Constant(vars(module)[name], lambda value, name=name: vars(module).__setitem__(name, value))  # type: ignore[misc]


def fields_of(read: Callable[[], Any], write: Callable[[Any], None]) -> Iterator[Constant]:
    """Yield the fields of a named tuple that are not 0."""
    for field in read()._fields:
        if getattr(read(), field):
            put = lambda value, field=field: write(read()._replace(**{field: value}))  # noqa: E731
            yield Constant(getattr(read(), field), put)


def of_costs() -> Iterator[Constant]:
    """Yield the constants of `tiled_cost`."""
    yield from globals_of(tiled_cost, tiled_cost.FITTED)
    for tile in tiled_cost.COSTS:
        yield from fields_of(
            lambda tile=tile: tiled_cost.COSTS[tile],  # type: ignore[misc]
            lambda cost, tile=tile: tiled_cost.COSTS.__setitem__(tile, cost),  # type: ignore[misc]
        )


def of_layouts() -> Iterator[Constant]:
    """Yield the constants of `decode_cost`."""
    yield from globals_of(decode_cost, decode_cost.FITTED)
    for name in BY_ROWS:
        yield from fields_of(
            lambda name=name: vars(decode_cost)[name],  # type: ignore[misc]
            lambda fitted, name=name: vars(decode_cost).__setitem__(name, fitted),  # type: ignore[misc]
        )
    for side in decode_cost.CHANNELS_FIRST:
        yield from fields_of(
            lambda side=side: decode_cost.CHANNELS_FIRST[side],  # type: ignore[misc]
            lambda fitted, side=side: decode_cost.CHANNELS_FIRST.__setitem__(side, fitted),  # type: ignore[misc]
        )


def number(value: float) -> str:
    """Return a number as text for a source, with `DIGITS` digits."""
    return re.sub(r"e([+-])0*", lambda sign: "e" + sign[1].strip("+"), f"{value:.{DIGITS}g}")


def numbers(values: Iterable[float]) -> str:
    """Return numbers as the arguments of a call."""
    return ", ".join(map(number, values))


def lines_of_globals(module: ModuleType, names: Iterable[str]) -> Iterator[str]:
    """Yield the source lines of a module's constants."""
    for name in names:
        yield f"{name}: Final = {number(vars(module)[name])}"


def lines_of_costs() -> Iterator[str]:
    """Yield the source lines of `tiled_cost`'s constants."""
    yield from lines_of_globals(tiled_cost, tiled_cost.FITTED)
    for tile, cost in tiled_cost.COSTS.items():
        fields = tile._asdict().items()
        given = [f"{value}" for name, value in fields if name not in tile._field_defaults]
        given += [f"{name}={value}" for name, value in fields if tile._field_defaults.get(name, value) != value]
        yield f"    Tile({', '.join(given)}): Cost({numbers(cost)}),"


def lines_of_layouts() -> Iterator[str]:
    """Yield the source lines of `decode_cost`'s constants."""
    yield from lines_of_globals(decode_cost, decode_cost.FITTED)
    for name in BY_ROWS:
        yield f"{name}: Final = Fitted({numbers(vars(decode_cost)[name])})"
    for side, fitted in decode_cost.CHANNELS_FIRST.items():
        yield f"    {side}: Fitted({numbers(fitted)}),"


class Model(NamedTuple):
    """A module, its constants, the samples that they are fitted to, and the constants' source lines."""

    module: ModuleType
    constants: Callable[[], Iterator[Constant]]
    samples: Callable[[Iterable[Record]], list[Sample]]
    lines: Callable[[], Iterator[str]]


MODELS: Final = {
    "ordering": Model(
        ordering,
        lambda: globals_of(ordering, ordering.FITTED),
        of_library,
        lambda: lines_of_globals(ordering, ordering.FITTED),
    ),
    "tiled_cost": Model(tiled_cost, of_costs, of_tiles, lines_of_costs),
    "decode_cost": Model(decode_cost, of_layouts, of_decode, lines_of_layouts),
    "fallback_cost": Model(
        fallback_cost,
        lambda: globals_of(fallback_cost, fallback_cost.FITTED),
        of_fallbacks,
        lambda: lines_of_globals(fallback_cost, fallback_cost.FITTED),
    ),
}


def put_in_place(model: Model) -> None:
    """Write the lines of a model into its source; each replaces the one line that begins in the same way.

    Raises:
        ValueError: The source has no such line, or several.
    """
    source = Path(str(model.module.__file__))
    text = source.read_text(encoding="utf-8")
    for line in model.lines():
        begin = line[: re.search(r"Final = |: (?=Cost|Fitted)", line).end()]  # type: ignore[union-attr]
        text, count = re.subn(rf"^{re.escape(begin)}.*$", lambda _, line=line: line, text, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"{source} has {count} lines that begin with {begin!r}")
    source.write_text(text, encoding="utf-8")


def rounded(value: float) -> float:
    """Return a number rounded to the `DIGITS` digits of a source."""
    return float(f"{value:.{DIGITS}g}")
