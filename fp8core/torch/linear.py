"""`Linear`: ``torch.nn.Linear`` with a frozen FP8 weight."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from fp8core.checkpoint.formats.schemes import SCHEMES, scheme_of, static_scale
from fp8core.core import checks
from fp8core.dtypes import FORMATS
from fp8core.errors import DTypeError, ScaleError
from fp8core.interop import dtype_name
from fp8core.ops import dequantize
from fp8core.ops.layer import QUANTIZE_WEIGHT_CALLS
from fp8core.ops.quantize import quantize_by
from fp8core.problem import BLOCK_128
from fp8core.torch.aligned import empty_codes
from fp8core.torch.forward import ForwardLinear
from fp8core.torch.frozen import without_values
from fp8core.torch.input_dtypes import expected_dtype, high_precision


class Linear(ForwardLinear):
    """``torch.nn.Linear`` with a frozen FP8 weight. It quantizes its inputs; results have the dtype of the input.

    Inside torch.autocast it casts inputs first, as ``torch.nn.Linear`` does, and results have autocast's dtype. The
    result for a `Quantized` has `compute_dtype`, or autocast's dtype.

    Its state has the names and shapes of compressed-tensors: ``weight`` FP8 ``[n, k]``; ``weight_scale`` float32
    ``[n, 1]``, ``[1]`` or ``[ceil(n / 128), ceil(k / 128)]``; ``input_scale`` float32 ``[1]``; ``bias`` ``[n]``. All
    are parameters that do not require grad. Moving the layer moves all of them; casting it (``.half()``,
    ``.to(dtype)``) casts the bias only.

    On a GPU the rows of ``weight`` begin at multiples of 16 bytes, which fast products need: if k is not a multiple of
    16, rows are padded and ``weight`` is not contiguous. ``state_dict`` returns a contiguous copy. (Export such layers
    on the CPU: files of torch.export lose the padding.)

    Gradients flow to the input as ``grad @ dequantize(weight)`` (a straight-through estimate of its quantization), and
    to the bias if it requires grad. The weight has no gradient.

    Args:
        in_features: k.
        out_features: n.
        bias: whether the layer has a bias.
        device: the device of the parameters.
        dtype: the dtype of the bias, and of the inputs that the layer expects (`compute_dtype`).
        scheme: "channel" (weights per channel, inputs per token), "tensor" (both per tensor) or "block" (weights by
            blocks of 128x128, inputs by groups of 1x128).
        static: whether inputs are quantized with a given scale, the parameter `input_scale`. Not with "block".
        weight_dtype: the FP8 format, as a name or a dtype.
        use_fast_accum: as for `fp8core.scaled_mm`.
        batch_invariant: as for `fp8core.scaled_mm`.

    Raises:
        CheckpointError: scheme is not one of the three.
        ShapeError: in_features or out_features is not a whole number from 0 to 2**31 - 1.
        ScaleError: static with the scheme "block".
        DTypeError: weight_dtype is not an FP8 format, dtype is no ``torch.dtype``, or an option is not True or False.

    Examples:
        >>> import torch, fp8core.torch
        >>> layer = fp8core.torch.Linear.from_linear(torch.nn.Linear(32, 4, bias=False))
        >>> layer
        Linear(in_features=32, out_features=4, bias=False, scheme=channel, weight=float8_e4m3fn)
        >>> layer(torch.ones(2, 32)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        scheme: str = "channel",
        static: bool = False,
        weight_dtype: Any = "float8_e4m3fn",
        use_fast_accum: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate a high-precision weight
        group, static = scheme_of(scheme).group_shape, checks.flag(static, "static")
        if static and group == BLOCK_128:
            raise ScaleError(
                "static needs the scheme channel or tensor, as block needs scales of inputs by groups, got block"
            )
        self.in_features = checks.extent(in_features, "in_features")
        self.out_features = checks.extent(out_features, "out_features")
        self.scheme = scheme
        self.compute_dtype = expected_dtype(dtype)
        self.use_fast_accum = checks.flag(use_fast_accum, "use_fast_accum")
        self.batch_invariant = checks.flag(batch_invariant, "batch_invariant")
        codes = getattr(torch, dtype_name(weight_dtype, "weight_dtype", FORMATS))

        def add(name: str, shape: tuple[int, ...], dtype: torch.dtype | None, wanted: bool = True) -> None:
            made = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False) if wanted else None
            self.register_parameter(name, made)

        self.weight = nn.Parameter(
            empty_codes((self.out_features, self.in_features), codes, device), requires_grad=False
        )
        add("weight_scale", self.scale_shape, torch.float32)
        add("input_scale", (1,), torch.float32, static)
        add("bias", (self.out_features,), dtype, bias)
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        scheme: str = "channel",
        input_scale: float | None = None,
        weight_dtype: Any = "float8_e4m3fn",
        use_fast_accum: bool = True,
        batch_invariant: bool = False,
    ) -> Self:
        """Return an FP8 layer with the quantized weight of ``linear``; the bias shares its memory.

        Args:
            linear: a layer with weight ``[n, k]`` of float32, float16 or bfloat16; it does not change. If it is on the
                meta device, so is the result. Its hooks, and the forward of a subclass, are not taken over.
            scheme: as for the class.
            input_scale: the static scale of inputs, as `calibrate` returns it; None quantizes inputs dynamically.
            weight_dtype: as for the class.
            use_fast_accum: as for the class.
            batch_invariant: as for the class.

        Raises:
            DTypeError: linear is no ``torch.nn.Linear``, or its weight has another dtype.
            ScaleError: input_scale is not a positive number in the range of float32, or the scheme is "block".
            Fp8Error: another option is refused, as by the class.
        """
        if not isinstance(linear, nn.Linear):
            raise DTypeError(f"linear needs a torch.nn.Linear, got {type(linear).__name__}")
        static = None if input_scale is None else static_scale(input_scale)
        if input_scale is not None and static is None:
            raise ScaleError(f"input_scale needs a number above 0 that float32 holds, got {input_scale!r}")
        source, bias = linear.weight.detach(), linear.bias
        made = without_values(
            cls,
            linear,
            scheme=scheme,
            static=static is not None,
            weight_dtype=weight_dtype,
            use_fast_accum=use_fast_accum,
            batch_invariant=batch_invariant,
        )
        if source.is_meta:
            return made
        codes = empty_codes(made.weight.shape, made.weight.dtype, source.device)
        q = quantize_by(QUANTIZE_WEIGHT_CALLS, source.contiguous(), weight_dtype, made.weight_group_shape, out=codes)
        made.weight = nn.Parameter(q.data, requires_grad=False)
        made.weight_scale = nn.Parameter(q.scale, requires_grad=False)
        if bias is not None:
            made.bias = nn.Parameter(bias.detach(), requires_grad=False)
        if static is not None:
            scale = torch.full((1,), static, dtype=torch.float32, device=source.device)  # not torch's default device
            made.input_scale = nn.Parameter(scale, requires_grad=False)
        return made

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Return ``torch.nn.Linear`` with the dequantized weight, in ``dtype`` or, by default, `compute_dtype`.

        Raises:
            DTypeError: the dtype is not float32, float16 or bfloat16 of torch.
        """
        bias: Tensor | None = self.bias
        own = high_precision(self.compute_dtype if dtype is None else dtype)
        made = nn.Linear(self.in_features, self.out_features, False, "meta", own)
        made.train(self.training)
        if self.weight.is_meta:
            weight = torch.empty_like(self.weight, dtype=made.weight.dtype)
        else:
            weight = self.dequantized(made.weight.dtype)
        made.weight = nn.Parameter(weight)
        if bias is not None:
            made.bias = nn.Parameter(bias.detach().to(made.weight.dtype))
        return made

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the weight's scales."""
        return SCHEMES[self.scheme].scale_shape((self.out_features, self.in_features))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight ``[n, k]``."""
        made: Tensor = dequantize(self.weight, self.weight_scale, group_shape=self.weight_group_shape, dtype=dtype)
        return made

    def reset_parameters(self) -> None:
        """Set weight and bias to zero and all scales to one, until a state or a quantized layer gives real values."""
        with torch.no_grad():
            self.weight.view(torch.uint8).zero_()
            for name, value in (("weight_scale", 1), ("input_scale", 1), ("bias", 0)):
                parameter = self._parameters[name]
                if parameter is not None:
                    parameter.fill_(value)

    def extra_repr(self) -> str:
        """Return the text between the parentheses of `repr`."""
        static = ", static" if self.input_scale is not None else ""
        return f"{super().extra_repr()}, scheme={self.scheme}, weight={dtype_name(self.weight.dtype)}{static}"
