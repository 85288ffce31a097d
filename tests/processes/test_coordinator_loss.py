"""The coordinator, every meeting point of the invite, a majority, or all peers at once go away; the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from peer.errors import DialError
from peer.net.address_book import AddressBook
from swarm.monitor.collector import MonitorCollector
from swarm.run.home import Home
from swarm.run.invite import Invite
from tests.support.forking.command import peer_meanwhile
from tests.support.peer_process import PeerProcess
from tests.swarm.support.swarm_harness import RUN_TOML, WITNESS, Swarm, open_swarm

CLOSED = RUN_TOML.replace("open = true", "open = false", 1)


def cached_addresses(peer: PeerProcess) -> tuple[str, ...]:
    """Where the peers that `peer` remembers on disk can be dialled."""
    book = AddressBook()
    book.load(Home(peer.home).addresses)
    return tuple(f"{address}/p2p/{known}" for known in book.peers for address in book.get(known))


async def check_status_tells(swarm: Swarm, gone: PeerProcess, witness: PeerProcess) -> None:
    """Whoever looks sees a death soon, and the round that the others are in. On a busy machine a reading may lack what
    did not answer in time."""
    invite = Invite.parse(swarm.invite.read_text())
    with trio.fail_after(300):
        while True:
            round_then = witness.round
            try:
                seen = await MonitorCollector(invite, witness.home).once()
            except DialError:
                continue
            names = {member.claims.name for member in seen.members if member.claims is not None}
            alive = all(stage.seen.margin is not None and stage.seen.margin >= 0 for stage in seen.stages)
            is_told = seen.round is not None and seen.round >= round_then and alive
            if is_told and witness.name in names and gone.name not in names:
                return


def is_of(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda fields: fields["name"] == name


@pytest.mark.process
async def test_training_and_joining_without_a_coordinator(tmp_path: Path) -> None:
    """In a closed run: a member prints the invite that a newcomer comes by."""
    async with open_swarm(tmp_path, min_peers=3, run=CLOSED) as swarm:
        p0, p1, p2 = (swarm.join(f"p{i}") for i in range(3))
        await swarm.committed(1)
        await p2.until(lambda: len(cached_addresses(p2)) >= 2, "cache of another address than the coordinator's")
        since = p0.mark()
        await p0.wait_for("round_committed", lambda fields: fields["members"] == 3, since)  # two are a majority then
        swarm.coordinator.kill()
        p2.kill()
        left = p0.round
        async with trio.open_nursery() as nursery:
            nursery.start_soon(check_status_tells, swarm, p2, p0)
            await swarm.committed(left + 3, p0, p1)

        # Every address of the invite is gone: one comes back by its own cache, a newcomer by an invite of a member.
        swarm.restart(p2)
        handed_on = tmp_path / "handed-on"
        printed = await peer_meanwhile("invite", "--home", p0.home, "--guests", "1")
        handed_on.write_text(printed.stdout)
        assert len({address.rpartition("/p2p/")[2] for address in Invite.parse(handed_on.read_text()).addresses}) >= 2
        newcomer = swarm.join("newcomer", invite=handed_on)
        await p2.wait_for("round_committed", since=p2.mark())
        await newcomer.wait_for("round_committed")
        assert {fact.fields["term"] for fact in p0.commits} == {1}
        swarm.check_agreement()


@pytest.mark.soak  # tests/swarm/coordinator/test_regroup.py is smaller
@pytest.mark.process
async def test_a_lost_majority_is_regrouped_by_the_operator_and_a_lost_everybody_comes_back(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, min_peers=3, run=WITNESS) as swarm:
        peers = [swarm.join(f"p{i}") for i in range(3)]
        p0, p1, p2 = peers
        await swarm.committed(1)
        swarm.coordinator.kill()
        swarm.restart(swarm.coordinator)
        again = swarm.coordinator.mark()
        for i in range(3):  # it knows whom to ask; who finds whom first is chance
            await swarm.coordinator.wait_for("member_joined", is_of(f"p{i}"), since=again)
        before, together = p0.mark(), int(p0.commits[-1].fields["term"])
        p1.kill()
        p2.kill()
        await swarm.coordinator.wait_for("quorum_lost", since=again)
        gone = [str(peer) for peer in swarm.coordinator.all("quorum_lost")[-1].fields["away"]]
        assert len(gone) == 2 and "resumes from round" in await regroup(swarm, *gone)
        alone = await p0.wait_for("round_committed", lambda fields: fields["term"] > together, before)
        await p0.wait_for("checkpoint_saved", lambda fields: fields["round"] >= alone.fields["round"])

        p0.kill()
        last, marks = p0.commits[-1].fields, [peer.mark() for peer in peers]
        for peer in peers:
            swarm.restart(peer)
        for peer, since in zip(peers, marks, strict=True):
            again_in = lambda fields: fields["term"] == last["term"] and fields["round"] > last["round"]  # noqa: E731
            await peer.wait_for("round_committed", again_in, since)
        swarm.check_agreement()


async def regroup(swarm: Swarm, *without: str) -> str:
    """Return what `peer regroup` prints."""
    named = [word for peer in without for word in ("--without", peer)]
    ended = await peer_meanwhile("regroup", "--home", swarm.coordinator.home, *named)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
