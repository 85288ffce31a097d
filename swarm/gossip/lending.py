"""States in a gossip run: what a peer lends of its own, and whose it takes over when it comes late or strays.

No quorum stands behind a state here, for no two peers hold the same. What a joiner takes is one peer's weights, checked
against the hash which that peer named; of its round no more is believed than the middle of the group bears out.
"""

from __future__ import annotations

from random import Random

import msgspec
import trio

from peer.errors import BarnraiseError, NetworkError
from peer.rpc import Call
from swarm.fetch import fetch_state
from swarm.gossip.corner import Corner, Rules
from swarm.gossip.messages import PLACE, AskPlace, Place
from swarm.gossip.pairing import APART_MAX, Seen, candidates, group_round
from swarm.gossip.replica import Replica


class Lending:
    """Of one peer; `publish` each round, `fetch` when it must."""

    def __init__(self, corner: Corner, rules: Rules, replica: Replica) -> None:
        self._corner, self._rules, self._replica = corner, rules, replica
        self._random = Random()
        self._place = Place(-1, b"")
        corner.host.rpc.serve(PLACE, self._on_place)

    async def publish(self) -> None:
        """Put the weights on the shelf; they must not change meanwhile."""
        replica = self._replica
        if replica.round < 0:
            return
        head = msgspec.msgpack.encode(replica.head(self._rules.run_id, self._rules.steps))
        await trio.to_thread.run_sync(self._corner.shelf.publish, replica.tree, [replica.theta], head)
        self._place = Place(replica.round, replica.tree.root)

    async def fetch(self, others: dict[str, Seen]) -> None:
        """Take over the weights of a peer near the middle of the `others`; at the run's beginning, the authority's.
        NetworkError if nobody could deliver."""
        corner, replica = self._corner, self._replica
        began = trio.current_time()
        donor, place = await self._find_donor(others)
        fetched = await fetch_state(
            corner.host.rpc,
            lambda: [donor],
            place.state_hash,
            replica.size_bytes,
            corner.part_file,
            corner.events,
            1,
        )
        await trio.to_thread.run_sync(replica.replace, fetched.tensors[0], place.round)
        seconds = round(trio.current_time() - began, 3)
        corner.events.emit("state_fetched", round=replica.round, donors=1, replayed=False, seconds=seconds)

    async def _find_donor(self, others: dict[str, Seen]) -> tuple[str, Place]:
        middle = group_round(others)
        if middle is None or (middle <= APART_MAX and self._replica.round < 0):
            return self._rules.authority, Place(0, self._rules.genesis)
        for peer in candidates(others, middle, (), self._random):
            try:
                reply = await self._corner.host.rpc.call(peer, PLACE, AskPlace(), timeout_s=self._corner.tempo.answer_s)
            except BarnraiseError:
                continue  # another will do
            place = reply.body
            if place.state_hash and abs(place.round - middle) <= APART_MAX:
                return peer, place
        raise NetworkError("nobody who is about as far as the others lends its state at the moment")

    async def _on_place(self, call: Call[AskPlace]) -> Place:
        return self._place
