"""`tune_shapes`: tunes the products of linear layers, given only their shapes."""

from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NamedTuple, TypedDict, Unpack

from fp8core import timing
from fp8core.core.checks import is_one_of, whole_numbers
from fp8core.core.explaining import ArraySpec
from fp8core.dtypes import HIGH_PRECISION
from fp8core.errors import ScaleError, ShapeError
from fp8core.interop import dtype_name
from fp8core.ops.explain import explain
from fp8core.ops.linear import linear
from fp8core.ops.linear_scratch import aligned_strides
from fp8core.ops.quantized import Quantized
from fp8core.ops.targets import target_of
from fp8core.problem import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, GroupShape, ScaledMm
from fp8core.target import Target, native_e4m3
from fp8core.tuning.measuring import Stopwatch, product_of, refuse_captures, timed
from fp8core.tuning.values import Tuning

Scheme = Literal["channel", "tensor", "block"]
Progress = Callable[[Tuning, int, int], object]
"""Called with a tuning, the number of products that are tuned, and the number of all."""
SCHEMES: Final[dict[str, tuple[GroupShape, GroupShape]]] = {
    "channel": (PER_TOKEN, PER_TOKEN),
    "tensor": (PER_TENSOR, PER_TENSOR),
    "block": (GROUP_128, BLOCK_128),
}
"""The group shapes of the input and of the weight."""


def tune_shapes(
    shapes: Iterable[tuple[int, int, int]],
    *,
    scheme: Scheme = "channel",
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    bias: bool = False,
    device: int | str | Target | None = None,
    progress: Progress | None = None,
) -> tuple[Tuning, ...]:
    """Tune the products of linear layers by their shapes: `tune` without arrays.

    The products are those of `Fp8Linear`, with inputs and weights that are contiguous and aligned like new arrays of
    the frameworks.

    Args:
        shapes: triples (m, n, k): rows, output channels, and the shared axis. Repeated shapes are tuned once.
        scheme: "channel" (scales per token and per channel), "tensor", or "block" (1x128 and 128x128).
        dtype: the dtype of inputs and results.
        bias: whether the layers have a bias, in that dtype.
        device: the GPU, as for `capabilities`; None means the current one.
        progress: called after each product with its tuning, the number of products done, and their total number.

    Returns:
        A tuning for each product.

    Raises:
        ShapeError: a shape does not have three positive numbers.
        ScaleError: the scheme is not one of these.
        DTypeError: the dtype is not one of these.
        DeviceError: there is no such device.
        TuningError: CuPy's current stream is being captured into a graph.
        UnsupportedProblemError: the device is not a GPU of this machine, or no kernel can run a product.

    Examples:
        >>> import fp8core
        >>> fp8core.tune_shapes([(16, 4096)])
        Traceback (most recent call last):
        fp8core.errors.ShapeError: shapes needs triples (m, n, k) of numbers from 1, got (16, 4096)
    """
    try:
        listed = tuple(shapes)
    except TypeError as error:
        raise _no_triples(shapes) from error
    return tuned([layer_product(shape, scheme, dtype, bias=bias, device=device) for shape in listed], progress)


class LayerOptions(TypedDict, total=False):
    """The options of `layer_call` that belong to the layer."""

    bias: bool
    static: bool
    """Whether the scale of the input is given."""
    weight_dtype: str | None
    """The FP8 format of the weight; None, the default, for the E4M3 format that the device multiplies."""


class LayerCall(NamedTuple):
    """A call of `linear` on arrays without memory."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    target: Target


def layer_call(
    shape: tuple[int, int, int],
    scheme: str,
    dtype: str,
    *,
    bias: bool = False,
    static: bool = False,
    weight_dtype: str | None = None,
    device: int | str | Target | None = None,
) -> LayerCall:
    """Return the call of a linear layer of a shape (m, n, k), whose arrays are contiguous and aligned.

    The rows of its weight are padded to a multiple of 16 bytes, as layers on a GPU pad them. `LayerOptions` says what
    ``bias``, ``static`` and ``weight_dtype`` are.

    Raises:
        ShapeError: the shape does not have three positive numbers.
        ScaleError: the scheme is not one of `SCHEMES`.
        DTypeError: the dtype is not float32, float16 or bfloat16.
    """
    extents = whole_numbers(shape)
    if extents is None or len(extents) != 3 or min(extents) < 1:
        raise _no_triples(shape)
    check_scheme(scheme)
    dtype_name(dtype, "dtype", HIGH_PRECISION)
    m, n, k = extents
    target = target_of(device, "device")
    of_x, of_weight = SCHEMES[scheme]
    scale_shape = (1,) if of_weight == PER_TENSOR else of_weight.scale_shape(n, k)
    codes = ArraySpec((n, k), weight_dtype or native_e4m3(target), strides=aligned_strides((n, k)))
    weight = Quantized(codes, ArraySpec(scale_shape, "float32"), of_weight)
    given: dict[str, Any] = {"bias": ArraySpec((n,), dtype)} if bias else {}
    if static:
        of_x, given["input_scale"] = PER_TENSOR, ArraySpec((1,), "float32")
    return LayerCall((ArraySpec((m, k), dtype), weight), {"group_shape": of_x, **given}, target)


def layer_product(
    shape: tuple[int, int, int],
    scheme: str,
    dtype: str,
    *,
    device: int | str | Target | None = None,
    **options: Unpack[LayerOptions],
) -> ScaledMm:
    """Return the product of a linear layer, whose weight may be read early; arguments and errors as of `layer_call`."""
    call = layer_call(shape, scheme, dtype, device=device, **options)
    asked = explain(linear, *call.arguments, target=call.target, **call.keywords)
    return product_of(asked.problem)._replace(prefetch_weight=True)


def check_scheme(scheme: object) -> None:
    """Refuse a scheme that is not one of `SCHEMES`.

    Raises:
        ScaleError: it is not.
    """
    if not is_one_of(scheme, SCHEMES):
        raise ScaleError(f"scheme needs one of {', '.join(SCHEMES)}, got {scheme!r}")


def _no_triples(got: object) -> ShapeError:
    return ShapeError(f"shapes needs triples (m, n, k) of numbers from 1, got {got!r}")


def tuned(
    products: Iterable[ScaledMm], progress: Progress | None, times: Stopwatch | None = None
) -> tuple[Tuning, ...]:
    """Time the candidates of each product, and apply the fastest."""
    wanted = list(dict.fromkeys(products))
    refuse_captures()
    found = []
    for done, product in enumerate(wanted, 1):
        tuning = timed(product, times or timing.times)
        tuning.apply()
        found.append(tuning)
        if progress is not None:
            progress(tuning, done, len(wanted))
    return tuple(found)
