"""Calls that checkers have to refuse: each is marked, and a mark that is not needed is an error."""

# mypy: disable-error-code="ignore-without-code"

import numpy as np

import fp8core

x = np.ones((4, 256), np.float32)
q = fp8core.quantize(x)

fp8core.quantize([1.0, 2.0])  # type: ignore
fp8core.quantize(x, dtype="float8")  # type: ignore
fp8core.quantize(x, dtype="float16")  # type: ignore
fp8core.quantize(x, group_shape="token")  # type: ignore
fp8core.quantize(x, group_shape=128)  # type: ignore
fp8core.quantize(x, group_shape=(1, 128, 1))  # type: ignore
fp8core.quantize(x, scale_format="e8m0")  # type: ignore
fp8core.quantize(x, rows_padded="20")  # type: ignore
fp8core.quantize(x, streams=0)  # type: ignore
fp8core.quantize(x, stream="default")  # type: ignore
fp8core.dequantize(q, dtype="float8_e4m3fn")  # type: ignore
fp8core.scaled_mm_nt(q, 3)  # type: ignore
fp8core.scaled_mm_nt(q, q, out_dtype="int8")  # type: ignore
fp8core.scaled_mm_nt(q, q, bias=1.0)  # type: ignore
fp8core.grouped_scaled_mm_nt(q, q)  # type: ignore
fp8core.grouped_scaled_mm_nt(q, q, offs=[1])  # type: ignore
fp8core.grouped_scaled_mm_nt(q, q, offs=x, out_dtype="float8_e4m3fn")  # type: ignore
fp8core.moe_permute(x, x)  # type: ignore
fp8core.moe_permute(x, [[0, 1]], 2)  # type: ignore
fp8core.moe_permute(x, x, experts="2")  # type: ignore
fp8core.moe_permute(x, x, 2, out=x)  # type: ignore
fp8core.moe_unpermute(q, x)  # type: ignore
fp8core.moe_unpermute(x, None)  # type: ignore
fp8core.moe_unpermute(x, x, 0.5)  # type: ignore
fp8core.moe_unpermute(x, x, out_dtype="float8_e4m3fn")  # type: ignore
fp8core.linear(x, q, out_dtype="float8_e4m3fn")  # type: ignore
fp8core.linear(x, q, group_shape=None)  # type: ignore
fp8core.linear(x)  # type: ignore
fp8core.rms_norm_quant(x, x[0])  # type: ignore
fp8core.Fp8Linear.from_weight(x, dtype="float32")  # type: ignore
fp8core.Fp8Linear(q)(None)  # type: ignore
fp8core.all_close_1d(0.5)  # type: ignore
fp8core.explain(fp8core.quantize, x, target=9.0)  # type: ignore
