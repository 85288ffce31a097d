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
from swarm.gossip.context import GossipContext, GossipRules
from swarm.gossip.messages import OFFER_STATE, AskState, StateOffer
from swarm.gossip.pairing import APART_MAX, PeerView, group_round
from swarm.gossip.replica import Replica
from swarm.state.fetch import fetch_state

ASKED: Final = 5
AHEAD_MAX: Final = 100  # rounds that a group may go on while the records of its members are under way


async def find_donor(rpc: Rpc, others: Mapping[str, PeerView], answer_s: float) -> tuple[str, StateOffer]:
    """Somebody to fetch a state from, and which: of a few random peers, one whose round is near the middle of theirs.
    Their answers count, for rounds may last less than a record; but who is `AHEAD_MAX` rounds ahead of the records is
    not believed, though it be the only one that answers. NetworkError if there is none."""
    places: dict[str, StateOffer] = {}

    async def ask(peer: str) -> None:
        try:
            places[peer] = (await rpc.call(peer, OFFER_STATE, AskState(), timeout_s=answer_s)).body
        except BarnraiseError:
            return  # others will do

    async with trio.open_nursery() as nursery:
        for peer in sample(sorted(others), min(ASKED, len(others))):
            nursery.start_soon(ask, peer)
    under_way = {peer: seen for peer, seen in others.items() if seen.round > 0}  # newcomers bear out nothing
    newest = (group_round(under_way) or 0) + AHEAD_MAX
    uploading = {peer: place for peer, place in places.items() if place.state_hash and place.round <= newest}
    if not uploading:
        raise NetworkError("nobody lends its state at the moment: try again later.")
    middle = median_low([place.round for place in uploading.values()])
    return choice([(peer, place) for peer, place in uploading.items() if abs(place.round - middle) <= APART_MAX])


class GossipStateServer:
    """Of one peer; `publish` each round, `fetch` when it must."""

    def __init__(self, context: GossipContext, rules: GossipRules, replica: Replica) -> None:
        self._context, self._rules, self._replica = context, rules, replica
        self._place = StateOffer(-1, b"")
        context.host.rpc.register(OFFER_STATE, self._on_place)

    async def publish(self) -> None:
        """Put the weights on the shelf; they must not change meanwhile."""
        replica = self._replica
        if replica.round < 0:
            return
        head = msgspec.msgpack.encode(replica.head(self._rules.run_id, self._rules.steps))
        await trio.to_thread.run_sync(self._context.snapshots.publish, replica.tree, [replica.theta], head)
        self._place = StateOffer(replica.round, replica.tree.root)

    async def fetch(self, others: dict[str, PeerView]) -> None:
        """Take over the weights of a peer near the middle of the `others`; at the run's beginning, the authority's.
        NetworkError if nobody could deliver."""
        context, replica = self._context, self._replica
        began = trio.current_time()
        donor, place = await self._find_donor(others)
        fetched = await fetch_state(
            context.host.rpc,
            lambda: [donor],
            place.state_hash,
            replica.size_bytes,
            context.part_file,
            context.events,
            1,
        )
        await trio.to_thread.run_sync(replica.replace, fetched.tensors[0], place.round)
        seconds = round(trio.current_time() - began, 3)
        context.events.emit("state_fetched", round=replica.round, donors=1, replayed=False, seconds=seconds)

    async def _find_donor(self, others: dict[str, PeerView]) -> tuple[str, StateOffer]:
        middle = group_round(others)
        if middle is None or (middle <= APART_MAX and self._replica.round < 0):
            return self._rules.authority, StateOffer(0, self._rules.genesis)
        return await find_donor(self._context.host.rpc, others, self._context.timeouts.answer_s)

    async def _on_place(self, call: Call[AskState]) -> StateOffer:
        return self._place
