"""Rows that no trace knows, as a router picks them: torch's unbacked symbols."""

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

import fp8core.torch  # noqa: E402 - after the skip
from pytorch.tensors import K, bits, stacked, weight, wide  # noqa: E402

FUSED = weight((-1, -1))
BLOCKED = weight((128, 128))
EXPERTS, BLOCKED_EXPERTS = (fp8core.Quantized(*stacked(group), group) for group in ((1, -1), (128, 128)))
OFFS = torch.tensor([2, 2, 9], dtype=torch.int32)  # of any rows: an end beyond them is the last of them
ROUTED = {
    "quantize": lambda x: fp8core.quantize(x),
    "quantize_mn": lambda x: fp8core.quantize(x, group_shape=(1, 128), scale_layout="mn"),
    "quantize_tensor": lambda x: fp8core.quantize(x, group_shape=(-1, -1)),
    "quantize_block": lambda x: fp8core.quantize(x, group_shape=(128, 128)),
    "quantize_static": lambda x: fp8core.quantize(x, scale=0.02),
    "dequantize": lambda x: fp8core.quantize(x, group_shape=(1, 64)).dequantize("bfloat16"),
    "rms_norm": lambda x: fp8core.rms_norm_quant(x, torch.ones(K), 1e-6, residual=x * 2),
    "silu": lambda x: fp8core.silu_and_mul_quant(x, group_shape=(1, 128)),
    "linear": lambda x: fp8core.linear(x, FUSED, bias=torch.ones(FUSED.shape[0])),
    "linear_block": lambda x: fp8core.linear(x, BLOCKED, group_shape=(1, 128)),
    "linear_of_fp8": lambda x: fp8core.linear(fp8core.silu_and_mul_quant(torch.cat((x, x), -1)), FUSED),
    "scaled_mm": lambda x: fp8core.scaled_mm(fp8core.quantize(x), fp8core.quantize(x * 2 + 1).T, out_dtype="float32"),
    "grouped": lambda x: fp8core.grouped_scaled_mm_nt(fp8core.quantize(x), EXPERTS, offs=OFFS, bias=torch.ones(3, 64)),
    "grouped_block": lambda x: fp8core.grouped_scaled_mm_nt(
        fp8core.quantize(x, group_shape=(1, 128), scale_layout="mn"), BLOCKED_EXPERTS, offs=OFFS
    ),
    "grouped_out": lambda x: fp8core.grouped_scaled_mm_nt(
        fp8core.quantize(x), EXPERTS, offs=OFFS, out=x.new_zeros(x.shape[0], 64)
    ),
    "permute": lambda x: fp8core.moe_permute(x, routes(x)[0] % 3, 3),
    "permute_tokens": lambda x: fp8core.moe_permute(fp8core.quantize(x), routes(x)[0] % 3, 3),
    "permute_groups": lambda x: fp8core.moe_permute(
        fp8core.quantize(x, group_shape=(1, 128), scale_layout="mn"), routes(x)[0] % 3, 3
    ),
    "permute_tensor": lambda x: fp8core.moe_permute(fp8core.quantize(x, group_shape=(-1, -1)), routes(x)[0] % 3, 3),
    "unpermute": lambda x: fp8core.moe_unpermute(torch.cat((x, x)), *routes(x)),
    "unpermute_out": lambda x: fp8core.moe_unpermute(x, routes(x)[0], out=torch.zeros_like(x)),
}


def routes(x):
    """Two places for each row, some of which do not exist, and their weights."""
    ids = torch.arange(x.shape[0], dtype=torch.int32)[:, None] + torch.tensor([0, -1], dtype=torch.int32)
    return ids, torch.tensor([0.5, 2]).expand(x.shape[0], 2).contiguous()


@pytest.fixture(autouse=True)
def picked_rows_in_graphs():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


@pytest.mark.parametrize("name", ROUTED)
def test_rows_that_no_trace_knows(name):
    """As a router picks them: one graph for any number, 0 and 1 included."""
    function = ROUTED[name]

    def routed(x, chosen):
        return function(x[chosen])

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(routed, fullgraph=True, backend=counter)
    for picked in ([0, 3, 4], [2], [], range(8)):
        if name == "scaled_mm" and len(picked) == 0:
            continue  # a product of no rows and no columns has no scale for b
        chosen = torch.tensor([row in picked for row in range(8)])
        x = wide(8, K)
        assert bits(compiled(x, chosen)) == bits(routed(x, chosen))
    assert counter.frame_count == 1


def test_what_depends_on_rows_that_no_trace_knows_is_refused():
    def padded(x, chosen):
        return fp8core.quantize(x[chosen], rows_padded=5).scale

    with pytest.raises(Exception, match="a traced call needs an extent that can be compared with 5, got u0"):
        torch.compile(padded, fullgraph=True, backend="eager")(wide(8, K), torch.ones(8, dtype=torch.bool))
