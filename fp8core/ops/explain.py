"""Which kernel a call would get, and why; what a device can do. Both ask the tables that calls ask."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from fp8core.core.explaining import explanation_of
from fp8core.errors import DeviceError
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.quantize import QUANTIZE
from fp8core.ops.linear import linear
from fp8core.ops.producers import rms_norm_quant, silu_and_mul_quant
from fp8core.ops.quantize import dequantize, quantize
from fp8core.ops.scaled_mm import scaled_mm, scaled_mm_nt
from fp8core.ops.weights import (
    all_close_1d,
    convert_to_channelwise,
    normalize_e4m3fn_to_e4m3fnuz,
    normalize_e4m3fnuz_to_e4m3fn,
    per_tensor_dequantize,
    requantize_with_max_scale,
)
from fp8core.problem import (
    BLOCK,
    BLOCK_128,
    GROUP_128,
    HOST,
    PER_TENSOR,
    PER_TOKEN,
    Granularity,
    GroupShape,
    Quantize,
    ScaledMm,
    Target,
    native_e4m3,
)
from fp8core.runtime import device as devices
from fp8core.table import Explanation, Table

_EXPLAINED: Final[tuple[Callable[..., Any], ...]] = (
    quantize,
    dequantize,
    rms_norm_quant,
    silu_and_mul_quant,
    scaled_mm,
    scaled_mm_nt,
    linear,
    requantize_with_max_scale,
    convert_to_channelwise,
    per_tensor_dequantize,
    normalize_e4m3fn_to_e4m3fnuz,
    normalize_e4m3fnuz_to_e4m3fn,
    all_close_1d,
)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Return the problem that a call poses and every kernel of its table, in the order of preference.

    Nothing runs and nothing is compiled: the call goes its way up to the choice of a kernel.

    Args:
        function: an operation of fp8core, or an `Fp8Linear`.
        *args: the call's arguments.
        **kwargs: the call's keyword arguments.

    Returns:
        For each kernel a verdict: "chosen", "able", "not preferred" (able, and measured to be slower than another),
        "unable" or "unknown" (only a library on the device can tell), with the reason.

    Raises:
        TypeError: the function is none of fp8core's that choose among kernels, or does not take the arguments.
        Fp8Error: what the call itself would refuse.

    Example:
        >>> import numpy as np, fp8core
        >>> fp8core.explain(fp8core.quantize, np.ones((2, 32), np.float32)).chosen
        'host'
    """
    if function in _EXPLAINED:
        return explanation_of(function, *args, **kwargs)
    own = getattr(function, "explain", None)
    if own is None:
        known = ", ".join(known.__name__ for known in _EXPLAINED)
        raise TypeError(f"explain needs one of {known} or an Fp8Linear, got {function!r}")
    explanation: Explanation = own(*args, **kwargs)
    return explanation


class Capability(NamedTuple):
    """Whether something runs on a kernel made for it, and which one, or why not."""

    able: bool
    reason: str


def example_product(
    target: Target,
    scale_a: Granularity = "tensor",
    scale_b: Granularity = "tensor",
    *,
    m: int = 256,
    n: int = 4096,
    k: int = 4096,
    a: str = "",
    b: str = "",
    out: str = "bfloat16",
    bias: str = "",
) -> ScaledMm:
    """Return a product of aligned matrices as a problem: made without arrays, for any target."""
    native = native_e4m3(target)
    strides_a = {"tensor": (0, 0), "row": (1, 0), "group": (1, m)}[scale_a]
    groups = -(-k // BLOCK)
    strides_b = {"tensor": (0, 0), "row": (1, 0), "group": (groups, 1), "block": (groups, 1)}[scale_b]
    return ScaledMm(
        target,
        m,
        n,
        k,
        a or native,
        b or native,
        out,
        scale_a,
        scale_b,
        strides_a,
        strides_b,
        bias,
        out.startswith("float8"),
        False,
        True,
        False,
        k,
        k,
        n,
        operands_alignment(k, n),
    )


def operands_alignment(k: int, n: int) -> int:
    """Return the alignment of contiguous matrices at aligned addresses (a 16-bit result)."""
    bits = 16 | k | 2 * n
    return bits & -bits


def example_quantize(target: Target, group_shape: GroupShape, *, static: bool = False) -> Quantize:
    """Return the quantization of aligned bfloat16 rows as a problem."""
    return Quantize(target, "bfloat16", native_e4m3(target), group_shape, static, "float32", "k", 4096, 16)


_FALLBACK = "simt"


def capabilities(device: int | Target | None = None) -> Mapping[str, Capability]:
    """Return what runs on a device on kernels made for it: feature -> (able, the kernel or why not).

    Products that are not able here still run, on the kernel that dequantizes and multiplies.

    Args:
        device: an ordinal, a target, or None for the current GPU (the host where there is none).
    """
    target = target_of(device)
    found: dict[str, Capability] = {}
    for name, group_shape, static in (
        ("quantize_static", PER_TENSOR, True),
        ("quantize_per_tensor", PER_TENSOR, False),
        ("quantize_per_token", PER_TOKEN, False),
        ("quantize_1x128", GROUP_128, False),
        ("quantize_128x128", BLOCK_128, False),
    ):
        found[name] = _capability(QUANTIZE, example_quantize(target, group_shape, static=static), "")
    pairs: tuple[tuple[str, Granularity, Granularity], ...] = (
        ("scaled_mm_per_tensor", "tensor", "tensor"),
        ("scaled_mm_per_token", "row", "row"),
        ("scaled_mm_mixed", "tensor", "row"),
        ("scaled_mm_block", "group", "block"),
    )
    for name, scale_a, scale_b in pairs:
        found[name] = _capability(SCALED_MM, example_product(target, scale_a, scale_b), _FALLBACK)
    found["scaled_mm_decode"] = _capability(SCALED_MM, example_product(target, "row", "row", m=1), _FALLBACK)
    found["grouped_mm"] = Capability(False, "fp8core has no grouped product")
    found["sparse_mm"] = Capability(False, "fp8core has no 2:4 sparse product")
    return MappingProxyType(found)


def target_of(device: int | Target | None) -> Target:
    """Return the target that is meant: an ordinal's, the current GPU's, or the host where there is no GPU."""
    if isinstance(device, Target):
        return device
    if devices.count() == 0:
        if device is not None:
            raise DeviceError(f"device needs a GPU, got {device} on a machine without one: {devices.why_none()}")
        return HOST
    return devices.target(devices.current() if device is None else device)


def _capability(table: Table[Any], problem: Any, fallback: str) -> Capability:
    explanation = table.explain(problem)
    if explanation.chosen is not None and explanation.chosen != fallback:
        return Capability(True, explanation.chosen)
    reasons = [f"{v.kernel}: {v.reason}" for v in explanation.verdicts if v.status in ("unable", "unknown")]
    return Capability(False, "; ".join(reasons))
