"""Times chains of FP8 layers under torch.compile(mode="reduce-overhead"): fp8core's layers, and torch._scaled_mm.

    python -m bench.torch_chain [--m 1 16 128]

Both chains have the same codes and scales, per token x per channel, and more weights than L2 holds. torch's chain
quantizes its inputs in torch, which inductor compiles to kernels, and multiplies by `torch._scaled_mm`. The times of
calls include the host's part.
"""

import argparse
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fp8core.torch
from bench import timing
from bench.needs import require_gpu
from fp8core.timing import interleaved

WIDTH: Final = 4096
LAYERS: Final = 18
DEVICE: Final = "cuda"
TURNS: Final = 15
TURN_MS: Final = 10.0
MAXIMUM: Final = 448.0


class Scaled(nn.Module):
    """A linear layer with the weight and scale of an fp8core layer, in torch alone."""

    def __init__(self, layer: fp8core.torch.Linear) -> None:
        super().__init__()
        self.weight, self.scale = layer.weight, nn.Parameter(layer.weight_scale.detach().view(1, -1), False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T`` for ``[m, k]``."""
        scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-10) / MAXIMUM
        q = (x.float() / scale).clamp(-MAXIMUM, MAXIMUM).to(torch.float8_e4m3fn)
        return torch._scaled_mm(
            q, self.weight.t(), scale, self.scale, out_dtype=torch.bfloat16, use_fast_accum=DEVICE == "cuda"
        )


def chains() -> dict[str, nn.Module]:
    """Return the two chains, which share their weights."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)]
    ours = nn.Sequential(*layers)
    fp8core.torch.quantize_model_(ours)
    theirs = nn.Sequential(*[Scaled(layer) for layer in ours if isinstance(layer, fp8core.torch.Linear)])
    return {"fp8core": ours, "torch._scaled_mm": theirs}


def compiled(model: nn.Module, x: Tensor) -> Any:
    """Return a call of the compiled model, whose CUDA graph is recorded already."""
    run = torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead")

    def call() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        made: Tensor = run(x)
        return made

    for _ in range(4):
        call()
    return call


def main() -> None:
    """Time the chains, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", nargs="+", type=int, default=(1, 16, 128))
    chosen = parser.parse_args()
    require_gpu(parser)
    models = chains()
    table = Table("m", *models, "ratio", title=f"us a layer of {WIDTH}x{WIDTH}, {torch.cuda.get_device_name()}")
    for m in chosen.m:
        torch._dynamo.reset()
        with torch.inference_mode():
            x = torch.randn(m, WIDTH, device=DEVICE, dtype=torch.bfloat16)
            runs = {name: compiled(model, x) for name, model in models.items()}
            found = interleaved(runs, timing.elapsed, TURNS, TURN_MS)
        us = [timing.spread([1e3 * ms / LAYERS for ms in times]).median for times in found.values()]
        table.add_row(str(m), *(f"{one:.2f}" for one in us), f"{us[0] / us[1]:.3f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
