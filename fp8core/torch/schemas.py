"""Schemas of the torch operators, and how a call's operands and options become an operator's arguments.

A torch operator has a fixed number of results, declares which arguments it writes to, and must not return one of them.
So an operation has one overload for each set of results that the caller may give: ``quantize``, ``quantize.out``, ….
An argument that is written to is never optional, for two reasons: inductor fails if such an argument is left out of a
call that has one result (torch 2.13), and inductor makes no needless copies for an operator that writes to no argument.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from fp8core.core import checks
from fp8core.core.operation import Operation
from fp8core.errors import DTypeError
from fp8core.interop import dtype_name
from fp8core.ops.all_close import ALL_CLOSE_CALLS
from fp8core.ops.dequantize import DEQUANTIZE_CALLS
from fp8core.ops.fnuz import NORMALIZE_CALLS
from fp8core.ops.grouped_mm import GROUPED_MM_CALLS
from fp8core.ops.linear import LINEAR_CALLS
from fp8core.ops.moe_permute import PERMUTE_CALLS
from fp8core.ops.moe_unpermute import UNPERMUTE_CALLS
from fp8core.ops.producers import NORM_CALLS, SILU_CALLS
from fp8core.ops.quantize import QUANTIZE_CALLS
from fp8core.ops.scaled_mm import SCALED_MM_CALLS, SCALED_MM_NT_CALLS
from fp8core.ops.shards import EXPAND_CALLS, REQUANTIZE_CALLS


class Option(NamedTuple):
    """One option of an operation, as an argument of an operator."""

    schema: str
    """Type and name, and a default as in Python if graphs that earlier releases exported lack the argument."""
    pack: Callable[[Any], Any]
    """Converts the option to the argument, while a caller is traced."""
    unpack: Callable[[Any], Any]
    """Converts the argument to a hashable option."""


def _name_in(schema: str) -> str:
    return schema.rsplit(maxsplit=1)[-1].partition("=")[0]


def _same(x: Any) -> Any:
    return x


def _rows(x: Any) -> Any:
    """Return a whole number of another type as an int, as eager calls read it; the schema takes nothing else."""
    return x if x is None or isinstance(x, int) else checks.least_rows(x, "rows_padded")


def _tuple(x: Any) -> Any:
    return None if x is None else tuple(x)


def _name(x: Any) -> Any:
    """Return the name of a dtype. What is none becomes text, which the operation refuses by the name of the option."""
    try:
        return dtype_name(x)
    except DTypeError:
        return x if isinstance(x, str) else repr(x)


_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler.assume_constant_result sets


def _name_or_none(x: Any) -> Any:
    return None if x is None else _name(x)


def _dtype(name: str = "str dtype") -> Option:
    return Option(name, _name_or_none if name.startswith("str?") else _name, _same)


def _group(schema: str = "int[] group_shape") -> Option:
    name = _name_in(schema)

    def pack(x: Any) -> Any:
        return None if x is None else [*checks.group_shape(x, name)]

    return Option(schema, pack, _tuple)


def _flag(name: str) -> Option:
    return Option(f"bool {name}", lambda x: checks.flag(x, name), _same)


def _plain(schema: str) -> Option:
    return Option(schema, _same, _same)


class Overload(NamedTuple):
    """One overload of an operation."""

    name: str
    """Empty for the overload that allocates all results."""
    passed: tuple[int, ...]
    """The positions of the operands that are arguments, in order."""
    out: tuple[int, ...]
    """The positions of the operands that the overload writes to; these arguments are required."""
    new: tuple[int, ...]
    """The positions of the results that the overload allocates."""
    given: bool = False
    """Whether the scale is an input rather than a result."""
    copied: tuple[tuple[int, int], ...] = ()
    """Pairs (result, argument) of positions: the result is written in place, into the memory of the argument."""


class Operator(NamedTuple):
    """A torch operator: its operation, whose operands name its arguments, and its overloads."""

    name: str
    operation: Operation
    options: tuple[Option | None, ...]
    """None stands for the option that says whether the scale is given: each overload fixes it (`Overload.given`)."""
    overloads: tuple[Overload, ...]
    scale: int | None = None
    """The position of the scale among the operands, for quantizations."""
    bare: bool = False
    """Whether the operation takes its only option as it is, not in a tuple."""
    counts: bool = False
    """Whether the call's note is the extent of its first operand."""

    def schema(self, overload: Overload) -> str:
        """Return the overload's schema without its name."""
        letters = iter("abcdef")
        names = [name.replace(" ", "_") for name in self.operation.operands]
        arguments = []
        for at in overload.passed:
            optional = "" if at == 0 or at in overload.out else "?"
            written = f"({next(letters)}!)" if at in overload.out else ""
            arguments.append(f"Tensor{written}{optional} {names[at]}")
        arguments += [option.schema for option in self.options if option is not None]
        results = ", ".join("Tensor" for _ in overload.new)
        return f"({', '.join(arguments)}) -> {results if len(overload.new) == 1 else f'({results})'}"

    def _values(self, options: Any) -> Any:
        return (options,) if self.bare else options or ()

    def numbers(self, options: Any) -> list[tuple[str, Any]]:
        """Return the names and the values of a call's options, without dtypes and other names."""
        pairs = zip(self.options, self._values(options), strict=True)
        return [(_name_in(one.schema), value) for one, value in pairs if one and not one.schema.startswith("str")]

    def pack(self, overload: Overload, operands: Any, options: Any) -> list[Any]:
        """Return the arguments of a call of the overload."""
        arguments = [operands[at] for at in overload.passed]
        for option, value in zip(self.options, self._values(options), strict=True):
            if option is not None:
                arguments.append(option.pack(value))
        return arguments

    def unpacker(self, overload: Overload) -> Callable[..., tuple[tuple[Any, ...], Any]]:
        """Return a function that converts the overload's arguments to the operation's operands and options.

        The function is generated, as every call of the operator runs it: loops would take several microseconds.
        """
        names = {at: f"x{at}" for at in overload.passed}
        parameters = [*names.values()]
        names.update((result, names[source]) for result, source in overload.copied)
        operands = "".join(f"{names.get(at)}, " for at in range(len(self.operation.operands)))
        made, space = [], {}
        for at, option in enumerate(self.options):
            if option is None:
                made.append(repr(overload.given))
            else:
                _, given, default = option.schema.partition("=")  # torch omits arguments that equal their default
                parameters.append(f"option{at}{given}{default}")
                space[f"unpack{at}"] = option.unpack
                made.append(f"option{at}" if option.unpack is _same else f"unpack{at}(option{at})")
        options = made[0] if self.bare else f"({', '.join(made)},)" if made else None
        unpack: Callable[..., tuple[tuple[Any, ...], Any]] = eval(
            f"lambda {', '.join(parameters)}: (({operands}), {options})", space
        )
        return unpack


