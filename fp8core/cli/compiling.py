"""`fp8core compile`: compiles the kernels of a model's layers beforehand, also on a machine without a GPU."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8core.cli.arguments import bad_value
from fp8core.cli.layers import ModelPath, Rows, SchemeName, Shapes, WideDtype, layers_asked
from fp8core.cli.targets import GPUS, UNPROVEN, proven, target_named
from fp8core.cli.terminal import Steps, count, line, warnings_as_lines

if TYPE_CHECKING:
    from fp8core.checkpoint.shapes.linear import LayerShape
    from fp8core.checkpoint.shapes.mixtures import MixtureShape
    from fp8core.target import Target


def compile(  # noqa: A001 - the name of the command
    model: ModelPath = None,
    shapes: Shapes = None,
    rows: Rows = None,
    scheme: SchemeName = "channel",
    dtype: WideDtype = "bfloat16",
    target: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help=f"The GPU: {', '.join(GPUS)}; by default this machine's."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes that compile at a time; by default all cores.")
    ] = None,
) -> None:
    """Compile the kernels of a model's layers and experts beforehand, for a GPU that need not be in this machine."""
    from fp8core.checkpoint.shapes.kernels import kernels_of
    from fp8core.errors import BackendError
    from fp8core.runtime import ahead, kernel_cache

    asked = layers_asked(model, shapes, rows, scheme)
    place = _target(target)
    ahead.check_compiler(place)
    refusal = kernel_cache.refusal()
    if refusal is not None:
        raise BackendError(f"compiled kernels cannot be kept in {kernel_cache.folder()}: {refusal}")
    asked.show(model)
    mixtures = [(m, mixture) for mixture in _mixtures(model, asked.of_model) for m in asked.rows]
    with warnings_as_lines():
        kernels = kernels_of(asked.layers, dtype, place, mixtures)
        wanted = ahead.missing(kernels)
    refusal = kernel_cache.refusal_to_write() if wanted else None
    if refusal is not None:
        lost = f"{len(wanted):,} of {count(len(kernels), 'compiled kernel')}"
        raise BackendError(f"{lost} cannot be kept in {kernel_cache.folder()}: {refusal}")
    began = time.monotonic()
    with Steps("compiling", len(wanted)) as steps:
        ahead.compile_all(wanted, jobs, steps.show)
    named, folder = target or place, kernel_cache.folder()
    if wanted:
        there = f", {len(kernels) - len(wanted):,} were there" if len(wanted) < len(kernels) else ""
        seconds = time.monotonic() - began
        line(f"{count(len(wanted), 'kernel')} for {named} compiled in {seconds:.1f} s{there}: {folder}")
    else:
        line(f"{count(len(kernels), 'kernel')} for {named}, all compiled already: {folder}")
    if not proven(place):
        line(f"The kernels of {named} are {UNPROVEN}.", style="yellow")


def _mixtures(model: Path | None, layers: "dict[LayerShape, list[str]]") -> "dict[MixtureShape, list[str]]":
    """Return the mixtures of experts among the layers of a model; print how many it has."""
    from fp8core.checkpoint.disk.source import config_of
    from fp8core.checkpoint.shapes.mixtures import mixtures_of

    if model is None:
        return {}
    with warnings_as_lines():
        found = mixtures_of(layers, config_of(model))
    if found:
        mixtures = count(sum(map(len, found.values())), "mixture")
        line(f"{model}: {mixtures} of experts of {count(len(found), 'shape')}, with the same numbers of tokens")
    return found


def _target(name: str | None) -> "Target":
    from fp8core.ops.targets import target_of, targets_and_models
    from fp8core.runtime import device

    if name is not None and name in GPUS:
        return target_named(name)
    if name is None and device.count():
        return target_of(None)
    got = f"got {name!r}" if name else f"as there is no GPU here: {device.why_none()}"
    raise bad_value("--target", f"needs {targets_and_models(gpus=True)}, {got}")
