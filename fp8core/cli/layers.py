"""The options that name linear layers: a model, or shapes, and numbers of rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import typer

from fp8core.cli.arguments import bad_value
from fp8core.cli.numbers import whole_number
from fp8core.cli.terminal import count, line

if TYPE_CHECKING:
    from fp8core.checkpoint.shapes.linear import LayerShape

ModelPath = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL", help="A safetensors file or a folder of them: its linear layers are taken."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(metavar="MxNxK", help="Products m x n x k: 1,16,64x4096x4096 is three of them; repeatable."),
]
ROWS: Final = "1,16,64,256,1024,4096"
Rows = Annotated[
    str | None,
    typer.Option(metavar="M,M", help=f"Numbers of rows (m) to take for each layer of MODEL; by default {ROWS}."),
]
SchemeName = Annotated[
    Literal["channel", "tensor", "block"],
    typer.Option(help="One scale per output channel, tensor or 128x128 block; an FP8 model has its own."),
]
WideDtype = Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="The dtype of inputs and results.")]


class Selection(NamedTuple):
    """What the options name."""

    layers: "list[tuple[int, LayerShape]]"
    """Linear layers, each with a number of rows."""
    of_model: "dict[LayerShape, list[str]]"
    """The layers of the model, with the names of their weights."""
    rows: list[int]
    """The numbers of rows for the model."""

    def show(self, model: Path | None) -> None:
        """Print what the model has, if one was given."""
        if model is not None:
            weights = count(sum(map(len, self.of_model.values())), "weight")
            numbers = count(len(self.rows), "number")
            line(f"{model}: {weights} of {count(len(self.of_model), 'shape')}, {numbers} of rows each")


def layers_asked(model: Path | None, shapes: list[str] | None, rows: str | None, scheme: SchemeName) -> Selection:
    """Return the linear layers that the options name."""
    from fp8core.checkpoint.shapes.linear import LayerShape, layers_of

    if model is None and not shapes:
        raise bad_value("MODEL", "needs a model or --shapes, got neither")
    asked = [(m, LayerShape(n, k, scheme, weight_dtype=None)) for m, n, k in _shapes(shapes or [])]
    numbers = _numbers(ROWS if rows is None else rows, "--rows")
    if model is None and rows is not None:
        raise bad_value("--rows", "needs MODEL, as --shapes have numbers of rows, got none")
    layers: dict[LayerShape, list[str]] = {}
    if model is not None:
        layers = layers_of(model, scheme)
        asked += [(m, layer) for layer in layers for m in numbers]
    return Selection(asked, layers, numbers)


def _shapes(texts: list[str]) -> Iterator[tuple[int, int, int]]:
    """Yield the products that texts such as 1,16x4096x4096 describe."""
    for text in texts:
        parts = text.lower().split("x")
        if len(parts) != 3:
            raise bad_value("--shapes", f"needs m x n x k as in 1,16x4096x4096, got {text!r}")
        rows, channels, shared = (_numbers(part, "--shapes") for part in parts)
        yield from ((m, n, k) for n in channels for k in shared for m in rows)


def _numbers(text: str, option: str) -> list[int]:
    parts = text.replace(",", " ").split()
    numbers = [number for number in map(whole_number, parts) if number]
    if not parts or len(numbers) < len(parts):
        needed = "needs numbers from 1 to 2**31 - 1, separated by commas"
        raise bad_value(option, f"{needed}, got {text!r}")
    return numbers
