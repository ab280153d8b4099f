"""The linear path of a decoder layer: shapes of models, weights, memory, the layer in several libraries, its floor.

It consists of residual, RMS norm, fused q, k and v; the output projection; residual, RMS norm, gate and up; SiLU and
down. Attention is left out: the output projection takes the first columns of q, k, v, or a given tensor if these are
fewer columns than attention returns.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import torch

import fp8core
from bench import baselines
from bench.roofline import Roofline
from fp8core.problem import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TOKEN, GroupShape

EPSILON: Final = 1e-5
DEVICE: Final = "cuda"


class Model(NamedTuple):
    """The shapes of a decoder layer on one GPU."""

    hidden: int
    qkv: int
    """Output channels of the product for q, k and v (DeepSeek-V3: of the down projections before them)."""
    attention: int
    """Columns of the result of attention, the input of the output projection."""
    mlp: int
    blocks: bool = False
    """Whether scales are 1x128 x 128x128 instead of per token x per channel."""

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The weights [n, k] by name, in the order of their products."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.attention),
            "gate_up": (2 * self.mlp, self.hidden),
            "down": (self.hidden, self.mlp),
        }

    @property
    def weight_bytes(self) -> int:
        """The bytes of all codes."""
        return sum(n * k for n, k in self.sizes.values())

    def rooflines(self, m: int) -> list[Roofline]:
        """Return the roofline of each launch, with one launch per norm, SiLU, quantization and product."""
        products = [Roofline(n * k + m * k + 2 * m * n, 2 * m * n * k) for n, k in self.sizes.values()]
        norm = Roofline(7 * m * self.hidden + 2 * self.hidden)
        return [norm, norm, Roofline(3 * m * self.attention), Roofline(5 * m * self.mlp), *products]

    def call_floors(self, m: int) -> list[float]:
        """Return the floors of `CALLS` in microseconds."""
        norm, _, quantize, silu, qkv, o, gate_up, down = (launch.floor() for launch in self.rooflines(m))
        return [norm, qkv, quantize + o, norm, gate_up, silu, down]

    def floor(self, m: int) -> float:
        """Return the sum of the launches' floors in microseconds."""
        return sum(launch.floor() for launch in self.rooflines(m))


MODELS: Final = {
    "Llama-8B": Model(4096, 6144, 4096, 14336),
    "Llama-70B/8": Model(8192, 1280, 1024, 3584),
    "Qwen3-32B": Model(5120, 10240, 8192, 25600),
    "DeepSeek-V3, dense": Model(7168, 2112, 16384, 18432, blocks=True),
}
"""The models by name; Llama-70B/8 is the shard of one of eight GPUs."""


class Weights:
    """The weights of one layer, quantized and in bfloat16."""

    def __init__(self, model: Model, *, wide: bool) -> None:
        groups = (BLOCK_128, GROUP_128) if model.blocks else (PER_CHANNEL, PER_TOKEN)
        self.layers, self.wide = {}, {}
        for name, (n, k) in model.sizes.items():
            q = fp8core.quantize(torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) / k**0.5, group_shape=groups[0])
            self.layers[name] = fp8core.Fp8Linear(q, group_shape=groups[1])
            if wide:
                self.wide[name] = dequantized(q.data, q.scale).bfloat16()
        self.norms = [torch.rand(model.hidden, device=DEVICE, dtype=torch.bfloat16) + 0.5 for _ in range(2)]


