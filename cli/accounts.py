"""The books of a pipeline: which micro-batches each stage has merged, from what the peers say of every commit.

The ledger of a stage's last commit says which samples it takes for trained; the commits that led there say which ones
their contributions were made of. Where both tell the same, each was counted exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

Range = tuple[int, int]  # half-open


class MicroBatches(msgspec.Struct, frozen=True, kw_only=True):
    """report.json. `issued`, `completed` and `retried` (calls made once more) as the replicas of the first stage say;
    `double_counted` and `lost` of all stages whose commits are known: micro-batches that were merged twice, and that a
    stage's ledger takes for trained though no commit has them."""

    issued: int
    completed: int
    retried: int
    double_counted: int
    lost: int


@dataclass(frozen=True)
class Entry:
    """One commit of a stage: `previous` is the head that it follows, `counted` what each merged contribution had."""

    head: str
    previous: str
    counted: tuple[tuple[Range, ...], ...] = ()


@dataclass
class Totals:
    """Of one issuer, over all its lives: their counters start from 0."""

    sums: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)

    def note(self, counters: dict[str, int]) -> None:
        """What it says now."""
        if any(counters[name] < seen for name, seen in self.last.items() if name in counters):
            self._close()
        self.last = dict(counters)

    def of(self, name: str) -> int:
        return self.sums.get(name, 0) + self.last.get(name, 0)

    def _close(self) -> None:
        for name, seen in self.last.items():
            self.sums[name] = self.sums.get(name, 0) + seen


@dataclass
class Accounts:
    """`entries[stage][head]`; `totals` by peer."""

    entries: dict[int, dict[str, Entry]] = field(default_factory=dict)
    totals: dict[str, Totals] = field(default_factory=dict)

    def commit(self, stage: int, entry: Entry) -> None:
        """Many peers tell of the same commit; who only adopted it does not know what was merged."""
        known = self.entries.setdefault(stage, {})
        if entry.head not in known or entry.counted:
            known[entry.head] = entry

    def merged(self, stage: int, first: str, head: str) -> list[Range] | None:
        """What all the commits that led from the head `first` to `head` have merged, repetitions included; None where
        one is not known."""
        known, found = self.entries.get(stage, {}), list[Range]()
        while head != first:
            entry = known.get(head)
            if entry is None:
                return None
            found += [r for ranges in entry.counted for r in ranges]
            head = entry.previous
        return found


def audit(merged: Iterable[Range], cursor: int, returned: Sequence[Range]) -> tuple[int, int]:
    """(samples merged twice, samples that the ledger takes for trained and nobody has merged)."""
    ranges = list(merged)
    distinct = _union(ranges)
    trained = _without((0, cursor), returned)
    twice = _count(ranges) - _count(distinct)
    again = sum(_overlap(r, free) for r in distinct for free in [*returned, (cursor, 1 << 62)])  # to be handed out anew
    return twice + again, _count(trained) - sum(_overlap(r, t) for r in distinct for t in trained)


def _union(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _without(whole: Range, holes: Sequence[Range]) -> list[Range]:
    left, at = list[Range](), whole[0]
    for first, last in sorted(holes):
        if at < first:
            left.append((at, first))
        at = max(at, last)
    return [*left, (at, whole[1])] if at < whole[1] else left


def _overlap(a: Range, b: Range) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def _count(ranges: Iterable[Range]) -> int:
    return sum(last - first for first, last in ranges)
