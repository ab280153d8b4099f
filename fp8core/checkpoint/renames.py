"""The names that transformers gives to layers of some models in place of those in their checkpoints."""

import re
from collections.abc import Iterator
from typing import Final

from fp8core.checkpoint.naming import WEIGHT, module_of

_DENSE: Final = (
    (r"attention\.output\.dense", "attention.o_proj"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"output\.dense", "mlp.fc2"),
)
RENAMES: Final = (
    *(
        (
            (r"encoder\.layer\.", layers),
            (rf"attention\.{within}\.query", "attention.q_proj"),
            (rf"attention\.{within}\.key", "attention.k_proj"),
            (rf"attention\.{within}\.value", "attention.v_proj"),
            *output,
        )
        for within, layers, output in (
            ("self", "encoder.layer.", _DENSE),  # Swin
            ("attention", "layers.", _DENSE),  # ViT, DeiT, ViViT, Pixio
            ("attention", "encoder.layer.", ((r"attention\.output(\.dense)?", "attention.o_proj"),)),  # LW-DETR, DINOv2
        )
    ),
    (  # DETR, MaskFormer, RT-DETR
        ("out_proj", "o_proj"),
        (r"layers\.(\d+)\.fc(\d)", r"layers.\1.mlp.fc\2"),
        (r"encoder\.encoder\.(\d+)\.layers", r"encoder.aifi.\1.layers"),
    ),
    (  # EXAONE
        (r"\.attn\.attention\.", ".self_attn."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"^transformer\.h\.", "model.layers."),
        (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
        (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    ),
    (
        (r"attn\.out_proj", "self_attn.o_proj"),
        ("fc11", "up_proj"),
        ("fc12", "gate_proj"),
        ("fc2", "down_proj"),
    ),  # Nomic
    (("block_sparse_moe", "mlp"), (r"self_attn\.(f_[ab]_proj)", r"self_attn.forget_gate.\1")),  # Mixtral, MiniMax, Kimi
)
"""For each family of models: what is replaced in the names of tensors, in this order.

Source: transformers' conversion_mapping.py, version 5.24.
"""
_ANY: Final = re.compile("|".join(old for family in RENAMES for old, _ in family))


def renamed(module: str) -> Iterator[str]:
    """Yield the names that transformers may give to a module, other than its own, whatever model it is of."""
    tensor = module + WEIGHT
    if _ANY.search(tensor) is None:  # as of nearly all of the tens of thousands of modules of a mixture
        return
    for family in RENAMES:
        name = tensor
        for old, new in family:
            name = re.sub(old, new, name)
        if name != tensor:
            yield module_of(name)
