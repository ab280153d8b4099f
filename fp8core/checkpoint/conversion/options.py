"""The options of a conversion: which there are, and which go together."""

from collections.abc import Sequence
from typing import Final, get_args

from fp8core.checkpoint.conversion.outputs import TARGETS
from fp8core.checkpoint.formats.claims import is_side
from fp8core.core.checks import is_one_of
from fp8core.dtypes import Fp8Name
from fp8core.errors import CheckpointError
from fp8core.problem import GroupShape, ScaleFormat

E4M3: Final[dict[str, Fp8Name]] = {"fn": "float8_e4m3fn", "fnuz": "float8_e4m3fnuz"}
SCALE_FORMATS: Final[dict[str, ScaleFormat]] = {name: name for name in get_args(ScaleFormat)}
TO_MXFP8: Final = ("mxfp8", "modelopt-mxfp8")
"""The targets of conversions whose scales are always exponents in bytes."""


def check_options(to: str, scales: str, e4m3: str | None) -> None:
    """Refuse options that are not known, or do not go together."""
    if not is_one_of(to, TARGETS):
        raise CheckpointError(f"to needs one of {', '.join(TARGETS)}, got {to!r}")
    if not is_one_of(scales, SCALE_FORMATS):
        raise CheckpointError(f"scales needs one of {', '.join(SCALE_FORMATS)}, got {scales!r}")
    if e4m3 is not None and not is_one_of(e4m3, E4M3):
        raise CheckpointError(f"e4m3 needs one of {', '.join(E4M3)}, got {e4m3!r}")
    if to == "bf16" and (scales != "float32" or e4m3 is not None):
        raise CheckpointError("to needs an FP8 format where scales or e4m3 (--fn, --fnuz) are given, got 'bf16'")
    if scales == "ue8m0_bytes" and to not in ("deepseek", *TO_MXFP8):
        raise CheckpointError(f"scales needs float32 or ue8m0 for {to}, got {scales!r}, which only deepseek has")
    if scales == "ue8m0" and to in TO_MXFP8:
        raise CheckpointError(f"scales needs to be left out, or ue8m0_bytes, for {to}, got {scales!r}")
    if e4m3 == "fnuz" and to in ("comfyui", "deepseek", "modelopt", *TO_MXFP8):
        raise CheckpointError(f"e4m3 needs fn (--fn) for {to}, got {e4m3!r}")


def checked_blocks(block_shape: Sequence[int] | None, to: str) -> GroupShape | None:
    """Return the requested block shape, or None; refuse one that is no pair of whole numbers, or has no use."""
    if block_shape is None:
        return None
    if to not in ("block", "deepseek"):
        raise CheckpointError(
            f"block_shape (--block) needs to be left out for {to}, as only block and deepseek take it, got one"
        )
    sides = block_shape if isinstance(block_shape, tuple | list) else ()
    if len(sides) != 2 or any(not is_side(size) or size < 0 for size in sides):
        raise CheckpointError(f"block_shape needs a pair of whole numbers from 1 to 2**31 - 1, got {block_shape!r}")
    return GroupShape(*sides)
