"""`GroupedLinear`: the FP8 linear layers of all experts of a mixture, in one launch."""

from typing import Any, Self

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling

from fp8core.checkpoint.formats.schemes import SCHEMES, scheme_of
from fp8core.core import checks
from fp8core.core.grouped import check_offsets
from fp8core.core.scaling import default_eps
from fp8core.dtypes import FORMATS
from fp8core.errors import DTypeError, LayoutError, ScaleError, ShapeError
from fp8core.interop import dtype_name
from fp8core.interop.names import dtype_spelling
from fp8core.ops import Quantized, dequantize, grouped_scaled_mm_nt, quantize
from fp8core.ops.grouped_mm import layout_of_scales
from fp8core.ops.layer import QUANTIZE_WEIGHT_CALLS
from fp8core.ops.quantize import quantize_by
from fp8core.problem import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, GroupShape
from fp8core.torch.aligned import by_rows, empty_codes, exporting, refuse_gaps_in_exports
from fp8core.torch.frozen import Frozen
from fp8core.torch.gradients import GroupedStraightThrough, has_tangent, refuse_vmap
from fp8core.torch.input_dtypes import any_autocast, as_autocast, expected_dtype, refuse_codes, result_of_codes


class GroupedLinear(Frozen):
    """Linear layers with frozen FP8 weights of one shape, each for a group of consecutive rows of the input.

    They are one `fp8core.grouped_scaled_mm_nt`: one launch on a GPU, which reads there where groups end and waits for
    nothing. Inputs are quantized as by `Linear`, results have the dtype of the input, and casts, moves, copies and
    gradients are those of `Linear`; gradients wait for the ends, and multiply one group after the other. Forward-mode
    derivatives are refused.

    Its state: ``weight`` FP8 ``[groups, n, k]``; ``weight_scale`` float32 ``[groups, n, 1]`` or ``[groups,
    ceil(n / 128), ceil(k / 128)]``; ``input_scale`` float32 ``[groups]``. All are parameters that do not require grad.

    Args:
        groups: the number of layers.
        in_features: k.
        out_features: n.
        device: the device of the parameters.
        dtype: the dtype of the inputs that the layers expect (`compute_dtype`).
        scheme: "channel" (weights per channel, inputs per token) or "block" (weights by blocks of 128x128, inputs by
            groups of 1x128).
        static: whether the rows of a group are quantized with a given scale, the parameter `input_scale`. Not with
            "block".
        weight_dtype: the FP8 format, as a name or a dtype.
        use_fast_accum: as for `fp8core.scaled_mm`.

    Raises:
        CheckpointError: scheme is unknown.
        ShapeError: groups, in_features or out_features is not a whole number from 0 to 2**31 - 1.
        ScaleError: the scheme is "tensor", whose one scale each group may give to all its channels; or static with
            the scheme "block".
        DTypeError: weight_dtype is not an FP8 format, dtype is no ``torch.dtype``, or an option is not True or False.

    Examples:
        >>> import torch, fp8core.torch
        >>> experts = fp8core.torch.GroupedLinear.from_weight(torch.ones(4, 8, 32))
        >>> offs = torch.tensor([1, 1, 3, 3], dtype=torch.int32)  # a row for expert 0, and two for expert 2
        >>> experts(torch.ones(3, 32), offs).shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        scheme: str = "channel",
        static: bool = False,
        weight_dtype: Any = "float8_e4m3fn",
        use_fast_accum: bool = True,
    ) -> None:
        super().__init__()
        group, static = scheme_of(scheme).group_shape, checks.flag(static, "static")
        if group == PER_TENSOR:
            raise ScaleError("scheme needs channel or block, got tensor: channel with equal scales is the same")
        if static and group == BLOCK_128:
            raise ScaleError("static needs the scheme channel, as block needs scales of inputs by groups, got block")
        self.groups = checks.extent(groups, "groups")
        self.in_features = checks.extent(in_features, "in_features")
        self.out_features = checks.extent(out_features, "out_features")
        self.scheme = scheme
        self.compute_dtype = expected_dtype(dtype)
        self.use_fast_accum = checks.flag(use_fast_accum, "use_fast_accum")
        codes = getattr(torch, dtype_name(weight_dtype, "weight_dtype", FORMATS))
        n, k = self.out_features, self.in_features

        def constant(x: Tensor) -> nn.Parameter:
            return nn.Parameter(x, requires_grad=False)

        self.weight = constant(empty_codes((self.groups, n, k), codes, device))
        shape = (self.groups, *SCHEMES[scheme].scale_shape((n, k)))
        self.weight_scale = constant(torch.ones(shape, dtype=torch.float32, device=device))
        ones = constant(torch.ones(self.groups, dtype=torch.float32, device=device)) if static else None
        self.register_parameter("input_scale", ones)
        with torch.no_grad():
            self.weight.view(torch.uint8).zero_()

    @classmethod
    def from_weight(
        cls,
        weight: Tensor,
        *,
        scheme: str = "channel",
        weight_dtype: Any = "float8_e4m3fn",
        use_fast_accum: bool = True,
    ) -> Self:
        """Return layers with the quantized weights ``[groups, n, k]`` of float32, float16 or bfloat16.

        Raises:
            DTypeError: weight is no tensor of these dtypes.
            ShapeError: weight has not three axes.
            Fp8Error: an option is refused, as by the class.
        """
        if not isinstance(weight, Tensor):
            raise DTypeError(f"weight needs a torch.Tensor, got {type(weight).__name__}")
        if weight.dim() != 3:
            raise ShapeError(f"weight needs three axes [groups, n, k], got shape {tuple(weight.shape)}")
        groups, n, k = weight.shape
        options: dict[str, Any] = {"scheme": scheme, "weight_dtype": weight_dtype, "use_fast_accum": use_fast_accum}
        made = cls(groups, k, n, weight.device, weight.dtype, **options)
        for at, one in enumerate(weight.detach()):
            q = quantize_by(
                QUANTIZE_WEIGHT_CALLS, one.contiguous(), weight_dtype, made.weight_group_shape, out=made.weight.data[at]
            )
            made.weight_scale.data[at].copy_(q.scale)
        return made

    @property
    def weight_group_shape(self) -> GroupShape:
        """The groups of the weights' scales."""
        return SCHEMES[self.scheme].group_shape

    @property
    def group_shape(self) -> GroupShape:
        """The groups of inputs' scales."""
        return GROUP_128 if self.weight_group_shape == BLOCK_128 else PER_TOKEN

    def quantized(self, x: Tensor, offs: Tensor | None = None, group: Tensor | None = None) -> Quantized[Any, Any]:
        """Return an input as `forward` quantizes it. One whose rows are not contiguous is copied first.

        Static scales need ``offs``, or ``group``, the group of each row, where it is known (`group_of_rows`). Rows for
        dynamic scales need neither, and may still be unsorted (`fp8core.moe_permute`).

        Raises:
            ShapeError: the input has not two axes.
        """
        refuse_codes(x)
        if x.dim() != 2:
            raise ShapeError(f"input needs two axes [rows, k], got shape {tuple(x.shape)}")
        made: Any = quantize(by_rows(x), **self.quantization(x.shape[0], offs, group))
        return made  # type: ignore[no-any-return]

    def quantization(self, rows: int, offs: Tensor | None = None, group: Tensor | None = None) -> dict[str, Any]:
        """Return the keywords with which functions of fp8core quantize ``rows`` rows for `forward`.

        ``eps`` is the default, as a constant: torch.compile cannot give the input that it makes of a default to the
        graphs of two autograd functions.
        """
        if self.input_scale is None or not self.groups:
            # Exports are for any number of rows.
            layout = layout_of_scales(self.group_shape, None if exporting() else rows)
            return {"group_shape": self.group_shape, "scale_layout": layout, "eps": default_eps()}
        group = self.group_of_rows(rows, offs) if group is None else group
        return {"group_shape": PER_TOKEN, "scale": self.input_scale[group, None], "eps": default_eps()}

    def group_of_rows(self, rows: int, offs: Tensor | None) -> Tensor:
        """Return the group of each of ``rows`` rows: int64. That of rows after the last end is the last one."""
        if not isinstance(offs, Tensor):
            raise DTypeError(f"offs needs a tensor, as each group has an input scale, got {type(offs).__name__}")
        check_offsets(dtype_spelling(offs.dtype), tuple(offs.shape), self.groups)
        numbers = torch.arange(rows, dtype=torch.int32, device=offs.device)
        ends = offs.cummax(0).values  # an end before an earlier one is that of a group without rows
        return torch.searchsorted(ends[:-1], numbers, right=True)

    def forward(self, input: Any, offs: Tensor, out_dtype: Any = None) -> Tensor:  # noqa: A002 - as nn.Linear calls it
        """Return ``input[begin:end] @ weight[i].T`` for the rows of each group i, ``[rows, n]``.

        Args:
            input: ``[rows, k]`` of float32, float16 or bfloat16, or a `Quantized` as `quantized` returns it.
            offs: int32 ``[groups]``: where each group ends, as for `fp8core.grouped_scaled_mm_nt`. Rows after the last
                end are not computed, and undefined in the result.
            out_dtype: float32, float16 or bfloat16; None for that of the input, or for a `Quantized` `compute_dtype`
                or autocast's.

        Raises:
            LayoutError: the input has a tangent of `torch.autograd.forward_ad`; or torch.compile traces inside of
                torch.vmap with gradients.
        """
        if not isinstance(offs, Tensor):
            raise DTypeError(f"offs needs a torch.Tensor, got {type(offs).__name__}")
        if any_autocast():
            input = as_autocast(input)  # noqa: A001
        if has_tangent(input):
            raise LayoutError("input needs to be without a tangent of forward-mode derivatives, got one")
        if is_grad_enabled():
            if is_compiling():
                refuse_vmap()
            if isinstance(input, Tensor) and input.requires_grad:
                made: Tensor = GroupedStraightThrough.apply(input, offs, self, out_dtype)  # type: ignore[no-untyped-call]
                return made
        return self._product(input, offs, out_dtype)

    def _product(self, x: Any, offs: Tensor, out_dtype: Any) -> Tensor:
        """Return the result of `forward`, without gradients."""
        refuse_gaps_in_exports(self.weight)
        if isinstance(x, Quantized):
            q, dtype = x, result_of_codes(x, self.compute_dtype)
        else:
            if not isinstance(x, Tensor):
                raise DTypeError(f"input needs a torch.Tensor or a Quantized, got {type(x).__name__}")
            q, dtype = self.quantized(x, offs), x.dtype
        made: Tensor = grouped_scaled_mm_nt(
            q,
            Quantized(self.weight, self.weight_scale, self.weight_group_shape),
            offs=offs,
            out_dtype=dtype if out_dtype is None else out_dtype,
            use_fast_accum=self.use_fast_accum,
        )
        return made

    def dequantized(self, dtype: torch.dtype, group: int) -> Tensor:
        """Return the dequantized weight ``[n, k]`` of one group."""
        weight, scale = self.weight[group], self.weight_scale[group]
        made: Tensor = dequantize(weight, scale, group_shape=self.weight_group_shape, dtype=dtype)
        return made

    def extra_repr(self) -> str:
        """Return the text between the parentheses of `repr`."""
        sizes = f"groups={self.groups}, in_features={self.in_features}, out_features={self.out_features}"
        static = ", static" if self.input_scale is not None else ""
        return f"{sizes}, scheme={self.scheme}, weight={dtype_name(self.weight.dtype)}{static}"
