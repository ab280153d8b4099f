"""Makes torch.compile and torch.export trace operators in place of calls.

Once `install` has run, torch.compile traces the Python code of the public functions, and an operator where they call an
`Operation`. So traced and eager calls share one code path for their arguments. Eager calls have no extra cost.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from fp8core import interop, ops, w8a8
from fp8core.core import checks
from fp8core.core.operation import Interned, Operation, float32_number
from fp8core.core.scale_shapes import is_one_number
from fp8core.errors import DeviceError, DTypeError, LayoutError
from fp8core.interop.eager import skip_frames, stand_in, traceable
from fp8core.ops import all_close
from fp8core.ops.layer_checks import State
from fp8core.ops.quantize import quantize_by
from fp8core.ops.scaled_mm import product_by
from fp8core.problem import PER_TENSOR, GroupShape
from fp8core.torch.operators import OPERATIONS, OVERLOADS, declared, tracing
from fp8core.torch.schemas import OPERATORS, Operator, Overload

FUNCTIONS: Final = (
    ops.quantize,
    ops.dequantize,
    ops.rms_norm_quant,
    ops.silu_and_mul_quant,
    ops.scaled_mm,
    ops.scaled_mm_nt,
    ops.grouped_scaled_mm_nt,
    ops.linear,
    ops.moe_permute,
    ops.moe_unpermute,
    ops.Fp8Linear.__call__,
    ops.requantize_with_max_scale,
    ops.convert_to_channelwise,
    ops.normalize_e4m3fn_to_e4m3fnuz,
    ops.normalize_e4m3fnuz_to_e4m3fn,
    ops.per_tensor_dequantize,
    ops.all_close_1d,
    quantize_by,
    product_by,
    w8a8.scaled_fp8_quant,
    w8a8.cutlass_w8a8_scaled_mm,
    w8a8.rocm_per_tensor_w8a8_scaled_mm,
    w8a8.Fp8LinearOp.apply,
)
CONSTANTS: Final = (
    w8a8.cutlass_fp8_supported,
    w8a8.cutlass_block_fp8_supported,
    w8a8.cutlass_group_gemm_supported,
    w8a8.sparse_cutlass_supported,
)
"""Functions that ask the driver, which torch.compile cannot trace. Their answers are constants of a graph."""


def _stand_in(operator: Operator, index: int) -> Callable[[tuple[Any, ...], Any, object], tuple[Sequence[Any], Any]]:
    """Return the stand-in for calls of an operation: it calls the operator's overload for the operands given."""
    operation = OPERATIONS[operator.name][index]
    names = tuple(map(str, operation.operands))  # dynamo of torch 2.11 takes no subclass of str
    passed = [set(overload.passed) for overload in operator.overloads]
    deciding = sorted(frozenset[int]().union(*passed) - passed[0].intersection(*passed))
    given_at = operator.options.index(None) if None in operator.options else None
    known = {
        (*(at in overload.passed for at in deciding), overload.given, bool(overload.copied)): (
            overload,
            OVERLOADS[operator.name, overload.name],
        )
        for overload in operator.overloads
    }
    same = {pair for overload in operator.overloads for pair in overload.copied}

    def call(operands: tuple[Any, ...], options: Any, stream: object) -> tuple[Sequence[Any], Any]:
        if stream is not None:
            raise DeviceError("stream needs to be left out while torch traces a call: the graph has streams of its own")
        refusal = _refused_derivative(names[0])
        if refusal is not None:
            raise LayoutError(refusal)
        if type(options) is Interned:
            options = options.options
        if torch.compiler.is_dynamo_compiling():
            for name, x in (*zip(names, operands, strict=True), *operator.numbers(options)):
                _refuse_numpy_numbers(x, name)
        arrays = list(operands)
        for at in operation.numbers:
            arrays[at] = _array(arrays[at], operands[0], names[at])
        in_place = False
        for result, source in same:
            if arrays[result] is arrays[source]:
                arrays[result], in_place = None, True
        given = given_at is not None and options[given_at]
        overload, run = known[(*[arrays[at] is not None for at in deciding], given, in_place)]
        for at in overload.out:
            interop.check_writable(arrays[at], names[at])
        tracing(operator.name, index)
        made = run(*operator.pack(overload, arrays, options))
        return _with_results(overload, arrays, made), _note(operator, overload, arrays, options)

    return call


def _refuse_numpy_numbers(x: Any, name: str) -> None:
    """Refuse numbers of NumPy, also in a sequence: torch.compile traces them as 0-d arrays without a known value."""
    if isinstance(x, tuple | list):
        for item in x:
            _refuse_numpy_numbers(item, name)
    elif type(x).__module__ == "numpy" and getattr(x, "shape", None) == ():
        raise DTypeError(
            f"{name} needs a Python number while torch traces a call, got a NumPy number or a 0-d array: "
            "convert it outside of the compiled function"
        )


