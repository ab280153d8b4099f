"""Grouped experts exported by torch.export run for any number of tokens."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from huggingface.test_experts import routed  # noqa: E402 - after the skips
from huggingface.test_grouped_experts import HIDDEN, grouped, loop  # noqa: E402


@pytest.mark.parametrize(("scheme", "static"), [("block", False), ("channel", False), ("channel", True)])
def test_an_export_runs_for_any_number_of_tokens(scheme, static):
    ours = grouped(loop(scheme=scheme, static=static))

    def given(tokens):
        x, index, weights = routed(tokens, hidden=HIDDEN)
        return x, index.contiguous(), weights

    tokens = torch.export.Dim("tokens", min=1, max=1000)
    with torch.no_grad():
        program = torch.export.export(ours, given(5), dynamic_shapes=({0: tokens},) * 3).module()
        for count in (1, 2, 17):
            assert torch.equal(program(*given(count)), ours(*given(count)))
