"""Accounting of one replica: the micro-batches that it may count, and has counted. Pure: no clock, no I/O.

A micro-batch counts at most once in a group. Merged samples are no longer free in the ledger of the group's head; this
class keeps those that its replica has counted and not yet merged. The decision is made at the backward (`begin`), not
at the forward: of two copies in flight at one replica the first to come back counts, and the other passes through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from swarm.pipeline.config import STALENESS
from swarm.protocol.head import Head
from swarm.protocol.ledger import Ledger, Range, contains, without

Verdict = Literal["count", "through", "early", "stale"]
_ENDLESS: Final = 1 << 62


class SampleAccounting:
    """The accounting of one replica in one group, from `head` on. Its samples come in ranges of `micro_batch`, aligned
    to that.

    `round_samples`: in a synchronous run, the size of a round's batch: the samples from the ledger's cursor on that
    count before the next commit. `me`: this peer's id, whose promised samples are free for it.
    """

    def __init__(self, head: Head, micro_batch: int, round_samples: int | None = None, me: str = "") -> None:
        self.micro_batch: Final = micro_batch
        self.round_samples: Final = round_samples
        self._me = me
        self._captured: set[int] = set()  # first samples: in a contribution that is being merged
        self._since: set[int] = set()  # counted after that was captured
        self._at: set[int] = set()  # in their backward right now
        self.epoch, self._cursor = head.round, head.ledger.cursor
        self._free = self._free_in(head.ledger)

    @property
    def synchronous(self) -> bool:
        return self.round_samples is not None

    @property
    def counted(self) -> tuple[Range, ...]:
        """Everything counted and not merged, in order."""
        return self._ranges(self._captured | self._since)

    def in_batch(self, ranges: Iterable[Range], epoch: int) -> bool:
        """Return whether `ranges` lie in the batch of `epoch`, the present one or the one before. Synchronous runs
        only."""
        behind = self.epoch - epoch
        if self.round_samples is None or not 0 <= behind <= STALENESS:
            return False
        first = self._cursor - behind * self.round_samples
        return contains([(first, first + self.round_samples)], ranges)

    def merged(self, ranges: Iterable[Range]) -> tuple[Range, ...]:
        """Return those of `ranges` that the group has merged: no commit of it will contain them any more."""
        return without(ranges, self._free)

    def verdict(self, samples: Range, epoch: int) -> Verdict:
        """Decide about a micro-batch that was dispatched in `epoch`: count it, or only pass it through, or hold it
        until the group has reached the epoch ("early"), or refuse it ("stale").

        Synchronous: one of the epoch before passes through, with the weights of that epoch. Otherwise weights may be
        `STALENESS` epochs apart either way.
        """
        ahead = epoch - self.epoch
        if ahead > (0 if self.synchronous else STALENESS):
            return "early"
        if ahead < -STALENESS:
            return "stale"
        return "count" if self.may_count(samples, epoch) else "through"

    def may_count(self, samples: Range, epoch: int) -> bool:
        near = epoch == self.epoch if self.synchronous else abs(epoch - self.epoch) <= STALENESS
        return near and not self.has(samples) and samples[0] not in self._at and contains(self._free, [samples])

    def has(self, samples: Range) -> bool:
        """Return whether it was counted and is not merged yet."""
        return samples[0] in self._captured or samples[0] in self._since

    def is_at(self, samples: Range) -> bool:
        """Return whether it is in its backward, to be counted."""
        return samples[0] in self._at

    def begin(self, samples: Range, epoch: int) -> bool:
        """Begin a backward; return whether it counts. If so, `done` or `undo` must follow."""
        if not self.may_count(samples, epoch):
            return False
        self._at.add(samples[0])
        return True

    def done(self, samples: Range) -> None:
        """Note that the worker has added its gradient. Ignored if everything was forgotten since."""
        if samples[0] in self._at:
            self._at.remove(samples[0])
            self._since.add(samples[0])

    def undo(self, samples: Range) -> None:
        """Note that the worker has not added it."""
        self._at.discard(samples[0])

    def capture(self, ranges: Iterable[Range] | None = None) -> tuple[Range, ...]:
        """Move the samples counted so far, or the worker's `ranges`, into a contribution. Return all that are captured
        now. Samples captured twice are in both contributions."""
        firsts = (
            {first for first, _ in micro_batches_of(ranges, self.micro_batch)}
            if ranges is not None
            else set(self._since)
        )
        self._captured |= firsts
        self._since -= firsts
        self._at -= firsts  # counted in the worker, whose answer is on its way
        return self._ranges(self._captured)

    def reset(self, head: Head) -> tuple[Range, ...]:
        """Move to `head`, which the group has committed: captured samples are merged, or free again. Later ones stay
        counted; in a synchronous run they are forgotten, as their weights are gone. Return the part of it that others
        have merged, so that a contribution with it would count twice."""
        self.epoch, self._cursor = head.round, head.ledger.cursor
        self._free = self._free_in(head.ledger)
        self._captured = set()
        if self.synchronous:
            self._since = set()
        return self._ranges(first for first in self._since if not contains(self._free, [self._micro_batch_at(first)]))

    def forget(self) -> tuple[Range, ...]:
        """Forget everything counted, and return it: the gradients are lost, with the worker or because the state was
        replaced."""
        lost = self.counted
        self._captured, self._since, self._at = set(), set(), set()
        return lost

    def _free_in(self, ledger: Ledger) -> Sequence[Range]:
        if self.round_samples is not None:
            return [(ledger.cursor, ledger.cursor + self.round_samples)]
        return [*ledger.returned, *ledger.promise(self._me), (ledger.cursor, _ENDLESS)]

    def _micro_batch_at(self, first: int) -> Range:
        return (first, first + self.micro_batch)

    def _ranges(self, firsts: Iterable[int]) -> tuple[Range, ...]:
        merged: list[Range] = []
        for first in sorted(firsts):
            if merged and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], first + self.micro_batch)
            else:
                merged.append(self._micro_batch_at(first))
        return tuple(merged)


def micro_batches_of(ranges: Iterable[Range], micro_batch: int) -> list[Range]:
    """Return the micro-batches of `ranges`, in order. ValueError unless they are made of whole ones."""
    found: list[Range] = []
    for first, last in ranges:
        if first % micro_batch or last % micro_batch or last <= first:
            raise ValueError(f"samples {first} to {last} are no whole micro-batches of {micro_batch}: align them")
        found.extend((at, at + micro_batch) for at in range(first, last, micro_batch))
    return found
