"""Accounting of training samples: no sample is silently lost or repeated when peers join, fail or leave.

Samples are numbered 0, 1, 2, ... (`peer.data.corpus` maps a number to text). The ledger is part of every committed
head. It holds a cursor, below which all samples have been issued, and the ranges below it that were returned because
their peer failed, was too slow or was left out of the commit. Returned ranges are assigned first.

At every head issued = merged + free + lost: the cursor is the sum of the samples in commits, those returned or
promised, and those that were given up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Annotated, Final

import msgspec

from peer.bounds import MEMBERS_MAX, NUMBERS_END, Name, Number

Range = tuple[Number, Number]  # half-open: [first, last)
RANGES_MAX: Final = 1 << 16  # in one list; a message of 1 MiB holds no more of them
Ranges = Annotated[tuple[Range, ...], msgspec.Meta(max_length=RANGES_MAX)]


class Ledger(msgspec.Struct, frozen=True):
    """The free samples. All others below `cursor` are in commits, but for `lost` of them."""

    cursor: Number = 0
    returned: Ranges = ()
    """Ranges below `cursor` that no commit contains, in order."""
    promised: Annotated[tuple[tuple[Name, Ranges], ...], msgspec.Meta(max_length=MEMBERS_MAX)] = ()
    """Ranges promised to peers (by id) for the next round, so that they can train while an exchange is in flight."""
    lost: Number = 0
    """How many samples below `cursor` are in no commit and never will be: a later stage of a pipeline has given them
    up, or the first one went back to an older commit that lacks them."""

    @property
    def free(self) -> tuple[Range, ...]:
        """All samples that are neither committed nor promised."""
        return (*self.returned, (self.cursor, NUMBERS_END))

    @property
    def settled(self) -> tuple[Range, ...]:
        """All samples below the cursor that are merged, promised or lost."""
        return without([(0, self.cursor)], self.returned)

    def is_free(self, ranges: Iterable[Range]) -> bool:
        """Return whether every sample of `ranges` is free."""
        return contains(self.free, ranges)

    def promise(self, peer: str) -> tuple[Range, ...]:
        """Return the ranges promised to that peer."""
        return next((ranges for holder, ranges in self.promised if holder == peer), ())

    def assign(self, wanted: Sequence[int]) -> list[tuple[Range, ...]]:
        """Assign `wanted[i]` samples to contributor i: returned ranges first, then new ones. Results are disjoint."""
        free = [*self.returned, (self.cursor, self.cursor + sum(wanted))]
        position = 0
        handed: list[tuple[Range, ...]] = []
        for count in wanted:
            mine: list[Range] = []
            while count > 0:
                first, last = free[position]
                taken = min(count, last - first)
                mine.append((first, first + taken))
                count -= taken
                free[position] = (first + taken, last)
                if first + taken == last:
                    position += 1
            handed.append(tuple(mine))
        return handed

    def settle(
        self,
        assigned: Iterable[tuple[Range, ...]],
        consumed: Iterable[tuple[Range, ...]],
        promised: Mapping[str, tuple[Range, ...]] | None = None,
    ) -> Ledger:
        """Return the ledger after a commit of exactly the `consumed` samples, which were `assigned` or free.

        `promised` are the promises for the next round. Old promises that were not assigned are returned."""
        promises = tuple(sorted((peer, ranges) for peer, ranges in (promised or {}).items() if ranges))
        ahead = [r for _, ranges in promises for r in ranges]
        used = _union([*(r for ranges in consumed for r in ranges), *ahead])
        handed = _union([*(r for ranges in assigned for r in ranges), *used])
        cursor = max([self.cursor, *(last for _, last in handed)])
        broken = [r for _, ranges in self.promised for r in ranges]
        left = _union([*self.returned, *broken, (self.cursor, cursor), *handed])
        return Ledger(cursor, tuple(_subtract(left, used)), promises, self.lost)

    def after(self, others: Iterable[Ledger]) -> Ledger:
        """Return this ledger without the free samples that are settled in any of `others`: here they are lost.

        A ledger with an absurd cursor is ignored, since it would leave nothing to assign."""
        free: Sequence[Range] = self.free
        for other in others:
            if other.cursor <= NUMBERS_END // 2:
                free = without(free, without([(0, NUMBERS_END)], other.free))
        if not free or free[-1][1] != NUMBERS_END:  # some ledger is forged
            return self
        return self.freeing(free[-1][0], tuple(free[:-1]))

    def freeing(self, cursor: int, returned: tuple[Range, ...]) -> Ledger:
        """Return this ledger with exactly those samples free. Samples that were free before are lost."""
        lost = self.lost + (cursor - count(returned)) - (self.cursor - count(self.returned))
        return msgspec.structs.replace(self, cursor=cursor, returned=returned, lost=max(0, lost))

    def without_oldest(self, at: int, most: int) -> Ledger:
        """Return this ledger with only the `most` nearest of the returned ranges before sample `at`; the others are
        lost."""
        split = bisect_left(self.returned, (at, 0))
        return self.freeing(self.cursor, self.returned[max(0, split - most) :])

    def ranges_from(self, at: int) -> int:
        """Return the number of returned ranges from sample `at` on."""
        return len(self.returned) - bisect_left(self.returned, (at, 0))

    def closed(self, first: Ledger) -> Ledger:
        """Return the ledger of a later stage at the end of a run in which the first stage's is `first`: what is settled
        there, and is free here, is lost."""
        cursor = max(self.cursor, first.cursor)
        return self.freeing(cursor, without([*self.returned, (self.cursor, cursor)], first.settled))


def head_of(ranges: Sequence[Range], count: int) -> tuple[Range, ...]:
    """Return the first `count` samples of `ranges`, in order."""
    taken: list[Range] = []
    for first, last in ranges:
        step = min(count, last - first)
        if step > 0:
            taken.append((first, first + step))
            count -= step
    return tuple(taken)


def tail_of(ranges: Sequence[Range], count: int) -> tuple[Range, ...]:
    """Return `ranges` without their first `count` samples."""
    left: list[Range] = []
    for first, last in ranges:
        step = min(count, last - first)
        count -= step
        if first + step < last:
            left.append((first + step, last))
    return tuple(left)


def count(ranges: Iterable[Range]) -> int:
    """Return the number of samples in `ranges`."""
    return sum(last - first for first, last in ranges)


def contains(outer: Iterable[Range], inner: Iterable[Range]) -> bool:
    """Return whether every sample of `inner` lies in `outer`."""
    return not _subtract(_union(inner), _union(outer))


def common(ranges: Iterable[Range], others: Iterable[Range]) -> tuple[Range, ...]:
    """Return the samples that lie in both, in order."""
    both = _union(ranges)
    return tuple(_subtract(both, _subtract(both, _union(others))))


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the samples of all `ranges`, in order and in as few ranges as possible."""
    return tuple(_union(ranges))


def without(ranges: Iterable[Range], others: Iterable[Range]) -> tuple[Range, ...]:
    """Return the samples of `ranges` that lie in none of `others`, in order."""
    return tuple(_subtract(_union(ranges), _union(others)))


def overlaps(assignments: Mapping[str, tuple[Range, ...]]) -> bool:
    """Return whether any sample is assigned to two contributors, or twice to one."""
    flat = [r for ranges in assignments.values() for r in ranges]
    return count(_union(flat)) != count(flat)


def _union(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if last <= first:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _subtract(ranges: Sequence[Range], holes: Sequence[Range]) -> list[Range]:
    """Return `ranges` without `holes`; both are sorted and disjoint."""
    left: list[Range] = []
    passed = 0  # holes that end before all remaining ranges
    for first, last in ranges:
        while passed < len(holes) and holes[passed][1] <= first:
            passed += 1
        for hole_first, hole_last in islice(holes, passed, None):
            if hole_first >= last:
                break
            if hole_first > first:
                left.append((first, hole_first))
            first = max(first, hole_last)
        if first < last:
            left.append((first, last))
    return left
