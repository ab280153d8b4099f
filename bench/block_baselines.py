"""Baselines for products with 1x128 x 128x128 scales: packages in the subfolder ``site`` of the baselines' folder.

They are DeepGEMM (package deep_gemm), SGLang's fork of it (sgl_deep_gemm) and FlashInfer's product for sm_90
(flashinfer_gemm), if the package exists and can be imported. For measuring only.
"""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

Call = Callable[[Any], torch.Tensor]
"""Takes the operands of `bench.decode`; the scales are [m, k / 128], m-major, and [n / 128, k / 128]."""
ROWS: Final = 4
"""FlashInfer requires scales of a with a multiple of this number of rows (16 bytes)."""


def _deep_gemm(module: Any) -> Call:
    def run(o: Any) -> torch.Tensor:
        module.fp8_gemm_nt((o.a, o.scale_a), (o.weight, o.scale_b), o.out)
        return o.out

    return run


def _flashinfer(module: Any) -> Call:
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def padded(scale: torch.Tensor) -> torch.Tensor:
        """Return the scales in the kernel's layout. The last ones are cached, as a layer would store them so."""
        if not kept or kept[0][0] is not scale:
            kept[:] = [(scale, torch.nn.functional.pad(scale.T, (0, -scale.shape[0] % ROWS)).contiguous())]
        return kept[0][1]

    def run(o: Any) -> torch.Tensor:
        module.gemm(o.a, o.weight, padded(o.scale_a), o.scale_b, o.out)
        return o.out

    return run


PACKAGES: Final = {
    "deep_gemm": ("deep_gemm", _deep_gemm),
    "sgl_deep_gemm": ("sgl_deep_gemm", _deep_gemm),
    "flashinfer": ("flashinfer_gemm", _flashinfer),
}


def module(folder: Path, package: str) -> Any:
    """Return a package in the folder's ``site``; None, with the reason printed, if it is absent or not importable."""
    site = folder / "site"
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))
    if not (site / package).is_dir():
        return None
    try:
        return import_module(package)
    except (ImportError, OSError, RuntimeError) as error:
        print(f"{package}: left out, {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def load(folder: Path) -> Iterator[tuple[str, Call]]:
    """Yield the name and the product of each package in the folder's ``site``; print why others cannot be imported."""
    for name, (package, call) in PACKAGES.items():
        found = module(folder, package)
        if found is not None:
            yield name, call(found)
