"""A call in an XLA program: the text that describes it in the program, and the launch that is prepared from the text.

The text holds everything but addresses. So a program that was exported, or that comes from the compilation cache, runs
in a process that has not traced it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from numbers import Number
from operator import itemgetter
from typing import Any, Final, NamedTuple

from fp8core.core import prefetch
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.checks import whole_number
from fp8core.core.operation import Operation
from fp8core.core.specs import TensorSpec
from fp8core.dtypes import ITEMSIZE
from fp8core.errors import BackendError, LayoutError
from fp8core.interop import dtype_name
from fp8core.interop.dlpack import row_major
from fp8core.ops.all_close import ALL_CLOSE_CALLS
from fp8core.ops.dequantize import DEQUANTIZE_CALLS
from fp8core.ops.fnuz import NORMALIZE_CALLS
from fp8core.ops.grouped_mm import GROUPED_MM_CALLS
from fp8core.ops.layer import QUANTIZE_WEIGHT_CALLS
from fp8core.ops.linear import LINEAR_CALLS
from fp8core.ops.moe_permute import PERMUTE_CALLS
from fp8core.ops.moe_unpermute import UNPERMUTE_CALLS
from fp8core.ops.producers import NORM_CALLS, SILU_CALLS
from fp8core.ops.quantize import QUANTIZE_CALLS
from fp8core.ops.scaled_mm import SCALED_MM_CALLS, SCALED_MM_NT_CALLS
from fp8core.ops.shards import EXPAND_CALLS, REQUANTIZE_CALLS
from fp8core.problem import BLOCK
from fp8core.runtime.limits import SCRATCH_ALIGNMENT
from fp8core.target import Target
from fp8core.w8a8.operations import VARIANTS

OPERATIONS: Final[dict[str, Operation]] = {
    "quantize": QUANTIZE_CALLS,
    "dequantize": DEQUANTIZE_CALLS,
    "rms_norm_quant": NORM_CALLS,
    "silu_and_mul_quant": SILU_CALLS,
    "scaled_mm": SCALED_MM_CALLS,
    "scaled_mm_nt": SCALED_MM_NT_CALLS,
    "grouped_scaled_mm_nt": GROUPED_MM_CALLS,
    "linear": LINEAR_CALLS,
    "moe_permute": PERMUTE_CALLS,
    "moe_unpermute": UNPERMUTE_CALLS,
    "requantize_with_max_scale": REQUANTIZE_CALLS,
    "convert_to_channelwise": EXPAND_CALLS,
    "normalize": NORMALIZE_CALLS,
    "all_close_1d": ALL_CLOSE_CALLS,
}
"""The operations by their names in programs."""
NAMES: Final = {
    **{operation: name for name, operation in OPERATIONS.items()},
    QUANTIZE_WEIGHT_CALLS: "quantize",
    **{variant: name for name, variants in VARIANTS.items() for variant in variants},
}
"""The names of these operations, and of their variants that other functions declare with other operand names."""
ALIGNMENT: Final = 16
"""The alignment of addresses in programs, in bytes: no kernel needs more, and XLA's own buffers have more."""
FORM: Final = 1
"""The version of the text's form; texts of another form are refused."""

Layout = tuple[int, ...]
"""The axes of an array, minor to major (the least stride first), as in XLA."""


class Placed(NamedTuple):
    """An operand of a call, without memory."""

    dtype: str
    shape: tuple[int | None, ...]
    """None stands for an extent that is only known when the program runs."""
    layout: Layout


class Problem(NamedTuple):
    """A call in a program."""

    name: str
    operands: tuple[Placed | None, ...]
    options: Any
    tuned: int = 0
    """How often tunings had changed the choice of kernels when it was traced: a program keeps its kernels."""

    def text(self, scratch: int | None) -> str:
        """Return the text of a call with ``scratch`` bytes of scratch; None if they are not known."""
        operands = [None if x is None else [x.dtype, x.shape, x.layout] for x in self.operands]
        return json.dumps([FORM, self.name, operands, self.options, self.tuned, scratch], separators=(",", ":"))

    @property
    def fixed(self) -> bool:
        """Whether all extents are known."""
        return all(x is None or None not in x.shape for x in self.operands)

    def with_shapes(self, shapes: Sequence[tuple[int, ...]]) -> "Problem":
        """Return the problem with the given shapes of the operands."""
        given = iter(shapes)
        return self._replace(operands=tuple([x and x._replace(shape=next(given)) for x in self.operands]))


def parse(text: bytes) -> tuple[Problem, int | None]:
    """Return the problem that a text describes, and the bytes of the scratch.

    Raises:
        BackendError: a later release wrote the text, in another form.
    """
    form, name, *rest = json.loads(text)
    if form != FORM or name not in OPERATIONS:
        raise BackendError(f"the program needs another release of fp8core, got a call {name!r} of form {form!r}")
    operands, options, tuned, scratch = rest
    placed = tuple([None if x is None else Placed(x[0], tuple(x[1]), tuple(x[2])) for x in operands])
    return Problem(name, placed, _tuples(options), tuned), scratch


def _tuples(x: Any) -> Any:
    return tuple([_tuples(one) for one in x]) if isinstance(x, list) else x


