"""fp8core inside Hugging Face transformers: FP8 models, loaded from checkpoints of every FP8 format or from bfloat16.

Importing this module registers the quantization method "fp8core" with transformers, and changes nothing else in it.

Examples:
    >>> from fp8core.transformers import Fp8CoreConfig
    >>> Fp8CoreConfig().scheme
    'channel'
"""

from importlib import import_module

from fp8core.interop.versions import require_version
from fp8core.interrupts import interrupts_wait

require_version("transformers")
import_module("transformers.quantizers.auto")  # takes seconds, so Ctrl-C may end it

with interrupts_wait():  # two of these modules register the method, and transformers refuses to register one again
    from fp8core.transformers.config import Fp8CoreConfig
    from fp8core.transformers.converting import convert_, split_experts_
    from fp8core.transformers.experts import Experts
    from fp8core.transformers.grouped import GroupedExperts
    from fp8core.transformers.grouping import group_experts_
    from fp8core.transformers.loading import config_for, from_pretrained
    from fp8core.transformers.quantizer import Fp8CoreQuantizer

__all__ = [
    "Experts",
    "Fp8CoreConfig",
    "Fp8CoreQuantizer",
    "GroupedExperts",
    "config_for",
    "convert_",
    "from_pretrained",
    "group_experts_",
    "split_experts_",
]
