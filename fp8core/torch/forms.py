"""The operations as torch's dispatcher knows them: schemas, and how a call's operands and options become arguments.

An operator of torch has one number of results, says which arguments it writes to, and never returns one of them. So an
operation has one overload for each set of results that the caller may give: ``quantize``, ``quantize.out``, …. An
argument that is written to is never optional: inductor fails where it is left out of a call that has one result
(torch 2.13), and copies nothing needlessly where an operator writes to none.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from fp8core.core.operation import Operation
from fp8core.interop import dtype_name
from fp8core.ops.all_close import ALL_CLOSE_CALLS
from fp8core.ops.dequantize import DEQUANTIZE_CALLS
from fp8core.ops.fnuz import NORMALIZE_CALLS
from fp8core.ops.linear import LINEAR_CALLS
from fp8core.ops.producers import NORM_CALLS, SILU_CALLS
from fp8core.ops.quantize import QUANTIZE_CALLS
from fp8core.ops.scaled_mm import SCALED_MM_CALLS, SCALED_MM_NT_CALLS
from fp8core.ops.shards import EXPAND_CALLS, REQUANTIZE_CALLS


class Option(NamedTuple):
    """One option of an operation, as an argument of an operator."""

    schema: str
    """Its type and its name; and a default, spelled as in Python, where earlier releases exported graphs without it."""
    pack: Callable[[Any], Any]
    """Makes the argument of the option, while a caller is traced."""
    unpack: Callable[[Any], Any]
    """Makes of the argument an option that can be hashed."""


def _same(x: Any) -> Any:
    return x


def _pair(x: Any) -> Any:
    return None if x is None else [int(side) for side in x]


def _tuple(x: Any) -> Any:
    return None if x is None else tuple(x)


def _name(x: Any) -> Any:
    return None if x is None else dtype_name(x)


_name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result has it


def _dtype(name: str = "str dtype") -> Option:
    return Option(name, _name, _same)


def _group(name: str = "int[] group_shape") -> Option:
    return Option(name, _pair, _tuple)


def _plain(schema: str) -> Option:
    return Option(schema, _same, _same)


class Form(NamedTuple):
    """One overload of an operation."""

    overload: str
    """Empty for the one that makes all results."""
    passed: tuple[int, ...]
    """The places of the operands that are arguments, in their order."""
    out: tuple[int, ...]
    """Those that are written to, and have to be given."""
    new: tuple[int, ...]
    """The places of the results that it makes."""
    given: bool = False
    """Whether the scale is one to be read."""
    copied: tuple[tuple[int, int], ...] = ()
    """Pairs of a result and the argument whose memory it is."""


class Entry(NamedTuple):
    """An operation, the names of its arguments, and its overloads."""

    name: str
    operation: Operation
    arguments: tuple[str, ...]
    """The names of the operands."""
    options: tuple[Option | None, ...]
    """None in the place of the option that says whether the scale is given: an overload knows it."""
    forms: tuple[Form, ...]
    scale: int | None = None
    """The place of the scale of a quantization."""
    bare: bool = False
    """Whether the one option is the operation's options, not a tuple of one."""
    counts: bool = False
    """Whether the call's note is the extent of its first operand."""

    def schema(self, form: Form) -> str:
        """Return the overload's schema without its name."""
        letters = iter("abcdef")
        arguments = []
        for at in form.passed:
            optional = "" if at == 0 or at in form.out else "?"
            written = f"({next(letters)}!)" if at in form.out else ""
            arguments.append(f"Tensor{written}{optional} {self.arguments[at]}")
        arguments += [option.schema for option in self.options if option is not None]
        results = ", ".join("Tensor" for _ in form.new)
        return f"({', '.join(arguments)}) -> {results if len(form.new) == 1 else f'({results})'}"

    def pack(self, form: Form, operands: Any, options: Any) -> list[Any]:
        """Return the arguments of a call of the overload."""
        arguments = [operands[at] for at in form.passed]
        values = (options,) if self.bare else options or ()
        for option, value in zip(self.options, values, strict=True):
            if option is not None:
                arguments.append(option.pack(value))
        return arguments

    def unpacker(self, form: Form) -> Callable[..., tuple[tuple[Any, ...], Any]]:
        """Return the function that makes operands and options of the overload's arguments.

        It is compiled, as every call of an operator goes through it: loops would take several microseconds.
        """
        names = {at: f"x{at}" for at in form.passed}
        parameters = [*names.values()]
        names.update((result, names[source]) for result, source in form.copied)
        operands = "".join(f"{names.get(at)}, " for at in range(len(self.arguments)))
        made, space = [], {}
        for at, option in enumerate(self.options):
            if option is None:
                made.append(repr(form.given))
            else:
                _, given, default = option.schema.partition("=")  # torch leaves out what equals its default
                parameters.append(f"option{at}{given}{default}")
                space[f"unpack{at}"] = option.unpack
                made.append(f"option{at}" if option.unpack is _same else f"unpack{at}(option{at})")
        options = made[0] if self.bare else f"({', '.join(made)},)" if made else None
        unpack: Callable[..., tuple[tuple[Any, ...], Any]] = eval(
            f"lambda {', '.join(parameters)}: (({operands}), {options})", space
        )
        return unpack


