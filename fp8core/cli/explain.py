"""`fp8core explain`: shows which kernel a product uses, on any device."""

from typing import TYPE_CHECKING, Annotated, Final, Literal, get_args

import typer
from rich.markup import escape
from rich.table import Table

from fp8core.cli.targets import GPUS, UNPROVEN, proven, target_named
from fp8core.cli.terminal import console, table
from fp8core.dtypes import Fp8Name
from fp8core.target import native_e4m3
from fp8core.types import ActivationName, WideName

if TYPE_CHECKING:
    from fp8core.table import Explanation

FORMATS: Final = ", ".join(get_args(Fp8Name))
Out = Literal["bfloat16", "float16", "float32", Fp8Name]
STYLES: Final = {
    "chosen": "bold green",
    "able": "green",
    "not preferred": "green",
    "unable": "dim",
    "unknown": "yellow",
}


def explain(
    m: Annotated[int, typer.Argument(min=1, metavar="M", help="Rows of a: tokens.")],
    n: Annotated[int, typer.Argument(min=1, metavar="N", help="Output channels.")],
    k: Annotated[int, typer.Argument(min=1, metavar="K", help="The axis that a and b share: input channels.")],
    a: Annotated[
        Fp8Name | None,
        typer.Option(metavar="FORMAT", help=f"The format of a: {FORMATS}; by default the device's E4M3."),
    ] = None,
    b: Annotated[Fp8Name | None, typer.Option(metavar="FORMAT", help="The format of b; see --a.")] = None,
    out: Annotated[
        Out, typer.Option(metavar="DTYPE", help="The dtype of the result: bfloat16, float16, float32 or a format.")
    ] = "bfloat16",
    scale_a: Annotated[
        Literal["tensor", "row", "group"], typer.Option(help="One scale of a per tensor, token or 1x128.")
    ] = "row",
    scale_b: Annotated[
        Literal["tensor", "row", "group", "block"],
        typer.Option(help="One scale of b per tensor, output channel, 1x128 or 128x128."),
    ] = "row",
    bias: Annotated[WideName | None, typer.Option(help="The dtype of a bias; by default there is none.")] = None,
    activation: Annotated[
        ActivationName | None, typer.Option(help="The activation of the result; by default none.")
    ] = None,
    beta: Annotated[
        float, typer.Option(metavar="NUMBER", help="Multiply the result's old contents by this and add them.")
    ] = 0,
    amax: Annotated[bool, typer.Option("--amax", help="Also request the largest magnitude of the result.")] = False,
    no_fast_accum: Annotated[
        bool, typer.Option("--no-fast-accum", help="Forbid accumulation with fewer bits.")
    ] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Give a row the same bits for every M.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help=f"The device: host, {', '.join(GPUS)}; by default this machine's."),
    ] = None,
) -> None:
    """Show which kernel a scaled matrix product would use, and why not the others. Nothing is run."""
    from fp8core.core.explaining import ArraySpec
    from fp8core.ops.explain import explain_product
    from fp8core.ops.targets import target_of

    place = target_of(None) if target is None else target_named(target)
    native = native_e4m3(place)
    explanation = explain_product(
        *(m, n, k),
        a=a or native,
        b=b or native,
        out_dtype=out,
        scale_a=scale_a,
        scale_b=scale_b,
        target=place,
        bias=ArraySpec((n,), bias) if bias else None,
        activation=activation,
        beta=beta,
        out=ArraySpec((m, n), out) if beta else None,
        amax=ArraySpec((1,), "float32") if amax else None,
        use_fast_accum=not no_fast_accum,
        batch_invariant=batch_invariant,
    )
    options = {
        f"bias {bias}": bias,
        str(activation): activation,
        f"beta {beta:g}": beta,
        "amax": amax,
        "no fast accumulation": no_fast_accum,
        "batch invariant": batch_invariant,
    }
    how = ", ".join((f"scales per {scale_a} and {scale_b}", *(words for words, there in options.items() if there)))
    operands = f"{a or native} x {b or native} -> {out}, {how}"
    console.print(f"[bold]{m} x {n} x {k}[/] on {target or place}: {operands}", highlight=False)
    console.print(verdicts(explanation, str(place), target or str(place)))
    if _doubtful(explanation):
        console.print(
            "* unless an unknown kernel is able on the device and comes first or is estimated faster", highlight=False
        )
    if explanation.chosen is None:
        able = {verdict.status for verdict in explanation.verdicts} - {"unable"}
        doubt = ", unless an unknown one is able on the device" if able else ""
        console.print(f"No kernel is able: the call raises UnsupportedProblemError{doubt}.", highlight=False)
    if not proven(place):
        console.print(f"[yellow]The kernels of {target or place} are {UNPROVEN}.[/]", highlight=False)


def verdicts(explanation: "Explanation", place: str, shown: str) -> Table:
    """Return an explanation as a table, in which ``shown`` replaces the target's name ``place``.

    A chosen kernel is marked if a kernel that only a library on the device can judge might be chosen instead.
    """
    made = table(None, "kernel", "verdict", "reason")
    for verdict in explanation.verdicts:
        mark = " *" if verdict.status == "chosen" and _doubtful(explanation) else ""
        cells = verdict.kernel, verdict.status + mark, verdict.reason.replace(place, shown)
        made.add_row(*map(escape, cells), style=STYLES[verdict.status])
    return made


def _doubtful(explanation: "Explanation") -> bool:
    """Return whether an unknown kernel might be chosen on the device: it comes first, or estimates are compared."""
    statuses = [verdict.status for verdict in explanation.verdicts]
    if "chosen" not in statuses:
        return False
    at = statuses.index("chosen")
    compared = explanation.verdicts[at].reason.startswith("estimated")
    return "unknown" in (statuses if compared else statuses[:at])
