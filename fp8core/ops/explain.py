"""Explains which kernel a call would get, and what a device can do; both use the tables that calls use."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fp8core.core import checks
from fp8core.core.explaining import ArraySpec, ExplainRequest, explanation_of
from fp8core.core.product import RESULTS
from fp8core.core.scale_shapes import WEIGHT_GROUPS
from fp8core.dtypes import FORMATS, Fp8Name
from fp8core.errors import ScaleError
from fp8core.interop.names import dtype_name, function_name
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.grouped.table import GROUPED_MM
from fp8core.kernels.quantize import QUANTIZE
from fp8core.ops.all_close import all_close_1d
from fp8core.ops.dequantize import dequantize, per_tensor_dequantize
from fp8core.ops.example_problems import example_grouped, example_product, example_quantize
from fp8core.ops.fnuz import normalize_e4m3fn_to_e4m3fnuz, normalize_e4m3fnuz_to_e4m3fn
from fp8core.ops.grouped_mm import grouped_scaled_mm_nt
from fp8core.ops.layer import Fp8Linear
from fp8core.ops.linear import linear
from fp8core.ops.moe_permute import moe_permute
from fp8core.ops.moe_unpermute import moe_unpermute
from fp8core.ops.producers import rms_norm_quant, silu_and_mul_quant
from fp8core.ops.quantize import quantize
from fp8core.ops.quantized import Quantized
from fp8core.ops.scaled_mm import scaled_mm, scaled_mm_nt
from fp8core.ops.shards import convert_to_channelwise, requantize_with_max_scale
from fp8core.ops.targets import target_of
from fp8core.problem import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, Granularity, GroupShape
from fp8core.table import Explanation, Table
from fp8core.target import Target, native_e4m3
from fp8core.types import DType

_EXPLAINED: Final[tuple[Callable[..., Any], ...]] = (
    quantize,
    dequantize,
    rms_norm_quant,
    silu_and_mul_quant,
    scaled_mm,
    scaled_mm_nt,
    grouped_scaled_mm_nt,
    linear,
    moe_permute,
    moe_unpermute,
    requantize_with_max_scale,
    convert_to_channelwise,
    per_tensor_dequantize,
    normalize_e4m3fn_to_e4m3fnuz,
    normalize_e4m3fnuz_to_e4m3fn,
    all_close_1d,
)


def explain(
    function: Callable[..., Any], /, *args: Any, target: int | str | Target | None = None, **kwargs: Any
) -> Explanation:
    """Return the problem of a call, and the verdict on every kernel of its table, in the order of preference.

    Nothing runs and nothing is compiled: the call takes its usual path up to the choice of a kernel. Operands, also
    those of a `Quantized`, may be arrays, or only have a shape and a dtype: an `ArraySpec`, a ``jax.ShapeDtypeStruct``,
    a meta or fake tensor of torch.

    Args:
        function: an operation of fp8core, or an `Fp8Linear`.
        *args: the call's arguments.
        target: the device that all operands are assumed to be on: a `Target`, the ordinal of a GPU of this machine, or
            a name such as "sm_90" or "gfx942"; this machine need not have that device. None: the device of the arrays,
            or for a call without arrays the current GPU (the host if there is none).
        **kwargs: the call's keyword arguments.

    Returns:
        Explanation: a verdict on each kernel, with the reason: "chosen", "able", "not preferred" (able, and measured or
            estimated to be slower than another), "unable" or "unknown" (only a library on the device can tell).
            ``print`` it, or take ``.short`` for a line and ``.chosen`` for the name. The verdicts are on the problem,
            also where the result has no elements, so that the call runs no kernel.

    Raises:
        TypeError: the function is not one of fp8core that chooses among kernels, or does not take the arguments.
        DeviceError: there is no such target, or stream is not a stream.
        BackendError: cuBLASLt or hipBLASLt failed where it was asked, such as for lack of memory.
        Fp8Error: the call itself would refuse the shapes, dtypes, strides, scales or options. Memory is not checked:
            only the call refuses an ``out`` that overlaps another operand or is read-only.

    Examples:
        >>> import numpy as np, fp8core
        >>> fp8core.explain(fp8core.quantize, np.ones((2, 32), np.float32)).chosen
        'host'
        >>> x = fp8core.ArraySpec((16, 4096), "bfloat16")
        >>> weight = fp8core.Quantized(
        ...     fp8core.ArraySpec((8192, 4096), "float8_e4m3fn"), fp8core.ArraySpec((8192, 1), "float32"), (1, -1)
        ... )
        >>> fp8core.explain(fp8core.linear, x, weight, target="sm_90").short
        'Quantize: rowwise, Linear: overlapped, ScaledMm: sm90_decode'
    """
    if not isinstance(function, Fp8Linear) and not any(function is known for known in _EXPLAINED):
        known = ", ".join(known.__name__ for known in _EXPLAINED)
        raise TypeError(f"explain needs one of {known} or an fp8core.Fp8Linear, got {function_name(function)}")
    place = None if target is None else target_of(target, "target")
    request = ExplainRequest(place, lambda: target_of(None), kwargs.pop("stream", None))
    return explanation_of(function, *args, request=request, **kwargs)


_GROUPS: Final = {granularity: group for group, granularity in WEIGHT_GROUPS.items()}


def explain_product(
    m: int,
    n: int,
    k: int,
    *,
    a: Fp8Name | None = None,
    b: Fp8Name | None = None,
    out_dtype: DType = "bfloat16",
    scale_a: Granularity = "row",
    scale_b: Granularity = "row",
    target: int | str | Target | None = None,
    **keywords: Any,
) -> Explanation:
    """Return `explain` of ``scaled_mm_nt`` for contiguous matrices of these extents.

    Args:
        m: rows of a: tokens.
        n: output channels.
        k: the shared axis.
        a: the format of a; None is the target's E4M3.
        b: the format of the weight; None is the target's E4M3.
        out_dtype: the dtype of the result; an FP8 one has a scale.
        scale_a: "tensor", "row" (one per token) or "group" (1x128, in the layout of ``scale_layout="mn"``).
        scale_b: "tensor", "row" (one per output channel), "group" (1x128) or "block" (128x128).
        target: as for `explain`.
        **keywords: keyword arguments of `fp8core.scaled_mm_nt`, with an `ArraySpec` for each array.

    Raises:
        Fp8Error: the product itself would refuse the call, for example for scales that do not go together.

    Examples:
        >>> from fp8core.ops.explain import explain_product
        >>> explain_product(16, 4096, 4096, target="sm_90").chosen
        'sm90_decode'
    """
    place = target_of(target, "target")
    native = native_e4m3(place)
    group_strides = (1, m) if scale_a == "group" else None
    left = _quantized_spec(m, k, a or native, _group_of(scale_a, "scale_a"), group_strides)
    right = _quantized_spec(n, k, b or native, _group_of(scale_b, "scale_b"), None)
    if dtype_name(out_dtype, "out_dtype", RESULTS) in FORMATS:
        keywords.setdefault("out_scale", 1.0)
    return explain(scaled_mm_nt, left, right, target=place, out_dtype=out_dtype, **keywords)


def _group_of(granularity: Granularity, name: str) -> GroupShape:
    if not checks.is_one_of(granularity, _GROUPS):
        raise ScaleError(f"{name} needs one of {', '.join(_GROUPS)}, got {granularity!r}")
    return _GROUPS[granularity]


def _quantized_spec(
    rows: int, k: int, dtype: str, group: GroupShape, strides: tuple[int, int] | None
) -> Quantized[ArraySpec, ArraySpec]:
    data = ArraySpec((rows, k), dtype)
    shape = (1,) if group == PER_TENSOR else group.scale_shape(*data.shape)
    return Quantized(data, ArraySpec(shape, "float32", strides=strides), group)


class Capability(NamedTuple):
    """Whether a feature runs on a kernel made for it, and which kernel that is, or why there is none.

    Examples:
        >>> import fp8core
        >>> able, reason = fp8core.capabilities("sm_80")["sparse_mm"]
        >>> able, reason
        (False, 'fp8core has no 2:4 sparse product')
    """

    able: bool
    reason: str


def capabilities(device: int | str | Target | None = None) -> dict[str, Capability]:
    """Return which features of a device run on kernels made for them: feature -> (able, the kernel or why not).

    Products with ``able=False`` still run, on a fallback that takes any shape, format and pair of scales. For a device
    that this machine lacks, kernels of a BLAS library do not count, as it cannot be queried.

    Args:
        device: the ordinal of a GPU, a name such as "sm_90", a target, or None for the current GPU (the host if there
            is none).

    Raises:
        DeviceError: there is no such device.

    Examples:
        >>> import fp8core
        >>> fp8core.capabilities("sm_90")["scaled_mm_decode"]
        Capability(able=True, reason='sm90_decode')
        >>> fp8core.capabilities("sm_80")["scaled_mm_decode"].able
        False
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
        found[name] = _capability(QUANTIZE, example_quantize(target, group_shape, static=static))
    pairs: tuple[tuple[str, Granularity, Granularity], ...] = (
        ("scaled_mm_per_tensor", "tensor", "tensor"),
        ("scaled_mm_per_token", "row", "row"),
        ("scaled_mm_mixed", "tensor", "row"),
        ("scaled_mm_block", "group", "block"),
    )
    for name, scale_a, scale_b in pairs:
        found[name] = _capability(SCALED_MM, example_product(target, scale_a, scale_b), *_FALLBACKS)
    found["scaled_mm_decode"] = _capability(SCALED_MM, example_product(target, "row", "row", m=1), *_FALLBACKS)
    found["grouped_mm"] = _capability(GROUPED_MM, example_grouped(target), *_FALLBACKS)
    found["sparse_mm"] = Capability(False, "fp8core has no 2:4 sparse product")
    return found


_FALLBACKS: Final = ("generic_decode", "generic_mma", "generic_grouped")


def _capability(table: Table[Any], problem: Any, *fallbacks: str) -> Capability:
    explanation = table.explain(problem)
    if explanation.chosen is not None and explanation.chosen not in fallbacks:
        return Capability(True, explanation.chosen)
    reasons = [f"{v.kernel}: {v.reason}" for v in explanation.verdicts if v.status in ("unable", "unknown")]
    return Capability(False, "; ".join(reasons))
