"""Whose turn it is: clients come one after the other, and the sessions of one client share its turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Waiting = TypeVar("Waiting")


class ClientTurns(Generic[Waiting]):
    """The turns of one kind. `client_of`: whom what waits belongs to."""

    def __init__(self, client_of: Callable[[Waiting], str]) -> None:
        self._client_of = client_of
        self._had_at: dict[str, int] = {}
        self._turns = 0

    def ordered(self, waiting: Sequence[Waiting]) -> list[Waiting]:
        """Return what waits in the order in which it is to be taken: one of each client, the one first that has waited
        longest; then a second one of each. What comes first of one client stays first."""
        places, ranked = Counter[str](), list[tuple[int, int, Waiting]]()
        for one in waiting:
            client = self._client_of(one)
            ranked.append((places[client], self._had_at.get(client, 0), one))
            places[client] += 1
        return [one for _, _, one in sorted(ranked, key=lambda place: place[:2])]

    def had(self, taken: Sequence[Waiting]) -> None:
        """Note that these have had a turn."""
        self._turns += 1
        for one in taken:
            self._had_at[self._client_of(one)] = self._turns

    def forget(self, client: str) -> None:
        """Forget a client that has no session any more."""
        self._had_at.pop(client, None)