def _scaled(before: tuple[int, ...], out: int) -> Iterator[Overload]:
    """Yield the overloads of a quantization, whose operands end in codes (position ``out``), scale and upper bound."""
    scale, upper = out + 1, out + 2
    for outs, codes in (((), (out,)), ((out,), ())):
        kept = *outs, scale
        yield Overload("out" if outs else "", (*before, *outs, upper), outs, (*codes, scale))
        yield Overload("out_scale" if outs else "scale", (*before, *kept, upper), kept, codes)
        yield Overload("static_out" if outs else "static", (*before, *kept, upper), outs, codes, given=True)


def _with_out(passed: tuple[int, ...], out: int) -> tuple[Overload, ...]:
    """Return the overloads of an operation whose only result, at position ``out``, may be given by the caller."""
    return Overload("", passed, (), (out,)), Overload("out", tuple(sorted((*passed, out))), (out,), ())


def _and_with(at: int, suffix: str, overloads: Iterable[Overload]) -> Iterator[Overload]:
    """Yield each overload, and its variant with one more operand, at position ``at``, that it writes to."""
    for overload in overloads:
        yield overload
        yield overload._replace(
            name=f"{overload.name}_{suffix}" if overload.name else suffix,
            passed=tuple(sorted((*overload.passed, at))),
            out=(*overload.out, at),
        )


