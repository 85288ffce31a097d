"""Messages on their way to other peers. Each is sent once; the node repeats what matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec
import trio

from peer import faults
from peer.errors import BarnraiseError
from peer.events import EventLog
from peer.net.rpc import Rpc
from swarm.protocol.agreement.messages import Message, VoteMessage
from swarm.rounds.driver.messages import AGREE, MESSAGE_BYTES_MAX, Letter

UNANSWERED_MAX: Final = 64  # to one peer; while so many wait for an answer, further ones are lost


class Outbox:
    """Sends the messages of one group's node."""

    def __init__(self, rpc: Rpc, group: str, timeout_s: Callable[[], float], events: EventLog) -> None:
        self._rpc, self._group, self._timeout_s, self._events = rpc, group, timeout_s, events
        self._unanswered: Counter[str] = Counter()

    def send(self, peer: str, message: Message, round: int, tasks: trio.Nursery) -> None:
        """Send a message in a task of its own. `round`: the one that is under way."""
        if self._unanswered[peer] < UNANSWERED_MAX:
            self._unanswered[peer] += 1
            tasks.start_soon(self._deliver, peer, Letter(self._group, message), round)

    async def _deliver(self, peer: str, letter: Letter, round: int) -> None:
        votes = isinstance(letter.message, VoteMessage)
        try:
            size = len(msgspec.msgpack.encode(letter))
            if size > MESSAGE_BYTES_MAX:
                self._events.emit("message_too_large", peer=peer, bytes=size, kind=type(letter.message).__name__)
                return
            if votes:
                faults.reach("before_vote", round)
            await self._rpc.call(peer, AGREE, letter, timeout_s=self._timeout_s())
            if votes:
                faults.reach("after_vote", round)
        except BarnraiseError:
            return  # lost: the node repeats what matters, and the heartbeat finds dead peers
        finally:
            self._unanswered[peer] -= 1
            if not self._unanswered[peer]:
                del self._unanswered[peer]
