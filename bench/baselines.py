"""The baselines of fp8core's quantization; those that are not installed are left out.

`load(folder)` loads the kernels of vLLM and SGLang in a folder (vllm_C.so, sgl_ops.so). For measuring only.
"""

from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


class Result(NamedTuple):
    """The codes and scales that a baseline writes, in the shapes of the case."""

    data: torch.Tensor
    scale: torch.Tensor


Baseline = Callable[[torch.Tensor, Result], object]
"""Quantizes x into a result."""


def copy(bytes_: int) -> Callable[[], object]:
    """Return a copy between its own buffers that moves ``bytes_``: half of them are read, half are written.

    Large copies are rounded up to multiples of 64 KB or 2 MB: at other sizes the driver's copy is slower by half.
    """
    piece = 1 << 21 if bytes_ >= 1 << 26 else 65_536 if bytes_ >= 1 << 21 else 16
    source, target = (
        torch.empty(-(-bytes_ // (2 * piece)) * piece, dtype=torch.uint8, device="cuda") for _ in range(2)
    )
    source.random_()
    return lambda: target.copy_(source)


class Loaded(NamedTuple):
    """The namespaces of the operators that were loaded, or None."""

    vllm: Any
    sgl: Any

    def quantizers(self, mode: str) -> Iterator[tuple[str, Baseline]]:
        """Yield the name and the baseline of each library that supports ``mode``."""
        if self.vllm is not None:
            yield from _vllm(self.vllm, mode)
        if self.sgl is not None:
            yield from _sgl(self.sgl, mode)


def load(folder: Path | None) -> Loaded:
    """Load the libraries in ``folder``; one that is absent is None."""

    def library(file: str, namespace: str) -> Any:
        if folder is None or not (folder / file).exists():
            return None
        torch.ops.load_library(str(folder / file))
        return getattr(torch.ops, namespace)

    return Loaded(library("vllm_C.so", "_C"), library("sgl_ops.so", "sgl_kernel"))


def _vllm(ops: Any, mode: str) -> Iterator[tuple[str, Baseline]]:
    if mode == "static":
        yield "vllm", lambda x, r: ops.static_scaled_fp8_quant(r.data, x, r.scale)
    if mode == "tensor":
        yield "vllm", lambda x, r: ops.dynamic_scaled_fp8_quant(r.data, x, r.scale)
    if mode == "token":
        yield "vllm", lambda x, r: ops.dynamic_per_token_scaled_fp8_quant(r.data, x, r.scale, None)
    if mode == "1x128":
        yield (
            "vllm",
            lambda x, r: ops.per_token_group_fp8_quant(
                x, r.data, r.scale, 128, 1e-10, -LARGEST, LARGEST, False, False, False
            ),
        )


def _sgl(ops: Any, mode: str) -> Iterator[tuple[str, Baseline]]:
    if mode == "token":
        yield "sgl", lambda x, r: ops.sgl_per_token_quant_fp8(x, r.data, r.scale)
    if mode == "1x128":
        yield (
            "sgl",
            lambda x, r: ops.sgl_per_token_group_quant_8bit(x, r.data, r.scale, 128, 1e-10, -LARGEST, LARGEST, False),
        )


def triton(mode: str, cols: int) -> Iterator[tuple[str, Baseline]]:
    """Yield the Triton kernel, if Triton is installed and the kernel supports rows of ``cols`` elements."""
    if util.find_spec("triton") is None:
        return
    from bench.triton_kernels import QUANTIZERS

    if mode in QUANTIZERS and (cols % 128 == 0 or not mode.startswith("1x128")):
        yield "triton", QUANTIZERS[mode]


def scales(x: torch.Tensor, mode: str) -> torch.Tensor:
    """Return the scales of section 3 of the specification for ``x`` of finite numbers, as a matrix."""
    rows, cols = x.shape
    wide = x.float().abs()
    largest = torch.full((), LARGEST, device=x.device)
    if mode in ("static", "tensor"):
        return (wide.max() / largest).clamp_min(2.0**-126).reshape(1, 1)
    if mode == "token":
        return (wide.amax(1, keepdim=True) / largest).clamp_min(1.0 / (LARGEST * 512))
    height = 128 if mode == "128x128" else 1
    padded = torch.nn.functional.pad(wide, (0, -cols % 128, 0, -rows % height))
    blocks = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // 128, 128)
    return blocks.amax((1, 3)).clamp_min(1e-10) / largest


def codes(x: torch.Tensor, scale: torch.Tensor, mode: str) -> torch.Tensor:
    """Return the codes of ``x``, computed by PyTorch one operation at a time: the bit-exact oracle."""
    rows, cols = x.shape
    if mode in ("static", "tensor"):
        values = x.float() * (torch.ones((), device=x.device) / scale)
    else:
        height, width = {"token": (1, cols), "1x128": (1, 128), "128x128": (128, 128)}[mode]
        spread = scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols]
        values = x.float() / spread
    return values.clamp(-LARGEST, LARGEST).to(FP8)


def compiled(mode: str) -> Baseline:
    """Return the oracle, fused by torch.compile."""

    def quantize(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = scale if mode == "static" else scales(x, mode)
        return codes(x, found, mode), found

    fused = torch.compile(quantize, dynamic=False)
    return lambda x, r: fused(x, r.scale)
