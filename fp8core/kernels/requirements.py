"""Requirements that rows of several tables share, each with its refusal."""

from typing import Final

from fp8core.features import HARDWARE, Feature, features
from fp8core.table import Requirement
from fp8core.target import Platform


def platform(*names: Platform) -> Requirement:
    """Require one of the platforms ``names``."""
    wanted = " or ".join(names)
    return Requirement(lambda p: p.target.platform in names, f"needs {wanted}, got {{p.target}}")


def supports(*any_of: Feature) -> Requirement:
    """Require one of these features of the target."""
    wanted = " or ".join(f"{feature} ({HARDWARE[feature]})" for feature in any_of)
    return Requirement(lambda p: not features(p.target).isdisjoint(any_of), f"needs {wanted}, got {{p.target}}")


def aligned(bytes_: int) -> Requirement:
    """Require addresses and row strides that are multiples of ``bytes_`` bytes."""
    return Requirement(
        lambda p: p.alignment % bytes_ == 0,
        f"needs addresses and rows aligned to {bytes_} bytes, got {{p.alignment}}",
    )


CUDA: Final = platform("cuda")
HIP: Final = platform("hip")
ON_A_GPU: Final = platform("cuda", "hip")
ON_THE_HOST: Final = platform("host")
COLUMNS_IN_32_BITS: Final = Requirement(
    lambda p: p.cols < 1 << 31, "needs less than 2**31 columns, as it counts them in 32 bits, got {p.cols}"
)