def plain(option: Any) -> Any:
    """Return a checked option in terms that JSON can hold: dtypes by their names, numbers as Python numbers.

    Equal options become the same text: a group shape (1.0, 128.0) becomes (1, 128).
    """
    if isinstance(option, tuple | list):
        return tuple([plain(one) for one in option])
    if option is None or isinstance(option, bool):
        return option
    if isinstance(option, str):
        return str.__str__(option)  # of an Enum, too, which calls itself something else
    if isinstance(option, int):
        return int(option)
    if isinstance(option, float):
        return int(option) if option.is_integer() else float(option)
    item = getattr(option, "item", None)
    if item is None and isinstance(option, Number):  # it equals a flag or a whole number, as the option is checked
        return whole_number(option)
    return dtype_name(option) if item is None or isinstance(option, type) else plain(item())


def strides_of(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense array of this layout."""
    strides, step = [0] * len(shape), 1
    for axis in layout:
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def layout_of(array: NewArray) -> Layout:
    """Return the layout of a result."""
    strides = row_major(array.shape) if array.strides is None else array.strides
    return tuple(sorted(range(len(strides)), key=lambda axis: (strides[axis], -axis)))


def layout_of_operand(name: str, at: int, shapes: Mapping[int, tuple[Any, ...]]) -> Layout:
    """Return the layout that a call requests for the operand at position ``at``; XLA copies operands of another layout.

    Scales by groups of k are requested in the layout that kernels read, with contiguous rows (``scale_layout="mn"``); a
    matrix b and its scale as transposes of row-major arrays, which is how weights are stored.
    """
    shape = shapes[at]
    axes = tuple(reversed(range(len(shape))))
    if 0 in shape:  # XLA divides by zero where it has to transpose an array without elements
        return axes
    if name == "scaled_mm" and at in (1, 3) and len(shape) == 2:
        return 0, 1
    scale = {"scaled_mm": 2, "scaled_mm_nt": 2, "grouped_scaled_mm_nt": 2, "linear": 4, "moe_permute": 1}.get(name)
    first = shapes.get(0)
    if at == scale and len(shape) > 1 and first and shape[-1] > 1 and shape[-1] == -(-first[-1] // BLOCK):
        return (*axes[1:], len(shape) - 1)
    return axes


def specs_of(problem: Problem, operation: Operation, target: Target) -> list[TensorSpec | None]:
    """Return the specs of the operands of a problem whose extents are all known."""
    return [
        None if x is None else TensorSpec(name, x.dtype, x.shape, strides_of(x.shape, x.layout), target, ALIGNMENT)  # type: ignore[arg-type]
        for x, name in zip(problem.operands, operation.operands, strict=True)
    ]


class Prepared:
    """A call that is planned for a device; it is launched on a stream with the addresses that XLA gives."""

    def __init__(self, problem: Problem, target: Target) -> None:
        operation = OPERATIONS[problem.name]
        self.target = target
        self.described: Described = operation.describe(specs_of(problem, operation, target), problem.options)
        planned: Planned = self.described.plan()
        self.launch: Callable[..., None] | None = planned.launch
        self.scratch_bytes = planned.scratch_bytes
        self.takes_scratch = operation.scratch
        arguments = [at for at, x in enumerate(problem.operands) if x is not None]
        results = sorted(self.described.results)
        places = {at: i for i, at in enumerate(arguments)}
        places.update((at, len(arguments) + i) for i, at in enumerate(results))
        nothing = len(arguments) + len(results)
        self.results = len(results)
        self.count = nothing
        """The number of arguments and results: the index of the 0 that stands for operands that are not given."""
        self._pick = itemgetter(*[places.get(at, nothing) for at in range(len(operation.operands))])
        self._spans = [(places[at], _bytes(self.described.results[at])) for at in results]
        self._watched = prefetch.applies(target)

    def __call__(self, stream: int, addresses: list[int]) -> None:
        """Launch the call.

        Args:
            stream: the stream to launch on; 0 on the host.
            addresses: of the arguments, of the results, and of the scratch if there is one. The list is modified.

        Raises:
            LayoutError: an address is not a multiple of `ALIGNMENT`, which plans assume.
        """
        launch = self.launch
        if launch is None:
            return
        scratch = 0
        if len(addresses) > self.count:
            scratch = -(-addresses.pop() // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        bits = 0
        for address in addresses:
            bits |= address
        if bits % ALIGNMENT and self.target.platform != "host":
            raise LayoutError(f"arrays in a program of JAX need addresses at multiples of {ALIGNMENT}, got {bits:#x}")
        announced = prefetch.NO_WEIGHTS
        if self._watched and prefetch.WATCHED.starts:
            written = [(addresses[at], addresses[at] + size) for at, size in self._spans]
            announced = prefetch.announce_write(written, stream)
        addresses.append(0)
        try:
            if self.takes_scratch:
                launch(stream, *self._pick(addresses), scratch)
            else:
                launch(stream, *self._pick(addresses))
        finally:
            announced.end()


def _bytes(array: NewArray) -> int:
    return prod(array.shape) * ITEMSIZE[array.dtype]