def _scaled(before: tuple[int, ...], out: int) -> Iterator[Form]:
    """Yield the overloads of a quantization: its codes and its scale follow each other among its operands."""
    scale, upper = out + 1, out + 2
    for outs, codes in (((), (out,)), ((out,), ())):
        kept = *outs, scale
        yield Form("out" if outs else "", (*before, *outs, upper), outs, (*codes, scale))
        yield Form("out_scale" if outs else "scale", (*before, *kept, upper), kept, codes)
        yield Form("static_out" if outs else "static", (*before, *kept, upper), outs, codes, given=True)


def _with_out(passed: tuple[int, ...], out: int) -> tuple[Form, ...]:
    """Return the overloads of an operation with one result that the caller may give."""
    return Form("", passed, (), (out,)), Form("out", tuple(sorted((*passed, out))), (out,), ())


def _and_with(at: int, name: str, forms: Iterable[Form]) -> Iterator[Form]:
    """Yield overloads as they are, and with one more operand, which is written to."""
    for form in forms:
        yield form
        yield form._replace(
            overload=f"{form.overload}_{name}" if form.overload else name,
            passed=tuple(sorted((*form.passed, at))),
            out=tuple(sorted((*form.out, at))),
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
_PRODUCT: Final = _plain("bool use_fast_accum"), _plain("bool batch_invariant")
_MM: Final = _dtype("str out_dtype"), *_PRODUCT, _group("int[]? group_a"), _group("int[]? group_b"), _ACTIVATION, _BETA
_WIDTHS: Final = (Option("int[] logical_widths", _pair, _tuple),)
_ROUNDED: Final = _plain("bool round_intermediate")


def _mm(name: str, operation: Operation, second: str) -> Entry:
    arguments = "a", second, "scale_a", "scale_b", "bias", "out", "out_scale", "amax"
    return Entry(name, operation, arguments, _MM, tuple(_and_with(7, "amax", _with_out((0, 1, 2, 3, 4, 6), 5))))


ENTRIES: Final = (
    Entry(
        "quantize",
        QUANTIZE_CALLS,
        ("x", "out", "scale", "scale_ub"),
        (*_SCALED, _plain("int? rows_padded")),
        tuple(_scaled((0,), 1)),
        scale=2,
    ),
    Entry(
        "rms_norm_quant",
        NORM_CALLS,
        ("x", "weight", "residual", "out", "scale", "scale_ub"),
        (*_SCALED, _plain("float epsilon"), _ROUNDED),
        tuple(_and_with(2, "residual", _scaled((0, 1), 3))),
        scale=4,
    ),
    Entry(
        "silu_and_mul_quant",
        SILU_CALLS,
        ("x", "out", "scale", "scale_ub"),
        (*_SCALED, _ROUNDED),
        tuple(_scaled((0,), 1)),
        scale=2,
    ),
    Entry(
        "dequantize",
        DEQUANTIZE_CALLS,
        ("q", "scale", "out"),
        (_group("int[]? group_shape"), _dtype()),
        _with_out((0, 1), 2),
    ),
    _mm("scaled_mm", SCALED_MM_CALLS, "b"),
    _mm("scaled_mm_nt", SCALED_MM_NT_CALLS, "weight"),
    Entry(
        "linear",
        LINEAR_CALLS,
        ("x", "weight", "weight_scale", "bias", "input_scale", "scale_ub", "out"),
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
    Entry(
        "requantize_with_max_scale",
        REQUANTIZE_CALLS,
        ("weight", "weight_scale", "out", "max_scale"),
        _WIDTHS,
        (
            Form("inplace", (0, 1), (0,), (3,), copied=((2, 0),)),
            Form("out", (0, 1, 2), (2,), (3,)),
        ),
        bare=True,
    ),
    Entry(
        "convert_to_channelwise",
        EXPAND_CALLS,
        ("weight_scale", "out"),
        _WIDTHS,
        (Form("", (0,), (), (1,)),),
        bare=True,
    ),
    Entry("all_close_1d", ALL_CLOSE_CALLS, ("x", "result"), (), (Form("", (0,), (), (1,)),), counts=True),
    Entry(
        "normalize",
        NORMALIZE_CALLS,
        ("weight", "out", "weight_scale", "new_weight_scale", "input_scale", "new_input_scale"),
        (_plain("str old"), _plain("str new")),
        (
            Form("", (0, 2), (), (1, 3)),
            Form("input", (0, 2, 4), (), (1, 3, 5)),
            Form("out", (0, 1, 2), (1,), (3,)),
            Form("input_out", (0, 1, 2, 4), (1,), (3, 5)),
            Form("inplace", (0, 2), (0,), (3,), copied=((1, 0),)),
            Form("input_inplace", (0, 2, 4), (0,), (3, 5), copied=((1, 0),)),
        ),
    ),
)
"""Every public function that gives arrays, but `per_tensor_dequantize`, which calls `dequantize`."""