class Memory:
    """The activations of a model's layers with m rows; all layers share this memory, as in serving."""

    def __init__(self, model: Model, m: int) -> None:
        def made(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

        self.model, self.data, self.scale, self.out = model, {}, {}, {}
        self.x, self.given_residual = made(m, model.hidden), made(m, model.hidden)
        self.given, self.residual = self.x.clone(), self.given_residual.clone()
        self.attended, self.silu, self.normed = made(m, model.attention), made(m, model.mlp), made(m, model.hidden)
        for name, (n, k) in model.sizes.items():
            self.data[name] = torch.empty(m, k, device=DEVICE, dtype=torch.float8_e4m3fn)
            groups = -(-k // 128) if model.blocks else 1
            self.scale[name] = torch.empty(groups, m, device=DEVICE).T
            self.out[name] = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)

    def reset(self) -> None:
        """Reset the input and the residual, which layers write, to their first values."""
        self.x.copy_(self.given)
        self.residual.copy_(self.given_residual)

    def into_attention(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return the input of the output projection."""
        return qkv[:, : self.model.attention] if self.model.attention <= self.model.qkv else self.attended


Layer = Callable[[Weights, Memory], torch.Tensor]


CALLS: Final = ("norm", "qkv", "quantize, o", "norm", "gate_up", "silu", "down")
"""The calls of a layer, in order; the third is two launches."""


def plain(w: Weights, a: Memory, count: int = len(CALLS)) -> torch.Tensor:
    """Run the layer, or its first ``count`` calls, with results that the library allocates."""
    calls = _ours(w, a, dict.fromkeys(w.layers), dict.fromkeys(w.layers))
    last: torch.Tensor = deque(islice(calls, count), maxlen=1)[0]
    return last


def preallocated(w: Weights, a: Memory) -> torch.Tensor:
    """Run the layer with given results."""
    into = {name: (a.data[name], a.scale[name]) for name in w.layers}
    last: torch.Tensor = deque(_ours(w, a, into, a.out), maxlen=1)[0]
    return last


def _ours(w: Weights, a: Memory, into: Mapping[str, Any], out: Mapping[str, Any]) -> Iterator[Any]:
    """Make the calls of the layer lazily, each when its result is requested."""
    group: GroupShape = w.layers["qkv"].group_shape
    how: dict[str, Any] = {"group_shape": group, "scale_layout": "mn" if group == GROUP_128 else "k"}
    residual, (first, second) = a.residual, w.norms
    yield (x := fp8core.rms_norm_quant(a.x, first, EPSILON, residual=residual, out=into["qkv"], **how))
    yield (qkv := w.layers["qkv"](x, out=out["qkv"]))
    yield (o := w.layers["o"](a.into_attention(qkv), out=out["o"]))
    yield (h := fp8core.rms_norm_quant(o, second, EPSILON, residual=residual, out=into["gate_up"], **how))
    yield (gate_up := w.layers["gate_up"](h, out=out["gate_up"]))
    yield (y := fp8core.silu_and_mul_quant(gate_up, out=into["down"], **how))
    yield w.layers["down"](y, out=out["down"])


def vllm(ops: Any, w: Weights, a: Memory) -> torch.Tensor:
    """Run the layer with vLLM's kernels; steps without a fused kernel are two launches, as in vLLM."""
    data, scale, out = a.data, a.scale, a.out

    def multiply(name: str) -> torch.Tensor:
        layer = w.layers[name]
        ops.cutlass_scaled_mm(out[name], data[name], layer.weight.T, scale[name], layer.weight_scale.T, None)
        return out[name]

    def quantize(name: str, x: torch.Tensor) -> None:
        if a.model.blocks:
            limits = (128, 1e-10, -baselines.LARGEST, baselines.LARGEST, False, False, False)
            ops.per_token_group_fp8_quant(x.contiguous(), data[name], scale[name], *limits)
        else:
            ops.dynamic_per_token_scaled_fp8_quant(data[name], x, scale[name], None)

    def norm(name: str, x: torch.Tensor, weight: torch.Tensor) -> None:
        if a.model.blocks:
            ops.fused_add_rms_norm(x, a.residual, weight, EPSILON)
            quantize(name, x)
        else:
            ops.rms_norm_dynamic_per_token_quant(data[name], x, weight, scale[name], EPSILON, None, a.residual)

    norm("qkv", a.x, w.norms[0])
    quantize("o", a.into_attention(multiply("qkv")))
    norm("gate_up", multiply("o"), w.norms[1])
    ops.silu_and_mul(a.silu, multiply("gate_up"))
    quantize("down", a.silu)
    return multiply("down")


def torch_bfloat16(w: Weights, a: Memory) -> torch.Tensor:
    """Run the layer in PyTorch and bfloat16, with the same weights."""
    functional = torch.nn.functional

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a.residual.add_(x)
        return functional.rms_norm(a.residual, weight.shape, weight, EPSILON)

    qkv = functional.linear(norm(a.x, w.norms[0]), w.wide["qkv"])
    o = functional.linear(a.into_attention(qkv), w.wide["o"])
    gate, up = functional.linear(norm(o, w.norms[1]), w.wide["gate_up"]).chunk(2, 1)
    return functional.linear(functional.silu(gate) * up, w.wide["down"])


def dequantized(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return codes times their scales, in float64."""
    rows, cols = codes.shape
    each = [
        1 if extent == parts else extent if parts == 1 else 128
        for extent, parts in zip(codes.shape, scale.shape, strict=True)
    ]
    spread = scale.double().repeat_interleave(each[0], 0)[:rows].repeat_interleave(each[1], 1)[:, :cols]
    return codes.double() * spread


def want(w: Weights, a: Memory) -> torch.Tensor:
    """Return the layer's result, computed by PyTorch in float64 with the same quantization steps."""
    mode = "1x128" if a.model.blocks else "token"

    def norm(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return h / torch.sqrt(h.square().mean(1, keepdim=True) + EPSILON) * weight.double()

    def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
        found = x.float()
        scale = baselines.scales(found, mode)
        layer = w.layers[name]
        weight = dequantized(layer.weight, layer.weight_scale)
        return (dequantized(baselines.codes(found, scale, mode), scale) @ weight.T).bfloat16().double()

    h = a.x.double() + a.residual.double()
    qkv = multiply("qkv", norm(h, w.norms[0]))
    h = h.bfloat16().double() + multiply("o", a.into_attention(qkv))
    gate, up = multiply("gate_up", norm(h, w.norms[1])).chunk(2, 1)
    return multiply("down", gate / (1 + torch.exp(-gate)) * up)


def runs(names: Sequence[str], ops: Any) -> dict[str, Layer]:
    """Return the available variants among ``names``; ``ops`` are vLLM's kernels or None."""
    found: dict[str, Layer] = {"preallocated": preallocated, "plain": plain, "torch": torch_bfloat16}
    if ops is not None:
        found["vllm"] = lambda w, a: vllm(ops, w, a)
    return {name: found[name] for name in names if name in found}
