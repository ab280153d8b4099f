"""How formats name what belongs to an FP8 weight: one table, which everything that reads checkpoints asks.

All scales multiply, also those whose names end in ``_inv``.

Sources: the files of DeepSeek-V3, V3.2 and V4, and of Qwen3-FP8; transformers' quantizers (fp8, fbgemm_fp8);
compressed-tensors; TensorRT Model Optimizer (ModelOpt); vLLM's loaders, with those of AutoFP8; ComfyUI's
QUANTIZATION.md.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal, NamedTuple

Role = Literal["scale", "input_scale", "input_scale_ub", "marker"]
FormatName = Literal[
    "fp8", "compressed-tensors", "modelopt", "fbgemm_fp8", "autofp8", "comfyui", "mxfp8", "unscaled", "unquantized"
]

TITLES: Final[Mapping[FormatName, str]] = {
    "fp8": "DeepSeek / Hugging Face fp8",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "fbgemm_fp8": "FBGEMM fp8",
    "autofp8": "AutoFP8 / vLLM fp8",
    "comfyui": "ComfyUI scaled fp8",
    "mxfp8": "MXFP8 (1x32 groups, e8m0 scales)",
    "unscaled": "FP8 without any scale",
    "unquantized": "not quantized",
}
"""The formats, as people call them."""


class Naming(NamedTuple):
    """One name that a format gives to what belongs to a weight."""

    suffix: str
    """After a module's name."""
    role: Role
    format: FormatName | None
    """The one format that has the name; None where several have it."""


NAMES: Final = (
    Naming(".weight_scale_inv", "scale", "fp8"),
    Naming(".weight_scale", "scale", None),
    Naming(".scale_weight", "scale", "comfyui"),
    Naming(".scale", "scale", "fp8"),  # DeepSeek-V4; the module's weight being FP8, it is no norm's
    Naming(".input_scale", "input_scale", None),
    Naming(".activation_scale", "input_scale", "fp8"),
    Naming(".scale_input", "input_scale", "comfyui"),
    Naming(".input_scale_ub", "input_scale_ub", "fbgemm_fp8"),
    Naming(".comfy_quant", "marker", "comfyui"),
)
"""What a module ``M`` with ``M.weight`` may have beside it."""
STACKED: Final = (
    Naming("_scale_inv", "scale", "fp8"),
    Naming("_scale", "scale", None),
    Naming("_weight_scale", "scale", None),
    Naming("_activation_scale", "input_scale", "fp8"),
    Naming("_input_scale", "input_scale", None),
)
"""What a parameter that is a weight itself may have beside it: experts in one tensor, ``experts.gate_up_proj``."""

WEIGHT: Final = ".weight"
MARKER: Final = "scaled_fp8"
"""ComfyUI's older files say with this tensor that they are FP8."""
METADATA: Final = "_quantization_metadata"
"""ComfyUI's newer files say in this entry of the header which layers are quantized, and how."""

KV_SCALES: Final[Mapping[str, str]] = {
    ".k_proj.k_scale": ".k_scale",
    ".v_proj.v_scale": ".v_scale",
    ".k_proj.output_scale": ".k_scale",
    ".v_proj.output_scale": ".v_scale",
    ".attn.k_scale": ".k_scale",
    ".attn.v_scale": ".v_scale",
    ".k_scale": ".k_scale",
    ".v_scale": ".v_scale",
    ".q_scale": ".q_scale",
    ".kv_scale": ".kv_scale",
}
"""What the scales of cached keys and values are called, and what compressed-tensors calls them: after the attention."""
PART_OF_MODELOPT: Final = (".k_proj.k_scale", ".v_proj.v_scale", ".k_proj.output_scale", ".v_proj.output_scale")


OTHERS: Final[Mapping[str, str]] = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "packed integers of compressed-tensors",
    ".weight_scale_2": "NVFP4",
    ".weight_global_scale": "NVFP4",
    ".weight.absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    "_blocks": "MXFP4",
}
"""What other quantizations call tensors, by the end of their names; MXFP4's blocks have ``_scales`` beside them."""


class Belongings(NamedTuple):
    """The names of what belongs to one weight."""

    scale: str | None = None
    input_scale: str | None = None
    input_scale_ub: str | None = None
    marker: str | None = None
    formats: frozenset[FormatName] = frozenset()
    """Of which format the names are, where they tell."""

    def tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors that there are."""
        return tuple(name for name in self[:4] if isinstance(name, str))


def module_of_weight(weight: str) -> str:
    """Return the module of a weight; of a parameter that is one itself, its own name."""
    return weight.removesuffix(WEIGHT)


def belongings(weight: str, present: Iterable[str]) -> Belongings:
    """Return what belongs to a weight among the tensors of a checkpoint (a set, or what is as fast to ask).

    Of two names for one thing, the first of the table counts; the other one is left over.
    """
    module = module_of_weight(weight)
    found: dict[str, str] = {}
    formats: set[FormatName] = set()
    for suffix, role, format_name in NAMES if weight.endswith(WEIGHT) else STACKED:
        name = module + suffix
        if name in present and role not in found:
            found[role] = name
            formats |= {format_name} if format_name is not None else set()
    return Belongings(**found, formats=frozenset(formats))


def is_scale(tensor: str) -> bool:
    """Return whether a tensor is called a scale: of NVFP4 these are FP8 matrices."""
    return tensor.endswith(("scale", "_scale_inv", ".scale_weight", "_scale_2"))


def weight_of_scale(scale: str) -> str | None:
    """Return the weight that a tensor is the scale of, by its name alone; None of names that say nothing for sure."""
    for suffix in (".weight_scale_inv", ".weight_scale", ".scale_weight"):
        if scale.endswith(suffix):
            return scale.removesuffix(suffix) + WEIGHT
    return scale.removesuffix("_scale_inv") if scale.endswith("_scale_inv") else None


def other_quantization(names: Collection[str]) -> tuple[str, str] | None:
    """Return the name of a tensor of another quantization than FP8 and which that is, or None.

    Args:
        names: of all tensors, in a set or a mapping: names are looked up in it.
    """
    endings = tuple(OTHERS)
    for name in names:
        if name.endswith(endings):
            suffix = next(one for one in endings if name.endswith(one))
            if suffix != "_blocks" or name.removesuffix(suffix) + "_scales" in names:
                return name, OTHERS[suffix]
    return None


def kv_scale(tensor: str) -> str | None:
    """Return compressed-tensors' name for the scale of cached keys or values, or None of any other tensor."""
    return next((tensor.removesuffix(old) + new for old, new in KV_SCALES.items() if tensor.endswith(old)), None)
