"""The heads of one group that the monitor knows: one chain, each checked by the hash that the next one names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import trio

from peer.net.host import Host
from swarm.membership.head_history import ask_history
from swarm.membership.proven_heads import ProvenHead
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.head import Head
from swarm.status.time_histogram import TimeHistogram

HEADS_MAX: Final = 1024
HISTORY_STEP: Final = 256
"""Older heads at one reading."""
HISTORY_S: Final = 8.0
DONORS_MAX: Final = 4
RECENT: Final = 50
"""So many of the last commits say how long a round takes."""


class HeadChain:
    """The last heads of a group, oldest first, and when those that came meanwhile were new."""

    def __init__(self) -> None:
        self.heads: list[Head] = []
        self.seen_at: dict[bytes, float] = {}
        """By hash of the head, of those that came while the monitor looked, and of the first one that it met."""
        self.counts: Counter[str] = Counter()
        """What happened while the monitor looked: `committed`, `retried`, `regroups`, `merged`, `absent`."""
        self.round_times = TimeHistogram()
        """From one commit to the next, where both came while the monitor looked. Commits that came at one reading share
        the time since the one before."""
        self.reaches_back = False
        """Whether older heads are neither kept by any peer nor wanted."""
        self._hashes: dict[bytes, int] = {}  # place in `heads`
        self._met: set[bytes] = set()  # of `seen_at`, those that may be older

    @property
    def last(self) -> Head | None:
        return self.heads[-1] if self.heads else None

    @property
    def hashes(self) -> list[bytes]:
        """Those of `heads`."""
        return list(self._hashes)

    def came_at(self, hash: bytes) -> float | None:
        """Return when a head came, if the monitor looked then."""
        return None if hash in self._met else self.seen_at.get(hash)

    def is_news(self, head: Head) -> bool:
        """Return whether a proved head is further than all that are known."""
        return not self.heads or position_of(head) > position_of(self.heads[-1])

    def advance(self, head: Head, before: Sequence[Head], now: float) -> None:
        """Take a proved head that is news, and heads that led to it, oldest first. Known heads that did not lead there
        were undone; without a connection the older ones are forgotten."""
        new = [*before, head]
        first = next((place for place, old in enumerate(new) if old.hash in self._hashes), None)
        if first is not None:
            new, base = new[first + 1 :], self._hashes[new[first].hash]
        else:
            base = self._hashes.get(new[0].previous, -1)
        watched = base >= 0
        kept = self.heads[: base + 1]
        for place, later in enumerate(new):
            if watched:
                self._count([*kept, *new][base + place], later)
        if watched and (began := self.came_at(kept[-1].hash)) is not None:
            for _ in filter(lambda later: later.attempt >= 0, new):
                self.round_times.add(max(0.0, now - began) / len(new))
        self.heads = [*kept, *new]
        if not watched:
            self.reaches_back = False
            self._met.add(head.hash)
        for one in new if watched else [head]:
            self.seen_at[one.hash] = now
        self._trim()

    def extend_back(self, older: Sequence[Head]) -> None:
        """Take heads that led to the first one that is known, oldest first."""
        self.heads = [*older, *self.heads]
        self.reaches_back = not older or not self.heads[0].previous
        self._trim()

    @property
    def wants_older(self) -> bool:
        return bool(self.heads) and len(self.heads) < HEADS_MAX and not self.reaches_back

    def commits(self) -> Iterator[tuple[Head | None, Head]]:
        """Yield the heads, newest first, each with the one before it, where that is known."""
        for place in range(len(self.heads) - 1, -1, -1):
            yield (self.heads[place - 1] if place else None), self.heads[place]

    def round_s(self) -> float | None:
        """Return the mean seconds of a round, of those that the monitor saw begin and end."""
        times = [at for head in self.heads[-RECENT:] if (at := self.seen_at.get(head.hash)) is not None]
        return (times[-1] - times[1]) / (len(times) - 2) if len(times) > 2 else None

    def _count(self, before: Head, head: Head) -> None:
        if head.attempt < 0:
            self.counts["regroups"] += 1
            return
        self.counts["committed"] += 1
        self.counts["retried"] += head.attempt
        self.counts["merged"] += len(took_part(head))
        self.counts["absent"] += len(absent_from(before, head))

    def _trim(self) -> None:
        if len(self.heads) > HEADS_MAX:
            self.heads = self.heads[-HEADS_MAX:]
        self._hashes = {head.hash: place for place, head in enumerate(self.heads)}
        self.seen_at = {name: at for name, at in self.seen_at.items() if name in self._hashes}
        self._met &= self.seen_at.keys()


async def follow_history(host: Host, chain: HeadChain, proven: ProvenHead | None, now: float) -> None:
    """Bring a chain up to the proved head, and one step further back, in a bounded time."""
    if proven is None:
        return
    donors = list(dict.fromkeys([*proven.holders, *(member.peer for member in proven.near)]))[:DONORS_MAX]
    with trio.move_on_after(HISTORY_S):
        if chain.is_news(proven.head):
            before, last = list[Head](), chain.last
            if last is not None and last.hash != proven.head.previous:
                with trio.move_on_after(HISTORY_S / 2):
                    before = await ask_history(host, proven.head, donors, after=last.hash, heads_max=HEADS_MAX)
            chain.advance(proven.head, before, now)
        if chain.wants_older:
            room = min(HISTORY_STEP, HEADS_MAX - len(chain.heads))
            chain.extend_back(await ask_history(host, chain.heads[0], donors, heads_max=room))


def took_part(head: Head) -> tuple[str, ...]:
    """Return the peers that contributed to the round of `head`."""
    if head.attempt < 0:
        return ()
    away = {entry.member for entry in head.absent}
    members = [member.peer for member in head.members if member not in away]
    return (*members, *(learner.member.peer for learner in head.learners if not learner.missed))


def absent_from(before: Head | None, head: Head) -> tuple[str, ...]:
    """Return the members and learners that contributed nothing to that round, those among them that it dropped."""
    if head.attempt < 0:
        return ()
    absent = [entry.member.peer for entry in head.absent]
    absent += [learner.member.peer for learner in head.learners if learner.missed]
    return (*absent, *(peer for peer in left(before, head) if peer not in absent))


def joined(before: Head | None, head: Head) -> tuple[str, ...]:
    """Return the peers that are members or learners since `head`."""
    return () if before is None else tuple(sorted(_inside(head) - _inside(before)))


def left(before: Head | None, head: Head) -> tuple[str, ...]:
    """Return the peers that are neither, since `head`."""
    return () if before is None else tuple(sorted(_inside(before) - _inside(head)))


def _inside(head: Head) -> set[str]:
    return {*(member.peer for member in head.members), *(learner.member.peer for learner in head.learners)}
