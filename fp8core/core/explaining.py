"""Explains a call instead of making it: the call takes its usual path up to the point where it would be planned."""

from collections.abc import Callable, Sequence
from typing import Any

from fp8core.core.calls import Described
from fp8core.core.checks import whole_number, whole_numbers
from fp8core.core.specs import ALIGNMENT, TensorSpec
from fp8core.dtypes import ITEMSIZE
from fp8core.errors import LayoutError, ShapeError
from fp8core.interop import TensorView, dtype_name, stream_address
from fp8core.interop.dlpack import contiguous
from fp8core.interop.memoryless import without_memory
from fp8core.table import Explanation
from fp8core.target import HOST, Target


class ArraySpec:
    """An array without memory, for `fp8core.explain`: every operand of a call may be one.

    Args:
        shape: the extents, as a tuple or a list.
        dtype: its name, or a dtype of any framework.
        strides: in elements; row-major if left out.
        alignment: the power of two, in bytes, that its address is a multiple of. New arrays of every framework have
            32 or more on a GPU.

    Raises:
        ShapeError: the shape does not consist of whole numbers of at least 0.
        DTypeError: no operand of a call can have this dtype.
        LayoutError: strides is not one whole number for each axis; or the alignment is not a power of two, or is less
            than an element.

    Examples:
        >>> import fp8core
        >>> x = fp8core.ArraySpec((16, 4096), "bfloat16")
        >>> x
        ArraySpec((16, 4096), 'bfloat16')
        >>> fp8core.explain(fp8core.quantize, x, target="sm_90").chosen
        'rowwise'
    """

    __slots__ = ("alignment", "dtype", "shape", "strides")
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    alignment: int

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        *,
        strides: Sequence[int] | None = None,
        alignment: int = ALIGNMENT,
    ) -> None:
        self.dtype = dtype_name(dtype)
        extents = _listed(shape)
        if extents is None or any(extent < 0 for extent in extents):
            raise ShapeError(f"shape needs whole numbers of at least 0, got {shape!r}")
        steps = contiguous(extents) if strides is None else _listed(strides)
        if steps is None or len(steps) != len(extents):
            raise LayoutError(f"strides needs a whole number for each of {len(extents)} axes, got {strides!r}")
        self.shape, self.strides = extents, steps
        bytes_ = whole_number(alignment)
        if bytes_ is None or bytes_ < ITEMSIZE[self.dtype] or bytes_ & (bytes_ - 1):
            raise LayoutError(
                f"alignment needs a power of two of at least {ITEMSIZE[self.dtype]} bytes, got {alignment!r}"
            )
        self.alignment = min(bytes_, ALIGNMENT)

    @property
    def T(self) -> "ArraySpec":  # noqa: N802 - NumPy's name
        """The transpose over the same memory."""
        return ArraySpec(self.shape[::-1], self.dtype, strides=self.strides[::-1], alignment=self.alignment)

    def __repr__(self) -> str:
        strides = "" if self.strides == contiguous(self.shape) else f", strides={self.strides}"
        alignment = "" if self.alignment == ALIGNMENT else f", alignment={self.alignment}"
        return f"ArraySpec({self.shape}, {self.dtype!r}{strides}{alignment})"


def _listed(given: Any) -> tuple[int, ...] | None:
    return whole_numbers(given) if isinstance(given, tuple | list) else None


class ExplainRequest:
    """Passed as the stream of a call, makes the operation explain the call instead of making it.

    Args:
        target: the target that all operands are assumed to be on; None: the one that they are on.
        elsewhere: returns the target of a call whose operands are all specs.
        stream: the stream that the caller gave.
    """

    def __init__(
        self, target: Target | None = None, elsewhere: Callable[[], Target] = lambda: HOST, stream: object = None
    ) -> None:
        self.target, self.elsewhere, self.stream = target, elsewhere, stream

    def spec(self, x: object, name: str) -> TensorSpec | None:
        """Return the spec of an operand that has no memory, with `HOST` as a provisional target; None for others."""
        if isinstance(x, ArraySpec):
            return TensorSpec(name, x.dtype, x.shape, x.strides, HOST, x.alignment)
        known = without_memory(x, name)
        return None if known is None else TensorSpec(name, *known, HOST)

    def answered(
        self,
        views: Sequence[TensorView | None],
        specs: Sequence[TensorSpec | None],
        describe: Callable[[tuple[TensorSpec | None, ...]], Described],
    ) -> "Answered":
        """Return the exception that carries the answer to a call of these operands, which ``describe`` checks."""
        described = describe(self._placed(views, specs))
        if self.stream is not None:
            stream_address(self.stream)
        return Answered(self.answer(described))

    def answer(self, described: Described) -> Any:
        """Return what the caller asked for: the explanation of the call."""
        return described.explain()

    def _placed(
        self, views: Sequence[TensorView | None], specs: Sequence[TensorSpec | None]
    ) -> tuple[TensorSpec | None, ...]:
        target = self.target or next((view.target for view in views if view is not None), None) or self.elsewhere()
        kept = self.target is None
        return tuple(
            spec if spec is None or (kept and view is not None) else spec._replace(target=target)
            for view, spec in zip(views, specs, strict=True)
        )


class Answered(BaseException):
    """Raised to carry the answer of a request out of the public function that was called."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer


def answer_of(function: Callable[..., Any], request: ExplainRequest, *args: Any, **kwargs: Any) -> Any:
    """Return the answer of ``request`` to the call ``function(*args, **kwargs)``, which is checked and not made.

    The function must take ``stream`` and make one call of an `Operation`.
    """
    try:
        function(*args, **{**kwargs, "stream": request})
    except Answered as found:
        return found.answer
    raise AssertionError(f"{function} makes no call that can be explained")


def explanation_of(
    function: Callable[..., Any], *args: Any, request: ExplainRequest | None = None, **kwargs: Any
) -> Explanation:
    """Return which kernels the call ``function(*args, **kwargs)`` would get, and why: `answer_of` an explanation."""
    found: Explanation = answer_of(function, request or ExplainRequest(), *args, **kwargs)
    return found
