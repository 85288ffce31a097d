"""The actions of one step, in order, behind the write barrier: no action leaves the node before the records it depends
on are on disk."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from peer.catalogue.happening import Happening
from swarm.protocol.agreement.actions import Accuse, Action, CancelTimer, Emit, Persist, Send, SetTimer
from swarm.protocol.agreement.messages import Contradiction, Message
from swarm.protocol.agreement.packing import Packer

WAITING_MAX: Final = 1 << 16  # actions behind one write; if the disk hangs for so long, messages are lost


class Output:
    """Collects actions. While a record is on its way to disk, all but timers and further records wait for it.

    A message of a node to itself does not go out: `mine` returns it once the barrier lets it through."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.able: set[str] = set()
        """Peers that pass rosters on, and take short proposals and packed messages."""
        self._packer = Packer()
        self._ready: list[Action] = []
        self._waiting: deque[tuple[int, Action]] = deque()  # (the record it waits for, action)
        self._mine: deque[tuple[str, Message]] = deque()
        self._next_id = 1
        self._stored = 0
        self._timers: dict[str, float] = {}

    def add(self, action: Action) -> None:
        """Do this once all records so far are on disk."""
        last = self._next_id - 1
        if last <= self._stored:
            self._release(action)
        elif len(self._waiting) < WAITING_MAX:
            self._waiting.append((last, action))

    def send(self, peer: str, message: Message, able: bool = False) -> None:
        """Send a message, packed if it is long and the peer takes that (`able`: as another peer says)."""
        self.add(Send(peer, self._packer.pack(message) if able or peer in self.able else message))

    def emit(self, event: str | Happening, **fields: str | int | float | bool | tuple[str, ...]) -> None:
        self.add(Emit(event, fields) if isinstance(event, str) else Emit(*event.stream_form()))

    def accuse(self, peer: str, reason: str, proof: Contradiction | None = None) -> None:
        self.add(Accuse(peer, reason, proof))

    def persist(self, key: str, record: bytes, state: bytes = b"") -> None:
        """Write a record; later actions wait for it."""
        self._ready.append(Persist(self._next_id, key, record, state))
        self._next_id += 1

    def persisted(self, id: int) -> None:
        """Let through what has waited for this record."""
        self._stored = max(self._stored, min(id, self._next_id - 1))
        while self._waiting and self._waiting[0][0] <= self._stored:
            self._release(self._waiting.popleft()[1])

    def timer(self, id: str, at: float) -> None:
        """Set a timer, at once."""
        if self._timers.get(id) != at:
            self._timers[id] = at
            self._ready.append(SetTimer(id, at))

    def cancel_timer(self, id: str) -> None:
        if self._timers.pop(id, None) is not None:
            self._ready.append(CancelTimer(id))

    def is_due(self, id: str, now: float) -> bool:
        """Return whether that timer is set for now or earlier; it is then forgotten."""
        if self._timers.get(id, now + 1.0) > now:
            return False
        del self._timers[id]
        return True

    def requeue(self, peer: str, message: Message) -> None:
        """Take a message of `peer` that was kept as if it came now."""
        self._mine.append((peer, message))

    def mine(self) -> tuple[str, Message] | None:
        """Return the next message of this node to itself, or one that was kept, with its sender."""
        return self._mine.popleft() if self._mine else None

    def take(self) -> list[Action]:
        """Return the actions that may be carried out now."""
        ready, self._ready = self._ready, []
        return ready

    def _release(self, action: Action) -> None:
        if isinstance(action, Send) and action.peer == self._peer:
            self._mine.append((self._peer, action.message))
        else:
            self._ready.append(action)


def encode(body: msgspec.Struct) -> bytes:
    """Return the one encoding of a record or body."""
    return _ENCODER.encode(body)


_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
