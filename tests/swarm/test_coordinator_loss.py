"""The coordinator, every meeting point of the invite, a majority, or all peers at once go away; the run goes on."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import trio

from peer.addressbook import AddressBook
from swarm.home import Home
from swarm.invite import Invite
from swarm.view import read_status
from tests.swarm.swarm_harness import PeerProcess, Swarm, open_swarm

TRUTH_WITHIN_S = 10.0
REGROUPS_WITHIN_S = 60.0


def cached_addresses(peer: PeerProcess) -> tuple[str, ...]:
    """Where the peers that `peer` remembers on disk can be dialled."""
    book = AddressBook()
    book.load(Home(peer.home).addresses)
    return tuple(f"{address}/p2p/{known}" for known in book.peers for address in book.get(known))


async def check_status_tells(swarm: Swarm, gone: PeerProcess, gone_at: float, witness: PeerProcess) -> None:
    """Whoever looks no earlier than `TRUTH_WITHIN_S` after a death sees it, and the round that the others are in."""
    invite = Invite.parse(swarm.invite.read_text())
    while True:
        looked_at, round_then = time.time(), witness.round
        seen = await read_status(invite, witness.home)
        names = {peer.name for peer in seen.peers}
        if gone.name not in names or looked_at > gone_at + TRUTH_WITHIN_S:
            break
    assert gone.name not in names
    assert witness.name in names
    assert seen.round is not None and seen.round >= round_then
    assert seen.quorum_alive


@pytest.mark.process
async def test_training_and_joining_without_a_coordinator(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, min_peers=3) as swarm:
        p0, p1, p2 = (swarm.join(f"p{i}") for i in range(3))
        await swarm.committed(1)
        for peer in (p0, p2):
            await peer.until(lambda peer=peer: len(cached_addresses(peer)) >= 3, "cache of the others' addresses")  # type: ignore[misc]
        swarm.coordinator.kill()
        p2.kill()
        killed_at = time.time()
        left = p0.round
        async with trio.open_nursery() as nursery:
            nursery.start_soon(check_status_tells, swarm, p2, killed_at, p0)
            await swarm.committed(left + 3, p0, p1)

        # Every address of the invite is gone: one comes back by its own cache, a stranger by an invite made from it.
        swarm.restart(p2)
        invite = Invite.parse(swarm.invite.read_text())
        handed_on = tmp_path / "handed-on"
        handed_on.write_text(str(msgspec.structs.replace(invite, addresses=cached_addresses(p0)[:8])))
        stranger = swarm.join("stranger", invite=handed_on)
        await p2.wait_for("round_committed", since=p2.mark())
        await stranger.wait_for("round_committed")
        assert {fact.fields["term"] for fact in p0.commits} == {1}
        swarm.check_agreement()
        swarm.check_chain()


@pytest.mark.process
async def test_a_lost_majority_and_a_lost_everybody_are_regrouped(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, min_peers=3) as swarm:
        peers = [swarm.join(f"p{i}") for i in range(3)]
        p0, p1, p2 = peers
        await swarm.committed(1)
        swarm.coordinator.kill()
        swarm.restart(swarm.coordinator)
        again = swarm.coordinator.mark()
        for i in range(3):  # it knows whom to ask; who finds whom first is chance
            await swarm.coordinator.wait_for("member_joined", lambda f, i=i: f["name"] == f"p{i}", since=again)
        p1.kill()
        p2.kill()
        alone = await p0.wait_for("round_committed", lambda fields: fields["term"] == 2, timeout_s=REGROUPS_WITHIN_S)
        await p0.wait_for("checkpoint_saved", lambda fields: fields["round"] >= alone.fields["round"])

        p0.kill()
        kept = Home(p0.home).checkpoints.glob("[0-9]*-round-*")  # it may have died before it told of the last one
        saved = max(int(path.name.rpartition("-")[2]) for path in kept)
        for peer in peers:
            swarm.restart(peer)
        for peer in peers:
            await peer.wait_for("round_committed", lambda fields: fields["term"] > 2, timeout_s=REGROUPS_WITHIN_S)
        resumed = min(fact.fields["round"] for peer in peers for fact in peer.commits if fact.fields["term"] > 2)
        assert resumed == saved + 1, "training goes on from the latest checkpoint"
        swarm.check_agreement()
        swarm.check_chain()
