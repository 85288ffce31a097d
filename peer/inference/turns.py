"""Whose turn it is: address prefixes come one after the other, as do the clients of one, and the sessions of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

Waiting = TypeVar("Waiting")
Owner = tuple[str, str]
"""An address prefix, and a client that is seen there. Keys cost nothing, so clients share what their prefix has."""


class ClientTurns(Generic[Waiting]):
    """The turns of one kind. `owner_of`: whom what waits belongs to."""

    def __init__(self, owner_of: Callable[[Waiting], Owner]) -> None:
        self._owner_of = owner_of
        self._had_at: dict[tuple[str, ...], int] = {}
        self._turns = 0

    def ordered(self, waiting: Sequence[Waiting]) -> list[Waiting]:
        """Return the waiting items in the order in which to take them: one of each prefix, the longest waiting first;
        then a second one of each. The clients of one prefix take turns alike. One client's items keep their order."""
        by_clients = self._round(waiting, self._owner_of)
        return self._round(by_clients, lambda one: self._owner_of(one)[:1])

    def _round(self, waiting: Sequence[Waiting], key_of: Callable[[Waiting], tuple[str, ...]]) -> list[Waiting]:
        places, ranked = Counter[tuple[str, ...]](), list[tuple[int, int, Waiting]]()
        for one in waiting:
            key = key_of(one)
            ranked.append((places[key], self._had_at.get(key, 0), one))
            places[key] += 1
        return [one for _, _, one in sorted(ranked, key=lambda place: place[:2])]

    def had(self, taken: Sequence[Waiting]) -> None:
        """Note that these have had a turn."""
        self._turns += 1
        for one in taken:
            owner = self._owner_of(one)
            self._had_at[owner] = self._had_at[owner[:1]] = self._turns

    def keep(self, owners: Collection[Owner]) -> None:
        """Forget all other ones, which have no session any more."""
        living = {*owners, *(owner[:1] for owner in owners)}
        self._had_at = {key: at for key, at in self._had_at.items() if key in living}
