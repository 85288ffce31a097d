"""Messages on their way to other peers. Each is sent once; the node repeats what matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import trio

from peer import faults
from peer.errors import BarnraiseError, InOtherGroup, RemoteError
from peer.events import EventLog
from peer.net.rpc import Rpc
from peer.net.rpc_server import UNKNOWN_METHOD
from swarm.protocol.agreement.messages import Message, VoteMessage
from swarm.rounds.messages import AGREE, BATCH_BYTES_MAX, MESSAGES_MAX, MessageBatch

_ELSEWHERE: Final = {InOtherGroup.__name__, UNKNOWN_METHOD}  # in no group while it opens another replica
UNANSWERED_MAX: Final = 32  # calls to one peer; while so many wait for an answer, further messages are lost


class MessageSender:
    """Sends the messages of one group's node. Those that are ready together go to a peer in one call."""

    def __init__(self, rpc: Rpc, group: str, timeout_s: Callable[[], float], events: EventLog) -> None:
        self._rpc, self._group, self._timeout_s, self._events = rpc, group, timeout_s, events
        self._unanswered: Counter[str] = Counter()
        self._ready: dict[str, list[Message]] = {}
        self.elsewhere: set[str] = set()
        """Peers that answer and say that they take no part in this group: they have moved to another one, or have not
        begun yet. A peer says so of itself only, and others then wait for it no longer than for one that is dead."""

    def add(self, peer: str, message: Message) -> None:
        """Take a message; it goes with the next `send`."""
        self._ready.setdefault(peer, []).append(message)

    def send(self, round: int, tasks: trio.Nursery) -> None:
        """Send what was added, each call in a task of its own. `round`: the one that is under way."""
        for peer, messages in self._ready.items():
            for first in range(0, len(messages), MESSAGES_MAX):
                if self._unanswered[peer] < UNANSWERED_MAX:
                    self._unanswered[peer] += 1
                    tasks.start_soon(self._deliver, peer, messages[first : first + MESSAGES_MAX], round)
        self._ready.clear()

    async def _deliver(self, peer: str, messages: Sequence[Message], round: int) -> None:
        try:
            for batch in self._batches(peer, messages):
                votes = any(isinstance(message, VoteMessage) for message in batch.messages)
                if votes:
                    faults.reach("before_vote", round)
                await self._rpc.call(peer, AGREE, batch, timeout_s=self._timeout_s())
                self.elsewhere.discard(peer)
                if votes:
                    faults.reach("after_vote", round)
        except BarnraiseError as error:
            if isinstance(error, RemoteError) and error.code in _ELSEWHERE:
                self.elsewhere.add(peer)
            return  # lost: the node repeats what matters, and the heartbeat finds dead peers
        finally:
            self._unanswered[peer] -= 1
            if not self._unanswered[peer]:
                del self._unanswered[peer]

    def _batches(self, peer: str, messages: Sequence[Message]) -> list[MessageBatch]:
        """Return the messages in as few batches as a call has room for."""
        batch = MessageBatch(self._group, tuple(messages))
        size = len(msgspec.msgpack.encode(batch))
        if size <= BATCH_BYTES_MAX:
            return [batch]
        if len(messages) == 1:
            self._events.emit("message_too_large", peer=peer, bytes=size, kind=type(messages[0]).__name__)
            return []
        half = len(messages) // 2
        return self._batches(peer, messages[:half]) + self._batches(peer, messages[half:])
