"""State transfer in a gossip run: a peer serves its own state, and fetches another's when it joins late or strays.

No quorum certifies a state, as no two peers hold the same. A joiner takes one peer's weights, checked against the hash
that this peer named. Its round is believed only as far as the group confirms it: the median of the others' records, and
the median of the peers that answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import choice, sample
from statistics import median_low
from typing import Final

import msgspec
import trio

from peer.catalogue.rounds import FetchedState
from peer.checkpoint.generation import MemoryRoom, StateGeneration
from peer.errors import NetworkError
from peer.net.method import Empty
from peer.net.rpc import Call, Rpc, ask_each
from swarm.gossip.context import GossipContext, GossipRules
from swarm.gossip.messages import OFFER_STATE, StateOffer
from swarm.gossip.pairing import APART_MAX, PeerView, group_round
from swarm.gossip.replica import Replica
from swarm.state.fetch import fetch_state

ASKED: Final = 5
AHEAD_MAX: Final = 100  # rounds that a group may advance while its members' records are under way


async def find_donor(rpc: Rpc, others: Mapping[str, PeerView], answer_s: float) -> tuple[str, StateOffer]:
    """Return a peer to fetch a state from, and its offer: of a few random peers, one near the median of their rounds.

    Rounds may last less than a record, so answers count, not records; but an answer more than `AHEAD_MAX` rounds ahead
    of the records is ignored, even if it is the only one. Raises NetworkError if no peer offers a state.
    """
    asked = sample(sorted(others), min(ASKED, len(others)))
    places = await ask_each(rpc, OFFER_STATE, dict.fromkeys(asked, Empty()), answer_s)
    under_way = {peer: seen for peer, seen in others.items() if seen.round > 0}  # newcomers' rounds say nothing
    newest = (group_round(under_way) or 0) + AHEAD_MAX
    offers = {peer: place for peer, place in places.items() if place.state_hash and place.round <= newest}
    if not offers:
        raise NetworkError("no peer serves its state at the moment: try again later")
    middle = median_low([place.round for place in offers.values()])
    return choice([(peer, place) for peer, place in offers.items() if abs(place.round - middle) <= APART_MAX])


class GossipStateServer:
    """Publishes one peer's state each round, and fetches another's when it must."""

    def __init__(self, context: GossipContext, rules: GossipRules, replica: Replica) -> None:
        self._context, self._rules, self._replica = context, rules, replica
        self._copies = MemoryRoom(("theta",), replica.theta.numel(), context.part_file.parent, in_memory=0)
        self._place = StateOffer(-1, b"")
        context.host.rpc.register(OFFER_STATE, self._on_place)

    async def publish(self) -> None:
        """Publish a copy of the weights; they must not change meanwhile."""
        replica = self._replica
        if replica.round < 0:
            return
        head = msgspec.msgpack.encode(replica.head(self._rules.run_id, self._rules.steps))
        self._context.snapshots.publish(await trio.to_thread.run_sync(self._copied), head)
        self._place = StateOffer(replica.round, replica.tree.root)

    def _copied(self) -> StateGeneration:
        copy = self._copies.new()
        copy.tensors["theta"].copy_(self._replica.theta)
        copy.finish(self._replica.tree)
        return copy

    async def fetch(self, others: dict[str, PeerView]) -> None:
        """Take over the weights of a peer near the median round of the `others`; at the run's beginning, the
        authority's. Raises NetworkError if no peer could deliver."""
        context, replica = self._context, self._replica
        began = trio.current_time()
        donor, place = await self._find_donor(others)
        fetched = await fetch_state(
            context.host.rpc,
            lambda: [donor],
            place.state_hash,
            replica.size_bytes,
            context.part_file,
            context.host.events,
            1,
        )
        await trio.to_thread.run_sync(replica.replace, fetched.tensors[0], place.round)
        seconds = round(trio.current_time() - began, 3)
        context.host.events.emit(FetchedState(round=replica.round, donors=1, replayed=False, seconds=seconds))

    async def _find_donor(self, others: dict[str, PeerView]) -> tuple[str, StateOffer]:
        middle = group_round(others)
        if middle is None or (middle <= APART_MAX and self._replica.round < 0):
            return self._rules.authority, StateOffer(0, self._rules.genesis)
        return await find_donor(self._context.host.rpc, others, self._context.timeouts.answer_s)

    async def _on_place(self, call: Call[Empty]) -> StateOffer:
        return self._place
