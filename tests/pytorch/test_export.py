"""torch.export and ahead-of-time inductor: other rows than those exported with, after saving and loading."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

import fp8core  # noqa: E402 - after the skip
from fp8core import GROUP_128, w8a8  # noqa: E402
from fp8core.torch import quantize_model_  # noqa: E402
from pytorch.tensors import K, N, bits, stacked, wide  # noqa: E402


class Step(torch.nn.Module):
    """A layer of each scheme, a producer that writes its residual, and functions."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.Parameter(wide(K, seed=2), requires_grad=False)
        self.layers = torch.nn.ModuleDict()
        for seed, scheme in enumerate(("channel", "tensor", "block")):
            layer = torch.nn.Linear(K, K, dtype=torch.bfloat16)
            with torch.no_grad():
                layer.weight.copy_(wide(K, K, seed=seed))
                layer.bias.copy_(wide(K, seed=seed))
            self.layers[scheme] = layer
            quantize_model_(self.layers, include=[scheme], scheme=scheme)
        for name, part in zip(("codes", "scales"), stacked(GROUP_128, n=K), strict=True):
            self.register_buffer(name, part)

    def forward(self, x):
        total = self.layers["channel"](x)
        q = fp8core.rms_norm_quant(x, self.norm, 1e-6, residual=total, group_shape=GROUP_128, scale_layout="mn")
        y = self.layers["block"](q) + total
        choices = torch.arange(2 * x.shape[0], device=x.device).view(x.shape[0], 2) * 7 % (len(self.codes) + 1)
        rows, offs, inverse = fp8core.moe_permute(
            fp8core.quantize(y, group_shape=GROUP_128), choices, len(self.codes)
        )  # the last choice is no expert's
        y = fp8core.grouped_scaled_mm_nt(rows, self.codes, scale_b=self.scales, offs=offs)
        y = fp8core.moe_unpermute(y, inverse, y.new_ones(x.shape[0], 2))
        return self.layers["tensor"](y), fp8core.dequantize(fp8core.quantize(y, scale=0.05), dtype=torch.bfloat16)


def exported(strict, made):
    rows = torch.export.Dim("rows", min=2, max=4096)
    return torch.export.export(made, (wide(5, K),), dynamic_shapes=({0: rows},), strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_other_rows(strict, tmp_path):
    made = Step()
    program = exported(strict, made)
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {
        "fp8core.grouped_scaled_mm_nt.default",
        "fp8core.linear.default",
        "fp8core.moe_permute.scale",
        "fp8core.moe_unpermute.default",
        "fp8core.rms_norm_quant.residual",
        "fp8core.quantize.static",
    } <= names
    torch.export.save(program, tmp_path / "step.pt2")
    loaded = torch.export.load(tmp_path / "step.pt2")
    for m in (2, 5, 17):
        assert bits(program.module()(wide(m, K))) == bits(made(wide(m, K)))
        assert bits(loaded.module()(wide(m, K))) == bits(made(wide(m, K)))


@pytest.mark.parametrize("strict", [False, True])
def test_layers_of_an_exported_program_pass_no_gradients(strict):
    made = Step().layers["channel"].requires_grad_(False)
    x = wide(5, K).requires_grad_()
    program = torch.export.export(made, (x,), strict=strict)
    assert made(x).requires_grad
    assert not program.module()(x).requires_grad


AOT = """
    import sys
    import torch
    import fp8core.torch
    sys.path.insert(0, "tests")
    from pytorch.tensors import K, bits, wide
    from pytorch.test_export import Step, exported

    device, path = sys.argv[1:]
    made = Step().to(device)
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(made, (wide(5, K).to(device),), dynamic_shapes=({0: rows},))
    run = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=path))
    for m in (2, 5, 17, 5):
        x = wide(m, K).to(device)
        with torch.inference_mode():
            print([bits(y.cpu()) for y in run(x)] == [bits(y.cpu()) for y in made(x)])
"""


def ahead_of_time(device, path):
    """Compile and run in a process of its own, which a crash would end."""
    program = [sys.executable, "-c", textwrap.dedent(AOT), device, str(path)]
    environment = {
        name: value for name, value in os.environ.items() if name != "CXX"
    }  # it may link libstdc++ statically
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.models)])
def test_ahead_of_time_inductor(tmp_path, device):
    assert ahead_of_time(device, tmp_path / "step.pt2") == ["True"] * 4


class Sides(torch.nn.Module):
    """Options that are computed from the extents of inputs, which are symbols while torch exports."""

    def forward(self, x, codes, scale):
        q = fp8core.quantize(x, group_shape=(1, x.shape[1]))
        wide = fp8core.dequantize(codes, scale, group_shape=(1, codes.shape[1]))
        y = fp8core.linear(x, codes, scale, use_fast_accum=x.shape[0] > 3, group_shape=(1, x.shape[1] - x.shape[1] - 1))
        parts = fp8core.quantize(x, group_shape=(1, 64), eps=x.shape[0] / 8).scale
        bound = fp8core.quantize(x, scale_ub=x.shape[0] / 2048).scale
        norm = fp8core.rms_norm_quant(x, x[0], x.shape[0], scale=x.shape[0] / 2).data.float()
        padded = w8a8.scaled_fp8_quant(x, num_token_padding=x.shape[0] * 2)[0].float()
        rows, out = fp8core.quantize(x), torch.ones(x.shape[0], x.shape[0])
        sums = fp8core.scaled_mm_nt(rows, rows, beta=x.shape[0] / 2, out=out, out_dtype="float32")
        counted = fp8core.moe_permute(x, torch.zeros_like(x[:, :2], dtype=torch.int64), x.shape[0]).offs
        return q.data.float() * q.scale, wide, y, parts, bound, norm, padded, sums, counted


@pytest.mark.parametrize("strict", [False, True])
def test_options_of_symbols_are_those_of_the_extents_that_were_exported(strict):
    q = fp8core.quantize(wide(N, K))
    inputs = wide(5, K), *q
    auto = torch.export.Dim.AUTO
    shapes = {"x": {0: auto, 1: auto}, "codes": {1: auto}, "scale": None}
    program = torch.export.export(Sides(), inputs, dynamic_shapes=shapes, strict=strict)
    assert bits(program.module()(*inputs)) == bits(Sides()(*inputs))
