"""The names that formats give to the tensors beside an FP8 weight, in one table that all readers use.

All scales multiply, also those whose names end in ``_inv``.

Sources: the files of DeepSeek-V3, V3.2 and V4, and of Qwen3-FP8; transformers' quantizers (fp8, fbgemm_fp8);
compressed-tensors; TensorRT Model Optimizer (ModelOpt); vLLM's loaders, with those of AutoFP8 and of Mistral's own
files; ComfyUI's QUANTIZATION.md.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

Role = Literal["scale", "input_scale", "input_scale_ub", "marker"]
FormatName = Literal[
    "fp8",
    "compressed-tensors",
    "modelopt",
    "fbgemm_fp8",
    "autofp8",
    "comfyui",
    "mistral",
    "mxfp8",
    "unscaled",
    "unquantized",
]

TITLES: Final[Mapping[FormatName, str]] = {
    "fp8": "DeepSeek / Hugging Face fp8",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "fbgemm_fp8": "FBGEMM fp8",
    "autofp8": "AutoFP8 / vLLM fp8",
    "comfyui": "ComfyUI scaled fp8",
    "mistral": "Mistral's own fp8 (consolidated files)",
    "mxfp8": "MXFP8 (1x32 groups, e8m0 scales)",
    "unscaled": "FP8 without any scale",
    "unquantized": "not quantized",
}
"""The usual names of the formats."""


class Naming(NamedTuple):
    """A suffix of tensor names, and its role."""

    suffix: str
    """The part of the name after the module's name."""
    role: Role
    format: FormatName | None
    """The only format that uses the suffix; None if several do."""


NAMES: Final = (
    Naming(".weight_scale_inv", "scale", "fp8"),
    Naming(".weight_scale", "scale", None),
    Naming(".scale_weight", "scale", "comfyui"),
    Naming(".qscale_weight", "scale", "mistral"),
    Naming(".scale", "scale", "fp8"),  # DeepSeek-V4; it cannot be the scale of a norm, as the weight is FP8
    Naming(".input_scale", "input_scale", None),
    Naming(".activation_scale", "input_scale", "fp8"),
    Naming(".scale_input", "input_scale", "comfyui"),
    Naming(".qscale_act", "input_scale", "mistral"),
    Naming(".input_scale_ub", "input_scale_ub", "fbgemm_fp8"),
    Naming(".comfy_quant", "marker", "comfyui"),
)
"""The tensors that may be beside the weight of a module ``M``, ``M.weight``."""
STACKED: Final = (
    Naming("_scale_inv", "scale", "fp8"),
    Naming("_scale", "scale", None),
    Naming("_weight_scale", "scale", None),
    Naming("_activation_scale", "input_scale", "fp8"),
    Naming("_input_scale", "input_scale", None),
)
"""The tensors that may be beside a weight without ".weight" in its name: stacked experts, ``experts.gate_up_proj``."""

WEIGHT: Final = ".weight"
MARKER: Final = "scaled_fp8"
"""The tensor that marks older files of ComfyUI as FP8."""
METADATA: Final = "_quantization_metadata"
"""The entry of the header in which newer files of ComfyUI list the quantized layers and their formats."""

KV_SCALES: Final[Mapping[str, str]] = {
    ".k_proj.k_scale": ".k_scale",
    ".v_proj.v_scale": ".v_scale",
    ".k_proj.output_scale": ".k_scale",
    ".v_proj.output_scale": ".v_scale",
    ".q_proj.output_scale": ".q_scale",
    ".q_proj.q_scale": ".q_scale",
    ".attn.k_scale": ".k_scale",
    ".attn.v_scale": ".v_scale",
    ".attn.q_scale": ".q_scale",
    ".k_fake_quantizer.qscale_act": ".k_scale",
    ".v_fake_quantizer.qscale_act": ".v_scale",
    ".q_fake_quantizer.qscale_act": ".q_scale",
    ".kv_fake_quantizer.qscale_act": ".kv_scale",
    ".k_scale": ".k_scale",
    ".v_scale": ".v_scale",
    ".q_scale": ".q_scale",
    ".kv_scale": ".kv_scale",
}
"""By the suffix of a KV cache scale in any format: its suffix in compressed-tensors, after the attention module.

Scales of queries count among them: attention on an FP8 cache needs both."""
PART_OF_MODELOPT: Final = (".k_proj.k_scale", ".v_proj.v_scale")
"""The suffixes of KV cache scales in ModelOpt's files; Quark's and older ones of compressed-tensors have others."""