def _traced_number(x: Any, name: str) -> float:
    """Stand in for `checks.number`: to torch.compile, numbers of NumPy are arrays."""
    skip_frames()
    _refuse_numpy_numbers(x, name)
    known = interop.scalar(x)
    if known is None:
        raise checks.not_a_number(x, name)
    return known


def _refused_derivative(name: str) -> str | None:
    """Return why a traced call inside torch.func's grad or jvp is refused, or None: it would return zeros."""
    for level in torch._C._functorch.get_interpreter_stack() or ():
        transform = level.key().name.lower()
        if transform in ("grad", "jvp"):
            return (
                f"{name} needs to be outside of torch.func's {transform}: operators have no gradients, "
                "and layers of fp8core.torch have them only by backward()"
            )
    return None


# What torch.compiler.assume_constant_result sets:
_refused_derivative._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _array(x: Any, first: torch.Tensor, name: str) -> Any:
    """Return a number as a tensor ``[1]`` on the device of the first operand, and anything else as it is."""
    number = None if x is None or isinstance(x, torch.Tensor) else float32_number(x, name)
    return x if number is None else torch.full((1,), number, dtype=torch.float32, device=first.device)


def _with_results(overload: Overload, arrays: list[Any], made: Any) -> list[Any]:
    """Return the operands, with the results of an overload in their positions."""
    for result, source in overload.copied:
        arrays[result] = arrays[source]
    for at, array in zip(overload.new, (made,) if len(overload.new) == 1 else made or (), strict=True):
        arrays[at] = array
    return arrays


def _note(operator: Operator, overload: Overload, arrays: list[Any], options: Any) -> Any:
    """Return a call's note. For a quantization it is the group shape; a given scale of one number is per tensor."""
    if operator.counts:
        return arrays[0].shape[0]
    if operator.scale is None:
        return None
    if overload.given and is_one_number(arrays[operator.scale].shape):
        return PER_TENSOR
    return checks.group_shape(options[1])


def _traced_call(
    self: Operation, operands: tuple[Any, ...], options: Any, stream: object = None, weights: object = None
) -> tuple[Sequence[Any], Any]:
    """Stand in for `Operation.__call__`: torch.compile inlines this function instead."""
    skip_frames()  # a call that is refused here breaks the graph and runs eagerly: its frames must not be traced
    del weights
    assert self.traced is not None
    return self.traced(operands, options, stream)


def _traced_reinterpret(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Stand in for `interop.reinterpret`, whose search for the framework of ``x`` cannot be traced."""
    return x.detach().view(getattr(torch, dtype))


def _traced_read(x: object, flag: torch.Tensor, stream: object) -> Any:
    """Stand in for the reading of a flag: torch.compile makes it a symbol, on which Python code cannot branch."""
    del x, stream
    return flag.view(torch.int32).item() != 0


def _traced_taking(self: ops.Fp8Linear, state: State, group_shape: GroupShape | None) -> Any:
    """Stand in for `Fp8Linear._taking`, which caches its result in the layer: a trace must not change a layer."""
    del self
    return state.options._replace(x_group=group_shape)


def _tracing() -> bool:
    """Return whether torch traces this call without Dynamo: a dispatch mode is active, and tensors are fake."""
    return torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


def _without_dynamo(
    operation: Operation, operands: tuple[Any, ...], options: Any, stream: object
) -> tuple[Sequence[Any], Any] | None:
    """Stand in for a call that torch traces without Dynamo."""
    if operation.traced is None or not _tracing():
        return None
    return operation.traced(operands, options, stream)


def _read_without_dynamo(flag: Any) -> bool | None:
    """Stand in for the reading of a flag that torch traces without Dynamo."""
    return _traced_read(None, flag, None) if _tracing() else None


def install() -> None:
    """Make the public functions traceable by torch."""
    for operator in OPERATORS:
        for index, operation in enumerate(OPERATIONS[operator.name]):
            operation.traced = _stand_in(operator, index)
    Operation.stand_ins["torch"] = _without_dynamo
    all_close.READING["torch"] = _read_without_dynamo
    for function in FUNCTIONS:
        traceable(function)
    for question in CONSTANTS:  # as torch.compiler.assume_constant_result does, which would import torch._dynamo
        question._dynamo_marked_constant = True  # type: ignore[attr-defined]
    stand_in(Operation.__call__, _traced_call)
    stand_in(ops.Fp8Linear._taking, _traced_taking)
    stand_in(checks.number, _traced_number)
    stand_in(all_close.read_flag, _traced_read)
    stand_in(interop.reinterpret, _traced_reinterpret)
    stand_in(interop.declared, declared)
