"""The predicates that rows of several tables share, each with the refusal that it gives."""

from typing import Final

from fp8core.problem import Platform
from fp8core.table import Requirement


def platform(*names: Platform) -> Requirement:
    """Require one of the platforms ``names``."""
    wanted = " or ".join(names)
    return Requirement(lambda p: p.target.platform in names, f"needs {wanted}, got {{p.target}}")


def arch(*numbers: int) -> Requirement:
    """Require exactly one of the architectures ``numbers``, as for instructions that later ones lack."""
    wanted = " or ".join(str(number) for number in numbers)
    return Requirement(lambda p: p.target.arch in numbers, f"needs architecture {wanted}, got {{p.target}}")


def arch_at_least(number: int) -> Requirement:
    """Require the architecture ``number`` or a later one."""
    return Requirement(lambda p: p.target.arch >= number, f"needs architecture {number} or later, got {{p.target}}")


def aligned(bytes_: int) -> Requirement:
    """Require addresses and row strides that are multiples of ``bytes_`` bytes."""
    return Requirement(
        lambda p: p.alignment % bytes_ == 0,
        f"needs addresses and rows aligned to {bytes_} bytes, got {{p.alignment}}",
    )


NOT_BOTH_E5M2: Final = Requirement(
    lambda p: not (p.a.startswith("float8_e5m2") and p.b.startswith("float8_e5m2")),
    "a and b are both e5m2, which no tensor core multiplies: one of them has to be e4m3",
)
AMD_FORMATS: Final = Requirement(
    lambda p: all(name.endswith("fnuz") == (p.target.arch == 0x942) for name in (p.a, p.b)),
    "gfx942 multiplies fnuz formats and later ones OCP's, got a {p.a} and b {p.b} on {p.target}",
)
AMD_TENSOR_CORES: Final = Requirement(
    lambda p: p.target.arch in (0x942, 0x950, 0x1200, 0x1201),
    "needs FP8 matrix instructions (gfx942, gfx950, gfx1200, gfx1201), got {p.target}",
)