OTHERS: Final[Mapping[str, str]] = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "packed integers of compressed-tensors",
    ".weight_scale_2": "NVFP4",
    ".weight_global_scale": "NVFP4",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    "_blocks": "MXFP4",
    ".bitmask": "sparse weights of compressed-tensors",
    ".weight_zero_point": "asymmetric quantization",
    ".input_zero_point": "asymmetric quantization",
    ".pre_quant_scale": "ModelOpt's AWQ or SmoothQuant",
    "._weight_qdata": "torchao",
    ".weight:qdata": "torchao",
}
"""By suffix of a tensor's name: another quantization, or one that is not read as FP8 codes times their scales."""
ZERO_POINTS: Final = (".weight_zero_point", ".input_zero_point")
"""The suffixes in `OTHERS` of zero points, which change nothing if they are zero, as symmetric schemes store them."""
BESIDE: Final[Mapping[str, str]] = {"_blocks": "_scales", ".bitmask": ".compressed"}
"""By suffix in `OTHERS` that other tensors may have, too: the suffix of a tensor that has to be beside it."""
NARROW: Final[Mapping[str, str]] = {
    **dict.fromkeys(("I8", "U8", "I16", "I32"), "scaled integers or packed FP4"),
    "F4": "FP4",
    "F6_E2M3": "FP6",
    "F6_E3M2": "FP6",
}
"""By the dtype of a weight or of stacked experts, as safetensors names it: the quantization, if a scale is beside."""


class Belongings(NamedTuple):
    """The names of the tensors that belong to one weight."""

    scale: str | None = None
    input_scale: str | None = None
    input_scale_ub: str | None = None
    marker: str | None = None
    formats: frozenset[FormatName] = frozenset()
    """The formats that alone use one of these names."""
    repeated: tuple[str, ...] = ()
    """The names of two scales with the same role; empty if there are none."""

    def tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors that exist."""
        names = self.scale, self.input_scale, self.input_scale_ub, self.marker
        return tuple(name for name in names if name is not None)


def module_of(tensor: str) -> str:
    """Return the module whose weight a tensor is, or the whole name of any other tensor."""
    return tensor.removesuffix(WEIGHT)


def namings(weight: str) -> tuple[Naming, ...]:
    """Return how tensors beside a weight may be named: suffixes of the name that `module_of` returns."""
    return NAMES if weight.endswith(WEIGHT) else STACKED


def belongings(weight: str, present: Iterable[str]) -> Belongings:
    """Return the tensors that belong to a weight, among those of a checkpoint (a set or a mapping).

    If two tensors have the same role, the first in the table is taken, and both are `Belongings.repeated`.
    """
    module = module_of(weight)
    found: dict[str, str] = {}
    formats: set[FormatName] = set()
    repeated: tuple[str, ...] = ()
    for suffix, role, format_name in namings(weight):
        name = module + suffix
        if name not in present:
            continue
        if role in found:
            repeated = repeated or (found[role], name)
        else:
            found[role] = name
            formats |= {format_name} if format_name is not None else set()
    return Belongings(**found, formats=frozenset(formats), repeated=repeated)


def is_scale(tensor: str) -> bool:
    """Return whether a tensor is a scale or a zero point by its name: those of some formats are FP8 matrices."""
    return tensor.endswith(("scale", "_scale_inv", ".scale_weight", "_scale_2", "_zero_point"))


def weight_of_scale(scale: str) -> str | None:
    """Return the name of the weight that a scale belongs to, or None if the scale's name alone is not conclusive."""
    for suffix in (".weight_scale_inv", ".weight_scale", ".scale_weight", ".qscale_weight"):
        if scale.endswith(suffix):
            return scale.removesuffix(suffix) + WEIGHT
    return scale.removesuffix("_scale_inv") if scale.endswith("_scale_inv") else None


def other_quantizations(dtypes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors of other quantizations than scaled FP8, each with the name of its quantization.

    Args:
        dtypes: the dtype of each tensor by its name, as safetensors names them.
    """
    endings = tuple(OTHERS)
    for name in dtypes:
        if name.endswith(endings):
            suffix = next(one for one in endings if name.endswith(one))
            beside = BESIDE.get(suffix)
            if beside is None or name.removesuffix(suffix) + beside in dtypes:
                yield name, OTHERS[suffix]
    for name, dtype in dtypes.items():
        of_layer = dtype in NARROW and (name.endswith(WEIGHT) or "expert" in name)
        if of_layer and belongings(name, dtypes).scale is not None:
            yield name, NARROW[dtype]


def kv_scale(tensor: str) -> str | None:
    """Return compressed-tensors' name for a scale of the KV cache, or None for any other tensor."""
    return next((tensor.removesuffix(old) + new for old, new in KV_SCALES.items() if tensor.endswith(old)), None)
