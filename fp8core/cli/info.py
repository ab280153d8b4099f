"""`fp8core info`: shows devices, versions, and what each device can do."""

import sys
from importlib import metadata
from typing import Final

from rich.markup import escape

import fp8core
from fp8core.cli.targets import UNPROVEN, proven
from fp8core.cli.terminal import console, line, table
from fp8core.runtime import device
from fp8core.target import HOST

PACKAGES: Final = (
    *("numpy", "ml_dtypes", "safetensors", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-7-0", "torch", "jax"),
    *("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
)


def info() -> None:
    """Show devices, library versions, what each device can do and why not, and the cache folder."""
    from fp8core.runtime import kernel_cache

    targets = [device.target(ordinal) for ordinal in range(device.count())]
    console.print(f"[bold]fp8core {fp8core.__version__}[/], Python {sys.version.split()[0]}", highlight=False)
    refusal = kernel_cache.refusal()
    unused = f", which is not used: {refusal}" if refusal else ""
    line(f"Compiled kernels are kept in {kernel_cache.folder()}{unused}\n")
    for target in targets:
        called = escape(device.name(target.device))
        console.print(f"[bold]{target}[/]: {called}, {target.multiprocessors} multiprocessors")
    if not targets:
        console.print("[bold]No GPU[/]: the host engine runs everything, on arrays of NumPy, torch and JAX.")
        line(f"  {device.why_none()}", style="dim")
    for target in targets or [HOST]:
        features = table(f"What {target if targets else 'the host'} can do", "feature", "able", "kernel, or why not")
        for feature, (able, reason) in fp8core.capabilities(target if targets else None).items():
            features.add_row(feature, "[green]yes[/]" if able else "[yellow]no[/]", escape(reason.replace("; ", "\n")))
        console.print(features)
        if not proven(target):
            where = " (docs/how-to/amd.md)" if target.platform == "hip" else ""
            console.print(f"[yellow]The kernels of {target} are {UNPROVEN}.[/]{where}", highlight=False)
    packages = table("Packages", "package", "version")
    for name in PACKAGES:
        version = _installed(name)
        if version is not None:
            packages.add_row(name, version)
    console.print(packages)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
