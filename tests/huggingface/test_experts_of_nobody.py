"""Choices of no expert in grouped experts: left out with gradients as without."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from huggingface.test_experts import COUNT, routed  # noqa: E402 - after the skips
from huggingface.test_grouped_experts import HIDDEN, grouped, loop  # noqa: E402


@pytest.mark.parametrize("nobody", [-1, -7, COUNT, COUNT + 3])
@pytest.mark.parametrize("of", ["x", "weights"])
def test_gradients_do_not_change_what_is_left_out(of, nobody):
    ours = grouped(loop())
    x, index, weights = routed(9, hidden=HIDDEN)
    index[::2, 0] = nobody
    with torch.no_grad():
        wanted = ours(x, index, weights)
    given = {"x": x, "weights": weights}[of].requires_grad_()
    found = ours(x, index, weights)
    torch.testing.assert_close(found.detach(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    found.sum().backward()
    if of == "weights":
        assert (given.grad[::2, 0] == 0).all()
