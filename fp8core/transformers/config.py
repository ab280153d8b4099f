"""`Fp8CoreConfig`: how to quantize a model while it is loaded, or the format of an FP8 checkpoint."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp8core.checkpoint.formats.schemes import STATIC, scheme_of
from fp8core.checkpoint.formats.selection import patterns_of
from fp8core.core import checks
from fp8core.errors import CheckpointError, DeviceError

METHOD: Final = "fp8core"
SIZES: Final = "tp_size", "ep_size", "pp_size", "fsdp_size", "dp_replicate_size"
"""Fields of transformers' DistributedConfig: the numbers of processes that share the layers of a model."""


@register_quantization_config(METHOD)
class Fp8CoreConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The ``quantization_config`` with which transformers loads a model's linear layers in FP8.

    A saved model does not contain this configuration but one that other programs read: that of the checkpoint if it was
    FP8 already, else one of compressed-tensors, as `fp8core quantize` writes it.

    Args:
        scheme: "channel" (weights per channel, inputs per token), "tensor" (both per tensor), "block" (weights by
            blocks of 128x128, inputs by groups of 1x128) or "static" ("tensor" with input_scales).
        include: the layers to quantize: glob patterns over the checkpoint's module names, or regular expressions after
            ``re:``. By default all linear layers that `fp8core quantize` would quantize.
        exclude: patterns of layers to keep, in the same syntax.
        input_scales: for the scheme "static": the scale of each layer's inputs, as `fp8core.torch.calibrate` returns
            them.
        use_fast_accum: as for `fp8core.scaled_mm`. Neither this nor batch_invariant is saved.
        batch_invariant: as for `fp8core.scaled_mm`.
        source: the configuration of a checkpoint that is FP8 already, as `config_for` finds it.
        quant_method: "fp8core", which transformers writes beside the other fields.

    Raises:
        CheckpointError: scheme is not one of these, include or exclude is not a list of patterns, or input_scales or
            source is not a mapping.
        DTypeError: use_fast_accum or batch_invariant is not True or False.

    Examples:
        >>> from fp8core.transformers import Fp8CoreConfig
        >>> Fp8CoreConfig(scheme="block", exclude=["*.down_proj"]).to_dict()["scheme"]
        'block'
    """

    def __init__(
        self,
        scheme: str = "channel",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        input_scales: Mapping[str, float] | None = None,
        use_fast_accum: bool = True,
        batch_invariant: bool = False,
        source: Mapping[str, Any] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        scheme_of(scheme, STATIC)
        self.quant_method = quant_method
        self.scheme = scheme
        self.include = None if include is None else list(patterns_of(include, "include"))
        self.exclude = None if exclude is None else list(patterns_of(exclude, "exclude"))
        if not isinstance(input_scales, Mapping | None):
            raise CheckpointError(f"input_scales needs a mapping of layers to numbers, got {input_scales!r}")
        self.input_scales = None if input_scales is None else dict(input_scales)
        if not isinstance(source, Mapping | None):
            raise CheckpointError(f"source needs a mapping, as config_for finds it, got {source!r}")
        self.use_fast_accum = checks.flag(use_fast_accum, "use_fast_accum")
        self.batch_invariant = checks.flag(batch_invariant, "batch_invariant")
        self.source = None if source is None else dict(source)

    @property
    def options(self) -> dict[str, bool]:
        """The options of each layer beside its tensors."""
        return {"use_fast_accum": self.use_fast_accum, "batch_invariant": self.batch_invariant}

    def to_dict(self) -> dict[str, Any]:
        """Return the value for config.json: the configuration of the checkpoint's format, once it is known."""
        own: dict[str, Any] = dict(self.__dict__)
        return copy.deepcopy(own if self.source is None else self.source)


def refuse_spread(asked: Any) -> None:
    """Refuse a DistributedConfig of transformers that spreads layers over processes; None asks for nothing.

    Raises:
        DeviceError: the layers would be spread over more than one process, which FP8 layers do not support.
    """
    for name in SIZES:
        size = getattr(asked, name, None) or 1
        if size > 1:
            raise spread_over_processes(f"{name}={size}")


def spread_over_processes(got: str) -> DeviceError:
    """Return the error for a request to spread layers over processes, which FP8 layers do not support."""
    return DeviceError(
        f"a model in FP8 needs whole layers in each process, got {got}: leave it out and let device_map put layers on "
        "several GPUs, or load the whole model in each process"
    )
