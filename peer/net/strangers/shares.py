"""Shares of a listener: few unfinished handshakes, and slots that strangers give up to each other and to trusted peers.

An address counts with its neighbours, /24 in IPv4 and /64 in IPv6, because one machine often has all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import trio

from peer.net.address_prefix import prefix_of
from peer.net.admissions import Admissions

STRANGERS_SHARE: Final = 0.25  # of all slots, at a host that knows whom to trust
ALL_SHARE: Final = 0.8  # of all slots, for peers that connect to us: the rest stays free for those we dial
GROUP_SHARE: Final = 0.5  # of the slots that strangers may have: many may share one NAT, but may not take all

Holder = TypeVar("Holder", bound=Hashable)


def address_group(ip: str) -> str:
    """Return the network that an address is counted with. Anything else than an address is a group of its own."""
    try:
        return prefix_of(ip)
    except ValueError:
        return ip


class Handshakes:
    """Unfinished handshakes. Above the limits the oldest gives way to the newest: an honest one takes milliseconds."""

    def __init__(self, total_max: int, per_group_max: int) -> None:
        self.on_given_way: Callable[[], None] = lambda: None
        """Called when one gives way."""
        self._total_max = total_max
        self._per_group_max = per_group_max
        self._running: dict[str, list[trio.CancelScope]] = {}  # per group, oldest first

    def __len__(self) -> int:
        return sum(map(len, self._running.values()))

    @contextmanager
    def count(self, group: str) -> Iterator[None]:
        """Count as an unfinished handshake inside the block. A newer one may cancel it."""
        mine = self._running.setdefault(group, [])
        if len(mine) >= self._per_group_max:
            self._give_way(mine)
        elif len(self) >= self._total_max:
            self._give_way(max(self._running.values(), key=len))
        with trio.CancelScope() as scope:
            mine.append(scope)
            try:
                yield
            finally:
                if scope in mine:
                    mine.remove(scope)
                if not mine and self._running.get(group) is mine:
                    del self._running[group]

    def _give_way(self, group: list[trio.CancelScope]) -> None:
        group.pop(0).cancel()
        self.on_given_way()


@dataclass(frozen=True)
class _Slot:
    peer: str
    group: str


class Slots(Generic[Holder]):
    """Slots for connections of other peers. Above a limit the stranger that was idle the longest gives way.

    `last_used` returns when a holder was last of use, in trio's time.
    """

    def __init__(self, total: int, admissions: Admissions, last_used: Callable[[Holder], float]) -> None:
        self._total = total
        self._admissions = admissions
        self._last_used = last_used
        self._held: dict[Holder, _Slot] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, holder: Holder, peer: str, group: str) -> Holder | None:
        """Give a slot to `holder`. Returns the one that has to be closed for it, which may be `holder` itself."""
        self._held[holder] = _Slot(peer, group)
        loser = self._loser(holder)
        if loser is not None:
            self.remove(loser)
        return loser

    def remove(self, holder: Holder) -> None:
        """Free the slot of a connection that has ended."""
        self._held.pop(holder, None)

    def _loser(self, newest: Holder) -> Holder | None:
        strangers = {h: slot.group for h, slot in self._held.items() if not self._admissions.is_trusted(slot.peer)}
        share = STRANGERS_SHARE if self._admissions.guarded else ALL_SHARE
        group = strangers.get(newest)
        groups = Counter(strangers.values())
        if group is not None and groups[group] > max(1, self._total * share * GROUP_SHARE):
            return self._most_idle(newest, [h for h in strangers if strangers[h] == group])
        crowded = group is not None and len(strangers) > max(1, self._total * share)
        if crowded or len(self._held) > self._total * ALL_SHARE:
            fullest = max(groups.values(), default=0)
            return self._most_idle(newest, [h for h in strangers if groups[strangers[h]] == fullest])
        return None

    def _most_idle(self, newest: Holder, candidates: list[Holder]) -> Holder:
        return min((h for h in candidates if h is not newest), key=self._last_used, default=newest)
