"""The audit of a pipeline: which micro-batches each stage has merged, by what the peers report of every commit.

The ledger of a stage's last commit says which samples count as trained. The commits that led there say which samples
their contributions were made of. Where both agree, each sample was counted exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from swarm.protocol.ledger import Ledger, Range, common, count, union, without


class MicroBatches(msgspec.Struct, frozen=True, kw_only=True):
    """Micro-batch counts of report.json.

    `dispatched`, `completed` and `retried` are reported by the replicas of the first stage; the others are sums over
    the stages whose commits are all known.
    """

    dispatched: int
    completed: int
    retried: int
    """Calls made once more."""
    double_counted: int
    """Merged twice in a stage."""
    lost: int
    """Trained according to a stage's ledger, but in none of its commits."""
    undone: int
    """Merged by later stages, while the first stage lost those commits with its last replica."""


@dataclass(frozen=True)
class AuditEntry:
    """One commit of a stage, by the hashes of its head and of the previous head."""

    head: str
    previous: str
    counted: tuple[tuple[Range, ...], ...] = ()
    """Samples of the merged contributions."""


@dataclass
class AuditTotals:
    """Counters of one source of micro-batches, summed over restarts of its process."""

    sums: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)

    def note(self, counters: dict[str, int]) -> None:
        """Take in the counters' present values."""
        if any(counters[name] < seen for name, seen in self.last.items() if name in counters):
            self._close()
        self.last = dict(counters)

    def of(self, name: str) -> int:
        return self.sums.get(name, 0) + self.last.get(name, 0)

    def _close(self) -> None:
        for name, seen in self.last.items():
            self.sums[name] = self.sums.get(name, 0) + seen


@dataclass
class AuditTrail:
    """All known commits of every stage, and the counters of every source of micro-batches."""

    entries: dict[int, dict[str, AuditEntry]] = field(default_factory=dict)
    """Commits by stage and head hash."""
    totals: dict[str, AuditTotals] = field(default_factory=dict)
    """Counters by peer name."""

    def commit(self, stage: int, entry: AuditEntry) -> None:
        """Add a commit. Many peers report the same one; a peer that only adopted it does not know what was merged."""
        known = self.entries.setdefault(stage, {})
        if entry.head not in known or entry.counted:
            known[entry.head] = entry

    def merged(self, stage: int, first: str, head: str) -> list[Range] | None:
        """Return what the commits from head `first` to `head` have merged, repetitions included.

        None if one of the commits is not known.
        """
        known, found = self.entries.get(stage, {}), list[Range]()
        while head != first:
            entry = known.get(head)
            if entry is None:
                return None
            found += [r for ranges in entry.counted for r in ranges]
            head = entry.previous
        return found

    def merged_elsewhere(self, stage: int) -> list[Range]:
        """Return what any known commit of the other stages has merged, superseded commits included."""
        others = (entry for other, known in self.entries.items() if other != stage for entry in known.values())
        return [r for entry in others for ranges in entry.counted for r in ranges]


class Audit(NamedTuple):
    """The result of an audit of one stage, in samples."""

    twice: int
    """Merged twice."""
    lost: int
    """Settled according to the ledger, but in no commit and not declared lost."""
    undone: int
    """Like `lost`, but merged by other stages."""


def audit(merged: Iterable[Range], ledger: Ledger, elsewhere: Iterable[Range] = ()) -> Audit:
    """Compare a stage's ledger with what its commits have `merged`, repetitions included.

    `elsewhere` is for the first stage: what any commit of the other stages has merged. A first stage that has lost all
    its replicas restarts from an older commit, but does not hand out again what other stages have merged
    (`Ledger.after`).
    """
    ranges = list(merged)
    distinct = union(ranges)
    settled = ledger.settled
    missing = without(settled, distinct)
    undone = count(common(missing, elsewhere))
    silent = max(0, count(missing) - max(undone, ledger.lost))
    again = without(distinct, settled)  # will be handed out once more
    return Audit(count(ranges) - count(distinct) + count(again), silent, undone)
