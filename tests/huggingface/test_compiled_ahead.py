"""The kernels of experts that are compiled ahead are those of the calls that grouped experts make."""

import shutil

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402 - after the skips

from fp8core import ArraySpec, Quantized  # noqa: E402
from fp8core.checkpoint import plan_checkpoint, quantize_checkpoint  # noqa: E402
from fp8core.checkpoint.shapes.kernels import kernels_of  # noqa: E402
from fp8core.checkpoint.shapes.linear import layers_of  # noqa: E402
from fp8core.checkpoint.shapes.mixtures import MixtureShape, mixtures_of  # noqa: E402
from fp8core.core.ahead import plan_ahead  # noqa: E402
from fp8core.runtime import jit  # noqa: E402
from fp8core.torch import forward  # noqa: E402
from fp8core.torch import grouped as products  # noqa: E402
from fp8core.transformers import from_pretrained  # noqa: E402
from fp8core.transformers import grouped as experts  # noqa: E402
from huggingface.cases import TOKENS, config_of, tensors_of, written  # noqa: E402
from huggingface.test_experts import COUNT, Gated, Plain, routed  # noqa: E402
from huggingface.test_grouped_experts import GATED, HIDDEN, INNER, PLAIN, Usual, grouped, loop  # noqa: E402
from support.ahead import absent, forget  # noqa: E402
from support.targets import ADA, H200, MI300  # noqa: E402

CALLS = [
    (forward, "linear"),
    *((products, name) for name in ("quantize", "grouped_scaled_mm_nt")),
    *((experts, name) for name in ("moe_permute", "silu_and_mul_quant", "moe_unpermute")),
]
SPARE = {"quantize/rowwise", "moe/permute", "moe/count", "moe/unpermute"}
"""Sources of kernels that are compiled for any activation, and for any dtype of the choices and of their weights."""


@pytest.fixture(autouse=True)
def forgotten():
    forget()
    yield
    forget()


def spec(x):
    if isinstance(x, Quantized):
        return Quantized(spec(x.data), spec(x.scale), x.group_shape)
    return ArraySpec(x.shape, x.dtype, strides=x.stride()) if isinstance(x, torch.Tensor) else x


def recorded(monkeypatch, layer, *args):
    """Return the calls of fp8core that a layer makes, with specs in place of arrays."""
    made = []

    def recording(real):
        def call(*args, **kwargs):
            made.append((real, list(map(spec, args)), {name: spec(x) for name, x in kwargs.items()}))
            return real(*args, **kwargs)

        return call

    for module, name in CALLS:
        monkeypatch.setattr(module, name, recording(getattr(module, name)))
    monkeypatch.setattr(forward.ForwardLinear, "_product", forward.ForwardLinear._traced)  # it calls `linear`
    with torch.no_grad():
        layer(*args)
    monkeypatch.undo()
    return made


@pytest.mark.parametrize("target", [H200, ADA], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 17, 2000])
@pytest.mark.parametrize(
    ("scheme", "static"), [("channel", False), ("tensor", False), ("block", False), ("channel", True), ("tensor", True)]
)
@pytest.mark.parametrize(("kind", "layout"), [(Usual, GATED), (Gated, GATED), (Plain, PLAIN)])
def test_experts_need_no_other_kernel(monkeypatch, kind, layout, scheme, static, tokens, target):
    x, index, weights = routed(tokens, hidden=HIDDEN)
    layer = grouped(loop(kind, layout, scheme, static))
    few = tokens == 3
    index, weights = index.to(torch.int32 if few else torch.int64), weights.to(torch.bfloat16 if few else torch.float32)
    calls = recorded(monkeypatch, layer, x.bfloat16(), index, weights)
    assert len(calls) == 6
    for function, args, kwargs in calls:
        plan_ahead(function, absent(target)._replace(model="unmeasured"), *args, **kwargs)
    wanted = set(jit.ASKED)
    forget()
    of_products = "channel" if scheme == "tensor" else scheme
    mixture = MixtureShape(COUNT, 2, HIDDEN, INNER, of_products, layout is GATED, static)
    found = set(kernels_of([], "bfloat16", absent(target), [(tokens, mixture)]))
    assert wanted <= found
    assert {kernel.source for kernel in found - wanted} <= SPARE | ({"fused/silu"} if kind is Gated else set())
    assert len({kernel.source for kernel in wanted}) > 3


def stacked(source, folder):
    """Write a checkpoint of experts with those of a layer in one tensor, and return the folder."""
    tensors, apart = tensors_of(source), {}
    for name in [name for name in tensors if ".experts." in name]:
        module, _, expert = name.partition(".experts.")
        number, part, role = expert.split(".")
        both = "down_proj" if part == "down_proj" else "gate_up_proj"
        key = f"{module}.experts.{both}{'' if role == 'weight' else f'_{role}'}"
        apart.setdefault(key, {}).setdefault(int(number), []).append((part, tensors.pop(name)))
    for key, numbered in apart.items():
        one_of_both = key.endswith("input_scale")  # gate and up have it in common
        parts = [
            [x for _, x in sorted(numbered[at], key=lambda one: one[0])][: 1 if one_of_both else 2]
            for at in sorted(numbered)
        ]
        tensors[key] = torch.stack([torch.cat([x.view(torch.uint8) for x in own]).view(own[0].dtype) for own in parts])
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(source / "config.json", folder)
    return folder


MODELS = [
    ("llama", "channel"),
    ("llama", "static"),
    ("llama", "block"),
    ("qwen3_moe", "static"),
    ("qwen3_moe", "channel"),
]


@pytest.mark.parametrize("target", [H200, MI300], ids=str)
@pytest.mark.parametrize(("kind", "scheme"), MODELS)
def test_a_loaded_model_needs_no_other_kernel(monkeypatch, tmp_path, kind, scheme, target):
    """The kernels planned from the files are those of the calls that the model makes which is loaded from them."""
    written(kind, tmp_path / "bf16")
    names = [one.module for one in plan_checkpoint(tmp_path / "bf16").verdicts if one.status == "quantized"]
    given = dict.fromkeys(names, 0.03) if scheme == "static" else None
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "fp8", scheme=scheme, input_scales=given)
    model = from_pretrained(tmp_path / "fp8")
    calls = recorded(monkeypatch, model, TOKENS)
    made = {function.__name__ for function, *_ in calls}
    assert made >= ({"linear", "moe_permute", "silu_and_mul_quant"} if kind == "qwen3_moe" else {"linear"})
    for function, args, kwargs in calls:
        plan_ahead(function, absent(target)._replace(model="unmeasured"), *args, **kwargs)
    wanted = set(jit.ASKED)
    for folder in (
        tmp_path / "fp8",
        *([stacked(tmp_path / "fp8", tmp_path / "stacked")] if kind == "qwen3_moe" else []),
    ):
        forget()
        layers = layers_of(folder)
        mixtures = mixtures_of(layers, config_of(folder))
        assert len(mixtures) == (kind == "qwen3_moe")
        alone = [one for one, names in layers.items() if not all(".experts." in name for name in names)]
        shapes = [(TOKENS.numel(), one) for one in alone], [(TOKENS.numel(), one) for one in mixtures]
        found = set(kernels_of(shapes[0], "bfloat16", absent(target), shapes[1]))
        assert wanted <= found
        assert {kernel.source for kernel in found - wanted} <= SPARE
