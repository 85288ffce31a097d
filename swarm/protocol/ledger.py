"""Which training samples the run has consumed: nothing is lost, nothing is silently repeated, whoever comes and goes.

Samples are numbered 0, 1, 2, ... without end (`peer.data.corpus` maps a number to text). The ledger is part of every
committed head: a cursor below which all numbers have been handed out, and the ranges that were handed out but given
back because their peer died, was too slow or was left out of the commit. Those are handed out first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec

Range = tuple[int, int]  # half-open: [first, last)
NUMBERS_END: Final = 1 << 53


class Ledger(msgspec.Struct, frozen=True):
    """Every sample below `cursor` was trained on and committed, unless it lies in one of the `returned` ranges, or is
    `promised` to a peer (by id) for the next round: one that trains on while an exchange is in flight must know what
    on."""

    cursor: int = 0
    returned: tuple[Range, ...] = ()
    promised: tuple[tuple[str, tuple[Range, ...]], ...] = ()

    @property
    def free(self) -> tuple[Range, ...]:
        """All samples that were neither committed nor promised."""
        return (*self.returned, (self.cursor, NUMBERS_END))

    def is_free(self, ranges: Iterable[Range]) -> bool:
        return contains(self.free, ranges)

    def promise(self, peer: str) -> tuple[Range, ...]:
        return next((ranges for holder, ranges in self.promised if holder == peer), ())

    def assign(self, wanted: Sequence[int]) -> list[tuple[Range, ...]]:
        """Hand out `wanted[i]` samples to contributor i: returned ranges first, then fresh ones. Disjoint by
        construction."""
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
        """The ledger after a commit that contains exactly the `consumed` samples, which were `assigned` or free, and
        begins the next round with those `promised`. Promises of old that were not among those assigned are given
        back."""
        promises = tuple(sorted((peer, ranges) for peer, ranges in (promised or {}).items() if ranges))
        ahead = [r for _, ranges in promises for r in ranges]
        used = _union([*(r for ranges in consumed for r in ranges), *ahead])
        handed = _union([*(r for ranges in assigned for r in ranges), *used])
        cursor = max([self.cursor, *(last for _, last in handed)])
        broken = [r for _, ranges in self.promised for r in ranges]
        left = _union([*self.returned, *broken, (self.cursor, cursor), *handed])
        return Ledger(cursor, tuple(_subtract(left, used)), promises)

    def after(self, others: Iterable[Ledger]) -> Ledger:
        """With all that any of `others` takes for trained taken for trained, too; but for one that says it has come so
        far that it would leave nothing to hand out."""
        free: Sequence[Range] = self.free
        for other in others:
            if other.cursor <= NUMBERS_END // 2:
                free = without(free, without([(0, NUMBERS_END)], other.free))
        if not free or free[-1][1] != NUMBERS_END:  # no honest ledger's
            return self
        return msgspec.structs.replace(self, cursor=free[-1][0], returned=tuple(free[:-1]))

    def narrowed(self, at: int, most: int) -> Ledger:
        """With the `most` returned ranges before the sample `at`, and as many from there on, that are nearest to it.
        The samples of those further back are given up; further ahead all are free again, trained on or not."""
        split = bisect_left(self.returned, (at, 0))
        before, after = self.returned[:split], self.returned[split:]
        cursor = after[most][0] if len(after) > most else self.cursor
        return msgspec.structs.replace(self, cursor=cursor, returned=(*before[-most:], *after[:most]))


def head_of(ranges: Sequence[Range], count: int) -> tuple[Range, ...]:
    """The first `count` samples of `ranges`, in order."""
    taken: list[Range] = []
    for first, last in ranges:
        step = min(count, last - first)
        if step > 0:
            taken.append((first, first + step))
            count -= step
    return tuple(taken)


def tail_of(ranges: Sequence[Range], count: int) -> tuple[Range, ...]:
    """What is left of `ranges` without their first `count` samples."""
    left: list[Range] = []
    for first, last in ranges:
        step = min(count, last - first)
        count -= step
        if first + step < last:
            left.append((first + step, last))
    return tuple(left)


def count(ranges: Iterable[Range]) -> int:
    return sum(last - first for first, last in ranges)


def contains(outer: Iterable[Range], inner: Iterable[Range]) -> bool:
    """Whether every sample of `inner` lies in `outer`."""
    return not _subtract(_union(inner), _union(outer))


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """All samples that lie in any of `ranges`, in order, in as few ranges as can be."""
    return tuple(_union(ranges))


def without(ranges: Iterable[Range], others: Iterable[Range]) -> tuple[Range, ...]:
    """The samples of `ranges` that lie in none of `others`, in order."""
    return tuple(_subtract(_union(ranges), _union(others)))


def overlaps(assignments: Mapping[str, tuple[Range, ...]]) -> bool:
    """Whether any sample is handed to two contributors, or twice to one."""
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
    """Both sorted and disjoint."""
    left: list[Range] = []
    passed = 0  # holes that end before whatever is still to come
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
