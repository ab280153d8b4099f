"""Ranges of memory and their owners: finds the owners that a write may reach, among tens of thousands, by bisection."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, Final, Generic, Protocol, TypeVar
from weakref import ReferenceType, WeakSet, ref

from fp8core.core.under_way import Range
from fp8core.forks import ForkSafeLock

PLACES_KEPT: Final = 256
"""Entries that an examiner remembers: each is the addresses of one call's operands."""
SPARE: Final = 64
"""Ranges that may always be added before the lists are rebuilt."""


class Owner(Protocol):
    """An owner of memory ranges; hashed by identity."""

    ranges: tuple[Range, ...]


class Examiner(Protocol):
    """Remembers the addresses of operands whose calls write to no watched memory."""

    examined: set[Any]


OwnerT = TypeVar("OwnerT", bound=Owner)


class Watched(Generic[OwnerT]):
    """The ranges of all live owners, and for a while those of freed ones."""

    def __init__(self) -> None:
        self.lock = ForkSafeLock()
        self.version = 0
        """Counts the changes of the watched ranges."""
        self._alive: WeakSet[OwnerT] = WeakSet()
        self.starts: list[int] = []
        """The starts of all ranges, in ascending order; empty until there is an owner."""
        self._reach: list[int] = []
        """For each range, the largest end of it and of all ranges before it."""
        self._owners: list[ReferenceType[OwnerT]] = []
        """The owner, or former owner, of each range."""
        self._examiners: WeakSet[Examiner] = WeakSet()
        self._rebuild_above = 0
        """Past this many ranges the lists are rebuilt, without the ranges that have no owner any more."""
        self._consistent = True
        """False while these lists are being changed, and after an exception such as Ctrl-C has interrupted a change."""

    def add(self, owner: OwnerT) -> None:
        """Watch the ranges of ``owner``, which may already be watched with other ranges.

        Its old ranges stay watched for a while: a mixture of experts has tens of thousands of weights, and rebuilding
        the lists for each new one would take minutes.
        """
        with self.lock.held:
            self._alive.add(owner)
            rebuild = not self._consistent or len(self.starts) + len(owner.ranges) > self._rebuild_above
            self._consistent = False
            if rebuild:
                owned = [(start, end, ref(each)) for each in self._alive for start, end in each.ranges]
                owned.sort(key=itemgetter(0))
                starts, owners = [start for start, _, _ in owned], [owner for _, _, owner in owned]
                reach = list(accumulate((end for _, end, _ in owned), max))
                self.starts, self._reach, self._owners = starts, reach, owners
                self._rebuild_above = 2 * len(owned) + SPARE
            else:
                for start, end in owner.ranges:
                    self._insert(start, end, ref(owner))
            self._consistent = True
            self.version += 1
            for examiner in list(self._examiners):
                examiner.examined.clear()

    def _insert(self, start: int, end: int, owner: ReferenceType[OwnerT]) -> None:
        """Insert a range, keeping the order of starts."""
        at, reach = bisect_left(self.starts, start), self._reach
        most = max(end, reach[at - 1]) if at else end
        self.starts.insert(at, start)
        self._owners.insert(at, owner)
        reach.insert(at, most)
        for behind in range(at + 1, len(reach)):
            if reach[behind] >= most:
                break
            reach[behind] = most

    def owners_reached_by(self, written: Sequence[Range]) -> list[OwnerT]:
        """Return the live owners that have, or had, a range that may overlap one of ``written``."""
        found: dict[OwnerT, None] = {}
        with self.lock.held:
            if not self._consistent:
                return list(self._alive)
            for start, end in written:
                at = bisect_left(self.starts, end)  # ranges that start before its end
                while at and self._reach[at - 1] > start:
                    at -= 1
                    owner = self._owners[at]()
                    if owner is not None:
                        found[owner] = None
        return list(found)

    def clear_on_change(self, examiner: Examiner) -> None:
        """Clear ``examiner.examined`` whenever the watched ranges change."""
        with self.lock.held:
            self._examiners.add(examiner)

    def remember(self, examiner: Examiner, places: Any, version: int) -> None:
        """Add ``places``, which passed at ``version``, to those of ``examiner``, unless ranges have changed since."""
        with self.lock.held:
            if self.version == version:
                if len(examiner.examined) >= PLACES_KEPT:
                    examiner.examined.clear()
                examiner.examined.add(places)