_SCALED: Final = (
    _dtype(),
    _group(),
    None,
    _plain("float? upper"),
    _plain("str scale_format"),
    _plain("str scale_layout"),
    _plain("float eps"),
)
_ACTIVATION: Final = _plain("str? activation=None")
_BETA: Final = _plain("float beta=0.0")
_PRODUCT: Final = _flag("use_fast_accum"), _flag("batch_invariant")
_MM: Final = _dtype("str out_dtype"), *_PRODUCT, _group("int[]? group_a"), _group("int[]? group_b"), _ACTIVATION, _BETA
_WIDTHS: Final = (Option("int[] logical_widths", _same, _tuple),)
_ROUNDED: Final = _flag("round_intermediate")


def _mm(name: str, operation: Operation) -> Operator:
    return Operator(name, operation, _MM, tuple(_and_with(7, "amax", _with_out((0, 1, 2, 3, 4, 6), 5))))


OPERATORS: Final = (
    Operator(
        "quantize",
        QUANTIZE_CALLS,
        (*_SCALED, Option("int? rows_padded", _rows, _same)),
        tuple(_scaled((0,), 1)),
        scale=2,
    ),
    Operator(
        "rms_norm_quant",
        NORM_CALLS,
        (*_SCALED, _plain("float epsilon"), _ROUNDED),
        tuple(_and_with(2, "residual", _scaled((0, 1), 3))),
        scale=4,
    ),
    Operator(
        "silu_and_mul_quant",
        SILU_CALLS,
        (*_SCALED, _ROUNDED),
        tuple(_scaled((0,), 1)),
        scale=2,
    ),
    Operator(
        "dequantize",
        DEQUANTIZE_CALLS,
        (_group("int[]? group_shape"), _dtype()),
        _with_out((0, 1), 2),
    ),
    _mm("scaled_mm", SCALED_MM_CALLS),
    _mm("scaled_mm_nt", SCALED_MM_NT_CALLS),
    Operator(
        "grouped_scaled_mm_nt",
        GROUPED_MM_CALLS,
        (_dtype("str out_dtype"), _flag("use_fast_accum"), _group("int[]? group_a"), _group("int[]? group_b")),
        _with_out((0, 1, 2, 3, 4, 5), 6),
    ),
    Operator(
        "linear",
        LINEAR_CALLS,
        (
            _group(),
            _plain("float? upper"),
            _dtype("str? out_dtype"),
            *_PRODUCT,
            _group("int[]? x_group"),
            _group("int[]? weight_group"),
            _ACTIVATION,
        ),
        _with_out((0, 1, 2, 3, 4, 5), 6),
    ),
    Operator(
        "moe_permute",
        PERMUTE_CALLS,
        (Option("int experts", lambda x: checks.extent(x, "experts"), _same), _group("int[]? group_shape")),
        (Overload("", (0, 2), (), (3, 5, 6)), Overload("scale", (0, 1, 2), (), (3, 4, 5, 6))),
    ),
    Operator("moe_unpermute", UNPERMUTE_CALLS, (_dtype("str? out_dtype"),), _with_out((0, 1, 2), 3)),
    Operator(
        "requantize_with_max_scale",
        REQUANTIZE_CALLS,
        _WIDTHS,
        (
            Overload("inplace", (0, 1), (0,), (3,), copied=((2, 0),)),
            Overload("out", (0, 1, 2), (2,), (3,)),
        ),
        bare=True,
    ),
    Operator(
        "convert_to_channelwise",
        EXPAND_CALLS,
        _WIDTHS,
        (Overload("", (0,), (), (1,)),),
        bare=True,
    ),
    Operator("all_close_1d", ALL_CLOSE_CALLS, (), (Overload("", (0,), (), (1,)),), counts=True),
    Operator(
        "normalize",
        NORMALIZE_CALLS,
        (_plain("str old"), _plain("str new")),
        (
            Overload("", (0, 2), (), (1, 3)),
            Overload("input", (0, 2, 4), (), (1, 3, 5)),
            Overload("out", (0, 1, 2), (1,), (3,)),
            Overload("input_out", (0, 1, 2, 4), (1,), (3, 5)),
            Overload("inplace", (0, 2), (0,), (3,), copied=((1, 0),)),
            Overload("input_inplace", (0, 2, 4), (0,), (3, 5), copied=((1, 0),)),
        ),
    ),
)
"""One for each public function that returns arrays, except `per_tensor_dequantize`, which calls `dequantize`."""
