"""How quantize_tensor divides its work: which blocks find the one scale together, and what they keep until it is found.

The measurements behind the numbers are in docs/quantize.md.
"""

from typing import Final, NamedTuple

from fp8core.kernels.tiles import OCTET
from fp8core.problem import ITEMSIZE, Quantize


class Team(NamedTuple):
    """Blocks that find one scale together, and the octets that a thread of them keeps until it is found."""

    cluster: int
    """1: a block; more: the blocks of one cluster; 0: a resident grid, a block on every multiprocessor."""
    threads: int
    kept: int
    """In registers."""
    shared: int = 0
    """In shared memory."""
    chunk: int = 1
    """Octets in flight to a thread, of those that it does not keep in registers."""
    whole: bool = True
    """Nothing has to be read again."""


TENSOR_THREADS: Final = 1024
SMALL_TEAMS: Final = (
    Team(1, 256, 2),
    Team(8, 128, 1),
    Team(8, 256, 1),
    Team(1, 512, 4),
    Team(8, 256, 2),
    Team(8, 512, 2),
    Team(8, 512, 4),
)
"""For matrices up to 131,072 elements, by how many: faster than a grid that has to meet through memory."""
STATIC_SHARED_BYTES: Final = 1024
"""More than the body's own shared variables take."""
FIRST_CACHE_BYTES: Final = 32 << 10
"""Of what the first cache shares with shared memory: without it fewer loads are in flight (2 % of a large matrix)."""
MULTIPROCESSOR_SHARED_BYTES: Final = {0x90A: 65_536, 0x942: 65_536, 0x950: 163_840}
"""Of HIP targets; a block of CUDA can have all of a multiprocessor's shared memory but 1 KB."""


def shared_octets(problem: Quantize) -> int:
    """Return how many octets a thread of the resident grid can keep in shared memory."""
    target = problem.target
    cache = FIRST_CACHE_BYTES if target.platform == "cuda" and target.shared_bytes > 128 << 10 else 0
    return (target.shared_bytes - STATIC_SHARED_BYTES - cache) // (TENSOR_THREADS * OCTET * ITEMSIZE[problem.x])


def resident(problem: Quantize, flat: bool, whole: bool) -> Team:
    """Return the resident grid: 64 registers limit what a thread keeps, and addresses of rows with gaps take some."""
    octet = OCTET * ITEMSIZE[problem.x]
    kept, chunk = (64, 32) if whole or not flat else (96, 64)  # bytes
    return Team(0, TENSOR_THREADS, kept // octet, shared_octets(problem), chunk // octet, whole)


def teams_of(problem: Quantize, flat: bool) -> tuple[tuple[int, ...], tuple[Team, ...]]:
    """Return the teams for matrices of any size, and how many octets each but the last one keeps: by size."""
    target = problem.target
    clusters = target.platform == "cuda" and target.arch >= 90
    small = tuple(team for team in SMALL_TEAMS if team.cluster == 1 or clusters)
    grid = resident(problem, flat, True)
    blocks = [team.cluster or target.multiprocessors for team in (*small, grid)]
    keeps = tuple(n * t.threads * (t.kept + t.shared) for n, t in zip(blocks, (*small, grid), strict=True))
    return keeps, (*small, grid, resident(problem, flat, False))


def alone(problem: Quantize) -> bool:
    """Return whether a block of the resident grid is sure to have a multiprocessor for itself."""
    target = problem.target
    whole = MULTIPROCESSOR_SHARED_BYTES.get(target.arch) if target.platform == "hip" else target.shared_bytes
    kept = shared_octets(problem) * TENSOR_THREADS * OCTET * ITEMSIZE[problem.x]
    return whole is not None and 2 * kept > whole and target.multiprocessors <= TENSOR_THREADS
