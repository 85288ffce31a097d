"""Shares of a host: few unfinished handshakes, and slots that peers give up to each other.

Slots of connections (`Slots`) are kept from strangers, who share a part of them. Of slots for flows and sessions
(`SharedSlots`) each that asks gets one, and when all are taken the group that holds most gives one back.

An address counts with its neighbours, /24 in IPv4 and /64 in IPv6, because one machine often has all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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

FAIR_SHARE: Final = 0.25  # of all shared slots: above it a group gives back also what is in use
AT_REST_S: Final = 10.0  # below it, only what was of no use for so long

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


class _SlotTable(ABC, Generic[Holder]):
    """Slots, and who holds them. `last_used` returns when a holder was last of use, in trio's time."""

    def __init__(self, total: int, last_used: Callable[[Holder], float]) -> None:
        self._total = total
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
        """Free the slot of a holder that has ended."""
        self._held.pop(holder, None)

    @abstractmethod
    def _loser(self, newest: Holder) -> Holder | None:
        """Return the holder that has to go for the newest one, None if all may stay."""

    def _most_idle(self, newest: Holder, candidates: list[Holder]) -> Holder:
        return min((h for h in candidates if h is not newest), key=self._last_used, default=newest)


class Slots(_SlotTable[Holder]):
    """Slots for connections of other peers. Above a limit the stranger that was idle the longest gives way."""

    def __init__(self, total: int, admissions: Admissions, last_used: Callable[[Holder], float]) -> None:
        super().__init__(total, last_used)
        self._admissions = admissions

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


class SharedSlots(_SlotTable[Holder]):
    """Slots that one group may fill until another one asks. Then the group that holds most gives up the one that
    was of no use for longest: above its share any, below only one at rest. Identities are free, so they do not count.

    `is_reserved`: whether a holder goes before all that are not, and never gives way to them, if its group has no more
    such than its share. `last_used` returns infinity for what is in use.
    """

    def __init__(
        self,
        total: int,
        last_used: Callable[[Holder], float],
        is_reserved: Callable[[Holder], bool] = lambda holder: False,
    ) -> None:
        super().__init__(total, last_used)
        self._is_reserved = is_reserved

    def _loser(self, newest: Holder) -> Holder | None:
        if len(self._held) <= self._total:
            return None
        share = self._total * FAIR_SHARE
        held = {h: slot.group for h, slot in self._held.items()}
        reserved = Counter(group for h, group in held.items() if self._is_reserved(h))
        pool = {h: group for h, group in held.items() if not self._is_reserved(h) or reserved[group] > share}
        goes_first = newest not in pool and bool(pool)
        pool = pool or held
        groups = Counter(pool.values())
        # Of groups that hold as much, the newest one's own: else two would take from each other without end.
        fullest = max(groups, key=lambda group: (groups[group], group == held[newest]))
        candidates = [h for h in pool if pool[h] == fullest]
        gives_back = fullest != pool.get(newest) and groups[fullest] > share
        if not goes_first and not gives_back:
            rested = trio.current_time() - AT_REST_S
            candidates = [h for h in candidates if self._last_used(h) <= rested]
        return self._most_idle(newest, candidates)
