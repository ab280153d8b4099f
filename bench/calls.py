"""The calls of public functions that `bench.host` and `bench.against` time, with and without given results.

This module uses only public names that fp8core 0.1 has, too, so that an older checkout can run it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import torch

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN

Run = Callable[[], object]

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
MODES: Final[dict[str, dict[str, Any]]] = {
    "static": {"group_shape": PER_TENSOR, "scale": 0.02},
    "tensor": {"group_shape": PER_TENSOR},
    "token": {"group_shape": PER_TOKEN},
    "1x128": {"group_shape": GROUP_128},
    "1x128 mn": {"group_shape": GROUP_128, "scale_layout": "mn"},
    "128x128": {"group_shape": BLOCK_128},
}
SCALES: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "tensor": ({"group_shape": PER_TENSOR}, {"group_shape": PER_TENSOR}),
    "row": ({"group_shape": PER_TOKEN}, {"group_shape": PER_CHANNEL}),
    "block": ({"group_shape": GROUP_128, "scale_layout": "mn"}, {"group_shape": BLOCK_128}),
}
"""By mode: the arguments of `quantize` for a and for the weight of a product."""
EPSILON: Final = 1e-5
ROWS: Final = (1, 16, 64, 128, 1024)


class PublicCall(NamedTuple):
    """A call: its name, the least bytes that it moves, and a function that makes new operands and returns the call."""

    name: str
    bytes: int
    make: Callable[[], Run]


def normal(rows: int, cols: int) -> torch.Tensor:
    """Return normally distributed bfloat16 numbers."""
    return torch.randn(rows, cols, device=DEVICE).bfloat16()


def _named(name: str, given: bool) -> str:
    return f"{name}, out given" if given else name


def quantize(name: str, mode: str, rows: int, cols: int, *, given: bool) -> PublicCall:
    """Return quantization."""

    def make() -> Run:
        x, options = normal(rows, cols), dict(MODES[mode])
        if "scale" in options:
            options["scale"] = torch.full((1,), options["scale"], device=DEVICE)
        if not given:
            return partial(fp8core.quantize, x, **options)
        data, scale = fp8core.quantize(x, **options)
        return partial(fp8core.quantize, x, **options, out=data if "scale" in options else (data, scale))

    return PublicCall(_named(name, given), 3 * rows * cols, make)


def dequantize(name: str, rows: int, cols: int, *, given: bool) -> PublicCall:
    """Return dequantization per token to bfloat16."""

    def make() -> Run:
        data, scale = fp8core.quantize(normal(rows, cols))
        options: dict[str, Any] = {"group_shape": PER_TOKEN, "dtype": "bfloat16"}
        options |= {"out": normal(rows, cols)} if given else {}
        return partial(fp8core.dequantize, data, scale, **options)

    return PublicCall(_named(name, given), 3 * rows * cols, make)


def norm(name: str, rows: int, cols: int, *, residual: bool, given: bool) -> PublicCall:
    """Return RMS norm with quantization per token, optionally of a sum with a residual."""

    def make() -> Run:
        x, weight = normal(rows, cols), normal(1, cols)[0].contiguous()
        options: dict[str, Any] = {"residual": normal(rows, cols)} if residual else {}
        options |= {"out": tuple(fp8core.quantize(x))} if given else {}
        return partial(fp8core.rms_norm_quant, x, weight, EPSILON, **options)

    return PublicCall(_named(name, given), (7 if residual else 3) * rows * cols, make)


def silu(name: str, mode: str, rows: int, cols: int, *, given: bool) -> PublicCall:
    """Return SiLU of the gate times up, with quantization."""

    def make() -> Run:
        x, options = normal(rows, 2 * cols), dict(MODES[mode])
        options |= {"out": tuple(fp8core.quantize(normal(rows, cols), **options))} if given else {}
        return partial(fp8core.silu_and_mul_quant, x, **options)

    return PublicCall(_named(name, given), 5 * rows * cols, make)


def product(name: str, mode: str, m: int, n: int, k: int, *, stored: bool, given: bool) -> PublicCall:
    """Return a product, by `scaled_mm_nt` if the weight is passed as it is ``stored``, else by `scaled_mm`."""

    def make() -> Run:
        of_a, of_weight = SCALES[mode]
        a, weight = fp8core.quantize(normal(m, k), **of_a), fp8core.quantize(normal(n, k), **of_weight)
        options = {"out": normal(m, n)} if given else {}
        if stored:
            return partial(fp8core.scaled_mm_nt, a.data, weight.data, a.scale, weight.scale, **options)
        scale = weight.scale.t() if mode != "tensor" else weight.scale
        return partial(fp8core.scaled_mm, a.data, weight.data.t(), a.scale, scale, **options)

    return PublicCall(_named(name, given), n * k + m * k + 2 * m * n, make)


def linear(name: str, m: int, n: int, k: int, *, prepared: bool, given: bool) -> PublicCall:
    """Return a linear layer, per token x per channel, by `Fp8Linear` if ``prepared``, else by `linear`."""

    def make() -> Run:
        x, weight = normal(m, k), fp8core.quantize(normal(n, k))
        options = {"out": normal(m, n)} if given else {}
        if prepared:
            return partial(fp8core.Fp8Linear(weight.data, weight.scale), x, **options)
        return partial(fp8core.linear, x, weight.data, weight.scale, **options)

    return PublicCall(_named(name, given), n * k + 2 * m * k + 2 * m * n, make)


def requantize(name: str, rows: int, cols: int, *, given: bool) -> PublicCall:
    """Return requantization of three shards at their largest scale, into new memory or into the weight itself."""

    def make() -> Run:
        data = fp8core.quantize(normal(rows, cols), group_shape=PER_TENSOR).data
        widths = [rows // 2, rows // 4, rows - rows // 2 - rows // 4]
        scales = torch.tensor((0.011, 0.013, 0.007), device=DEVICE)
        options = {"out": torch.empty_like(data)} if given else {}
        return partial(fp8core.requantize_with_max_scale, data, scales, widths, **options)

    return PublicCall(_named(name, given), 2 * rows * cols, make)


def normalize(name: str, rows: int, cols: int, *, given: bool, back: bool = False) -> PublicCall:
    """Return the conversion from e4m3fn to e4m3fnuz, or ``back``."""
    to, function = torch.float8_e4m3fnuz, fp8core.normalize_e4m3fn_to_e4m3fnuz
    if back:
        to, function = torch.float8_e4m3fn, fp8core.normalize_e4m3fnuz_to_e4m3fn

    def make() -> Run:
        data, scale = fp8core.quantize(normal(rows, cols), dtype="float8_e4m3fnuz" if back else "float8_e4m3fn")
        options = {"out": torch.empty_like(data).view(to)} if given else {}
        return partial(function, data, scale, **options)

    return PublicCall(_named(name, given), 2 * rows * cols, make)


def host_calls() -> Iterator[PublicCall]:
    """Yield a call of each public function, with and without given results; kernels take less time than the calls.

    The names are those in the records, by which baselines and goals refer to them.
    """
    m, k, n = 16, 1024, 1024
    for given in (False, True):
        yield quantize("quantize", "token", m, k, given=given)
        yield quantize("quantize per tensor", "tensor", m, k, given=given)
        yield quantize("quantize, scale given", "static", m, k, given=given)
        yield quantize("quantize 1x128", "1x128", m, k, given=given)
        yield dequantize("dequantize", m, k, given=given)
        yield norm("rms_norm_quant", m, k, residual=False, given=given)
        yield norm("rms_norm_quant, residual", m, k, residual=True, given=given)
        yield silu("silu_and_mul_quant", "token", m, k, given=given)
        for rows in (m, 80):
            yield product(f"scaled_mm m={rows}", "row", rows, n, k, stored=False, given=given)
            yield linear(f"linear m={rows}", rows, n, k, prepared=False, given=given)
            yield linear(f"Fp8Linear m={rows}", rows, n, k, prepared=True, given=given)
        yield product(f"scaled_mm_nt m={m}", "row", m, n, k, stored=True, given=given)
        yield product(f"scaled_mm_nt m={m}, 1x128 x 128x128", "block", m, n, k, stored=True, given=given)
        yield requantize("requantize_with_max_scale", 256, k, given=given)
        yield normalize("normalize_e4m3fn_to_e4m3fnuz", 256, k, given=given)
        yield normalize("normalize_e4m3fnuz_to_e4m3fn", 256, k, given=given, back=True)
    yield PublicCall("per_tensor_dequantize", 3 * m * k, lambda: _per_tensor(m, k))
    yield PublicCall("convert_to_channelwise", 4 * 256, _channelwise)
    yield PublicCall("all_close_1d, which waits", 4 * m, _all_close)


def _per_tensor(rows: int, cols: int) -> Run:
    data, scale = fp8core.quantize(normal(rows, cols), group_shape=PER_TENSOR)
    return partial(fp8core.per_tensor_dequantize, data, scale)


def _all_close() -> Run:
    return partial(fp8core.all_close_1d, torch.ones(16, device=DEVICE))


def _channelwise() -> Run:
    return partial(fp8core.convert_to_channelwise, torch.tensor((0.01, 0.02), device=DEVICE), [128, 128])


def gpu_calls(width: int = 4096, rows: tuple[int, ...] = ROWS) -> Iterator[PublicCall]:
    """Yield quantization, producers, products and layers, all with given results, and layers also without."""
    n, k = width + width // 2, width
    for m in (1, 64, width):
        for mode in MODES:
            yield quantize(f"quantize {mode} {m}x{k}", mode, m, k, given=True)
        yield norm(f"rms_norm_quant {m}x{k}", m, k, residual=False, given=True)
        yield norm(f"rms_norm_quant, residual {m}x{k}", m, k, residual=True, given=True)
        for mode in ("token", "1x128"):
            yield silu(f"silu_and_mul_quant {mode} {m}x{k}", mode, m, k, given=True)
    for mode in SCALES:
        for m in rows:
            yield product(f"scaled_mm_nt {mode} {m}x{n}x{k}", mode, m, n, k, stored=True, given=True)
    for m in rows:
        yield linear(f"Fp8Linear {m}x{n}x{k}", m, n, k, prepared=True, given=True)
        yield linear(f"Fp8Linear {m}x{n}x{k}", m, n, k, prepared=True, given=False)
    yield dequantize(f"dequantize {n}x{k}", n, k, given=True)
    yield requantize(f"requantize_with_max_scale {n}x{k}", n, k, given=True)
    yield normalize(f"normalize_e4m3fn_to_e4m3fnuz {n}x{k}", n, k, given=True)


def calls_of(kind: str, short: bool) -> list[PublicCall]:
    """Return the calls of a kind, "gpu" or "host"; ``short`` selects small GPU calls that only show that they run."""
    if kind == "host":
        return list(host_calls())
    return list(gpu_calls(256, (1, 16, 80)) if short else gpu_calls())
