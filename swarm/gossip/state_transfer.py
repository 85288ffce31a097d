"""States in a gossip run: what a peer lends of its own, and whose it takes over when it comes late or strays.

No quorum stands behind a state here, for no two peers hold the same. What a joiner takes is one peer's weights, checked
against the hash which that peer named; of its round no more is believed than the middle of the group bears out: the
others' records, and of those who answered the middle one.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import choice, sample
from statistics import median_low
from typing import Final

import msgspec
import trio

from peer.errors import BarnraiseError, NetworkError
from peer.net.rpc import Call, Rpc
from swarm.gossip.context import GossipContext, Rules
from swarm.gossip.messages import PLACE, AskPlace, Place
from swarm.gossip.pairing import APART_MAX, Seen, group_round
from swarm.gossip.replica import Replica
from swarm.state.fetch import fetch_state

ASKED: Final = 5
AHEAD_MAX: Final = 100  # rounds that a group may go on while the records of its members are under way


async def find_donor(rpc: Rpc, others: Mapping[str, Seen], answer_s: float) -> tuple[str, Place]:
    """Somebody to fetch a state from, and which: of a few random peers, one whose round is near the middle of theirs.
    Their answers count, for rounds may last less than a record; but who is `AHEAD_MAX` rounds ahead of the records is
    not believed, though it be the only one that answers. NetworkError if there is none."""
    places: dict[str, Place] = {}

    async def ask(peer: str) -> None:
        try:
            places[peer] = (await rpc.call(peer, PLACE, AskPlace(), timeout_s=answer_s)).body
        except BarnraiseError:
            return  # others will do

    async with trio.open_nursery() as nursery:
        for peer in sample(sorted(others), min(ASKED, len(others))):
            nursery.start_soon(ask, peer)
    under_way = {peer: seen for peer, seen in others.items() if seen.round > 0}  # newcomers bear out nothing
    newest = (group_round(under_way) or 0) + AHEAD_MAX
    lent = {peer: place for peer, place in places.items() if place.state_hash and place.round <= newest}
    if not lent:
        raise NetworkError("nobody lends its state at the moment: try again later.")
    middle = median_low([place.round for place in lent.values()])
    return choice([(peer, place) for peer, place in lent.items() if abs(place.round - middle) <= APART_MAX])


class Lending:
    """Of one peer; `publish` each round, `fetch` when it must."""

    def __init__(self, corner: GossipContext, rules: Rules, replica: Replica) -> None:
        self._corner, self._rules, self._replica = corner, rules, replica
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
        return await find_donor(self._corner.host.rpc, others, self._corner.tempo.answer_s)

    async def _on_place(self, call: Call[AskPlace]) -> Place:
        return self._place
