"""What checkers know of calls with torch's tensors; it also runs."""

from typing import assert_type

import torch

import fp8core
from fp8core import Permuted, Quantized

x = torch.ones(4, 256)
q = fp8core.quantize(x, dtype=torch.float8_e4m3fn)
assert_type(q, Quantized[torch.Tensor, torch.Tensor])
data, scale = q
assert_type(data, torch.Tensor)
w = fp8core.quantize(torch.ones(8, 256))
assert_type(fp8core.scaled_mm(q, w.T, out_dtype=torch.bfloat16), torch.Tensor)
assert_type(fp8core.scaled_mm(data, w.data.T, scale, w.scale.T), torch.Tensor)
assert_type(fp8core.scaled_mm_nt(fp8core.quantize(x), fp8core.quantize(torch.ones(8, 256))), torch.Tensor)
experts = fp8core.quantize(torch.ones(2, 8, 256))
ends = torch.tensor([1, 4], dtype=torch.int32)
assert_type(fp8core.grouped_scaled_mm_nt(q, experts, offs=ends, out_dtype=torch.float16), torch.Tensor)
rows, offs, inverse = fp8core.moe_permute(x, torch.tensor([[0, 1]] * 4), experts=2)
assert_type(rows, torch.Tensor)
assert_type(inverse, torch.Tensor)
pairs = fp8core.moe_permute(q, torch.tensor([[0, 1]] * 4), 2)
assert_type(pairs, Permuted[Quantized[torch.Tensor, torch.Tensor], torch.Tensor])
assert_type(fp8core.grouped_scaled_mm_nt(pairs.rows, experts, offs=pairs.offs), torch.Tensor)
assert_type(fp8core.moe_unpermute(rows, inverse, torch.ones(4, 2), out_dtype=torch.float16), torch.Tensor)
assert_type(fp8core.linear(x, w, bias=torch.ones(8)), torch.Tensor)
assert_type(fp8core.dequantize(q, dtype=torch.float16), torch.Tensor)
assert_type(q.dequantize(), torch.Tensor)
layer = fp8core.Fp8Linear(w.data, w.scale, out_dtype=torch.float16)
assert_type(layer(x), torch.Tensor)
assert_type(layer(q), torch.Tensor)
fused = fp8core.requantize_with_max_scale(w.data, torch.ones(2), [4, 4])
assert_type(fused, tuple[torch.Tensor, torch.Tensor])
assert_type(fp8core.convert_to_channelwise(torch.ones(2), [4, 4]), torch.Tensor)


def on_a_stream(x: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """Launch on a stream of torch."""
    return fp8core.linear(x, w, stream=stream)


for made in (data, scale, layer(x), q.dequantize(), *fused):
    assert isinstance(made, torch.Tensor)
