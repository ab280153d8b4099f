"""Ranges of memory and their owners: which owners a write may reach, among tens of thousands, without asking each."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, Final, Generic, Protocol, TypeVar
from weakref import ReferenceType, WeakSet, ref

from fp8core.core.under_way import Range
from fp8core.forks import ForkSafeLock

PLACES_KEPT: Final = 256
"""Sets of places that an examiner remembers."""
SPARE: Final = 64
"""Ranges that are added before all are looked at."""


class Owner(Protocol):
    """What owns ranges of memory; it is hashed by identity."""

    ranges: tuple[Range, ...]


class Examiner(Protocol):
    """What remembers the places of operands that write to no watched memory."""

    examined: set[Any]


OwnerT = TypeVar("OwnerT", bound=Owner)


class Watched(Generic[OwnerT]):
    """The ranges of owners that are alive, and for a while of those that were."""

    def __init__(self) -> None:
        self.lock = ForkSafeLock()
        self.version = 0
        """Counts the changes of what is watched."""
        self._alive: WeakSet[OwnerT] = WeakSet()
        self.starts: list[int] = []
        """Of all ranges, in order; empty until there is an owner."""
        self._reach: list[int] = []
        """For each range the largest end of it and those before it."""
        self._owners: list[ReferenceType[OwnerT]] = []
        """Whose each range is, or was."""
        self._examiners: WeakSet[Examiner] = WeakSet()
        self._most = 0
        """With more ranges than these, those that no owner has any more are left out."""
        self._whole = True
        """False amid a change of these lists, and after one that an exception has ended, as Ctrl-C may."""

    def add(self, owner: OwnerT) -> None:
        """Watch the ranges of ``owner``, which may be watched already with others.

        Those others stay watched for a while: a mixture of experts has tens of thousands of weights, and looking at all
        of them for each new one would take minutes.
        """
        with self.lock.held:
            self._alive.add(owner)
            anew = not self._whole or len(self.starts) + len(owner.ranges) > self._most
            self._whole = False
            if anew:
                owned = [(start, end, ref(each)) for each in self._alive for start, end in each.ranges]
                owned.sort(key=itemgetter(0))
                starts, owners = [start for start, _, _ in owned], [owner for _, _, owner in owned]
                reach = list(accumulate((end for _, end, _ in owned), max))
                self.starts, self._reach, self._owners = starts, reach, owners
                self._most = 2 * len(owned) + SPARE
            else:
                for start, end in owner.ranges:
                    self._insert(start, end, ref(owner))
            self._whole = True
            self.version += 1
            for examiner in list(self._examiners):
                examiner.examined.clear()

    def _insert(self, start: int, end: int, owner: ReferenceType[OwnerT]) -> None:
        """Insert a range among others in the order of their starts."""
        at, reach = bisect_left(self.starts, start), self._reach
        most = max(end, reach[at - 1]) if at else end
        self.starts.insert(at, start)
        self._owners.insert(at, owner)
        reach.insert(at, most)
        for behind in range(at + 1, len(reach)):
            if reach[behind] >= most:
                break
            reach[behind] = most

    def among(self, written: Sequence[Range]) -> list[OwnerT]:
        """Return the owners that have, or had, a range which may overlap one of some others."""
        found: dict[OwnerT, None] = {}
        with self.lock.held:
            if not self._whole:
                return list(self._alive)
            for start, end in written:
                at = bisect_left(self.starts, end)  # ranges that start before its end
                while at and self._reach[at - 1] > start:
                    at -= 1
                    owner = self._owners[at]()
                    if owner is not None:
                        found[owner] = None
        return list(found)

    def invalidates(self, examiner: Examiner) -> None:
        """Let ``examiner`` forget what it has examined whenever something else is watched."""
        with self.lock.held:
            self._examiners.add(examiner)

    def remember(self, examiner: Examiner, places: Any, version: int) -> None:
        """Let ``examiner`` remember places that were in order at ``version``, unless something is watched since."""
        with self.lock.held:
            if self.version == version:
                if len(examiner.examined) >= PLACES_KEPT:
                    examiner.examined.clear()
                examiner.examined.add(places)
