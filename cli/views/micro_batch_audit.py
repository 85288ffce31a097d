"""The books of a pipeline: which micro-batches each stage has merged, from what the peers say of every commit.

The ledger of a stage's last commit says which samples it takes for trained; the commits that led there say which ones
their contributions were made of. Where both tell the same, each was counted exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from swarm.protocol.ledger import Range, count, union, without


class MicroBatches(msgspec.Struct, frozen=True, kw_only=True):
    """report.json. `dispatched`, `completed` and `retried` (calls made once more) as the replicas of the first stage
    say; `double_counted` and `lost` of all stages whose commits are known: micro-batches that were merged twice, and
    that a stage's ledger takes for trained though no commit has them. `undone`: those that later stages have merged,
    while the first one has lost its commits with its last replica."""

    dispatched: int
    completed: int
    retried: int
    double_counted: int
    lost: int
    undone: int


@dataclass(frozen=True)
class AuditEntry:
    """One commit of a stage: `previous` is the head that it follows, `counted` what each merged contribution had."""

    head: str
    previous: str
    counted: tuple[tuple[Range, ...], ...] = ()


@dataclass
class AuditTotals:
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

    entries: dict[int, dict[str, AuditEntry]] = field(default_factory=dict)
    totals: dict[str, AuditTotals] = field(default_factory=dict)

    def commit(self, stage: int, entry: AuditEntry) -> None:
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

    def merged_elsewhere(self, stage: int) -> list[Range]:
        """What any known commit of the other stages has merged, also of those that were gone back on."""
        others = (entry for other, known in self.entries.items() if other != stage for entry in known.values())
        return [r for entry in others for ranges in entry.counted for r in ranges]


class Audit(NamedTuple):
    """In samples. `twice`: merged twice; `lost`: taken for trained by the ledger, and in no commit; `undone`: the same,
    but other stages have merged them."""

    twice: int
    lost: int
    undone: int


def audit(merged: Iterable[Range], cursor: int, returned: Sequence[Range], elsewhere: Iterable[Range] = ()) -> Audit:
    """A stage's ledger beside what its commits have `merged`, repetitions included. `elsewhere`, for the first stage:
    what any commit of the others has merged. A first stage that has lost all its replicas goes back, but hands out no
    more what the others have had (`Ledger.after`)."""
    ranges = list(merged)
    distinct = union(ranges)
    trained = without([(0, cursor)], returned)
    missing = without(trained, distinct)
    lost = without(missing, elsewhere)
    again = without(distinct, trained)  # to be handed out anew
    return Audit(count(ranges) - count(distinct) + count(again), count(lost), count(missing) - count(lost))
