"""The predicates that rows of several tables share, each with the refusal that it gives."""

from fp8core.dispatch import Requirement
from fp8core.problem import Platform


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


def rows_up_to(most: int) -> Requirement:
    """Require at most ``most`` rows of a."""
    return Requirement(lambda p: p.m <= most, f"needs m <= {most}, got m={{p.m}}")
