"""torch.compile beside autograd: results have no gradients, and what a call writes is noticed, or refused."""

import pytest

torch = pytest.importorskip("torch")

import fp8core.torch  # noqa: E402 - after the skip
from fp8core.errors import LayoutError  # noqa: E402
from pytorch.cases import fresh_dynamo  # noqa: E402, F401
from pytorch.tensors import K, bits, ends, stacked, weight, wide  # noqa: E402


def test_results_never_require_grad_and_writes_are_noticed():
    x = wide(5, K, dtype=torch.float32).requires_grad_()
    options = (None, "float8_e4m3fn", [1, -1], None, "float32", "k", 1e-10, None)
    _codes, scale = torch.ops.fp8core.quantize(x, *options)
    assert not scale.requires_grad
    for call in (
        lambda r: fp8core.rms_norm_quant(x, torch.ones(K), 1e-6, residual=r),
        lambda r: torch.ops.fp8core.rms_norm_quant(x, torch.ones(K), r, *options[:-1], 1e-6, False),
    ):
        residual = x * 1
        square = residual * residual
        call(residual.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.sum().backward()


SQUARE = weight((1, -1), n=K)
SQUARES = stacked((1, -1), n=K)
WRITING = {
    "residual": lambda x, r: fp8core.rms_norm_quant(x, torch.ones(K, dtype=x.dtype), 1e-6, residual=r),
    "out": lambda x, r: fp8core.linear(x, SQUARE, out=r),
    "beta": lambda x, r: fp8core.scaled_mm_nt(fp8core.quantize(x), SQUARE, out=r, beta=0.5),
    "grouped": lambda x, r: fp8core.grouped_scaled_mm_nt(
        fp8core.quantize(x), SQUARES[0], scale_b=SQUARES[1], offs=ends(5, 5), out=r
    ),
    "unpermute": lambda x, r: fp8core.moe_unpermute(x, torch.arange(5, dtype=torch.int32)[:, None], out=r),
}


@pytest.mark.parametrize("call", WRITING.values(), ids=WRITING)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_autograd_notices_what_a_graph_writes(backend, call):
    def step(x, start, early):
        kept = start * 2
        loss = kept.sin().sum() if early else 0
        call(x, kept.detach())
        return loss + kept.sum()

    x, start = wide(5, K), wide(5, K, seed=7).requires_grad_()
    torch.compile(step, fullgraph=True, backend=backend)(x, start, False).backward()
    assert (start.grad == 2).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.compile(step, fullgraph=True, backend=backend)(x, start, True).backward()


@pytest.mark.parametrize("call", WRITING.values(), ids=WRITING)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_no_call_writes_to_a_tensor_that_requires_grad(backend, call):
    def step(x, start):
        call(x, written := start * 2)
        return written

    def leaf(x, start):
        call(x, start)
        return start

    x, start = wide(5, K), wide(5, K, seed=7)
    for run in (step, leaf):
        run = run if backend is None else torch.compile(run, backend=backend)
        with torch.no_grad():
            want = run(x, start.clone())
            assert bits(run(x, start.clone().requires_grad_())) == bits(want)
        for _ in range(2):
            given = start.clone().requires_grad_()
            with pytest.raises(LayoutError, match="needs a tensor that does not require grad"):
                run(x, given)
            assert bits(given) == bits(start)
            assert bits(run(x, start.clone())) == bits(want)
