"""Traced permutations: of the only token, whose scale looks like that of all tokens, and of an unknown number."""

import pytest

torch = pytest.importorskip("torch")

import fp8core  # noqa: E402 - after the skips
import fp8core.torch  # noqa: E402
from fp8core import GROUP_128, PER_TENSOR, PER_TOKEN  # noqa: E402


@pytest.mark.parametrize("group", [PER_TENSOR, PER_TOKEN, GROUP_128])
def test_the_scale_of_one_token_is_permuted_in_a_trace(group):
    def permuted(x, index):
        return fp8core.moe_permute(fp8core.quantize(x, group_shape=group), index, 3)

    compiled = torch.compile(permuted, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (1, 5):
        x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(tokens))
        index = torch.arange(2 * tokens).view(tokens, 2) % 3
        (rows, *found), (wanted_rows, *wanted) = compiled(x, index), permuted(x, index)
        assert all(map(torch.equal, found, wanted))
        assert torch.equal(rows.data.view(torch.uint8), wanted_rows.data.view(torch.uint8))
        assert torch.equal(rows.scale, wanted_rows.scale)


def test_a_number_of_tokens_that_no_trace_knows():
    def both(x, chosen, index):
        rows, _, inverse = fp8core.moe_permute(fp8core.quantize(x[chosen]), index[chosen], 3)
        return fp8core.moe_unpermute(rows.dequantize(), inverse)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    x, index = torch.randn(8, 128, generator=torch.Generator().manual_seed(0)), torch.arange(16).view(8, 2) % 3
    for picked in ([0, 3, 4], [2], [], range(8)):
        chosen = torch.tensor([row in picked for row in range(8)])
        assert torch.equal(compiled(x, chosen, index), both(x, chosen, index))
