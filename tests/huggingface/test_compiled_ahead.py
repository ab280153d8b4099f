"""The kernels of experts that are compiled ahead are those of the calls that grouped experts make."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from fp8core import ArraySpec, Quantized  # noqa: E402 - after the skips
from fp8core.checkpoint.kernels import kernels_of  # noqa: E402
from fp8core.checkpoint.mixture_shapes import MixtureShape  # noqa: E402
from fp8core.core.ahead import plan_ahead  # noqa: E402
from fp8core.runtime import jit  # noqa: E402
from fp8core.torch import grouped as products  # noqa: E402
from fp8core.transformers import grouped as experts  # noqa: E402
from huggingface.test_experts import COUNT, Gated, Plain, routed  # noqa: E402
from huggingface.test_grouped_experts import GATED, HIDDEN, INNER, PLAIN, Usual, grouped, loop  # noqa: E402
from support.ahead import absent, forget  # noqa: E402
from support.targets import ADA, H200  # noqa: E402

CALLS = [
    *((products, name) for name in ("quantize", "grouped_scaled_mm_nt")),
    *((experts, name) for name in ("moe_permute", "silu_and_mul_quant", "moe_unpermute")),
]
SPARE = {"quantize/rowwise", "moe/unpermute"}
"""Sources of kernels that are compiled for any activation, and for any dtype of the choices' weights."""


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
    with torch.no_grad():
        layer(*args)
    monkeypatch.undo()
    return made


@pytest.mark.parametrize("target", [H200, ADA], ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 17, 2000])
@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
@pytest.mark.parametrize(("kind", "layout"), [(Usual, GATED), (Gated, GATED), (Plain, PLAIN)])
def test_experts_need_no_other_kernel(monkeypatch, kind, layout, scheme, tokens, target):
    x, index, weights = routed(tokens, hidden=HIDDEN)
    layer = grouped(loop(kind, layout, scheme))
    calls = recorded(
        monkeypatch, layer, x.bfloat16(), index, weights.to(torch.bfloat16 if tokens == 3 else torch.float32)
    )
    assert len(calls) == 6
    for function, args, kwargs in calls:
        plan_ahead(function, absent(target)._replace(model="unmeasured"), *args, **kwargs)
    wanted = set(jit.ASKED)
    forget()
    of_products = "channel" if scheme == "tensor" else scheme
    mixture = MixtureShape(COUNT, 2, HIDDEN, INNER, of_products, gated=layout is GATED)
    found = set(kernels_of([], "bfloat16", absent(target), [(tokens, mixture)]))
    assert wanted <= found
    assert {kernel.source for kernel in found - wanted} <= SPARE | ({"fused/silu"} if kind is Gated else set())
    assert len({kernel.source for kernel in wanted}) > 3
