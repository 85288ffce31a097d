"""Donors of states: what they store, what they send, and what happens to a joiner when one dies."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
import trio

from peer.checkpoint.hash_tree import StateTree, hash_state
from peer.errors import ConnectionLost, RemoteError
from peer.net.rpc import Call, Reply
from swarm.state.messages import AskChunk, AskResult, ResultPart
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from swarm.state.upload_limits import SnapshotLimits
from tests.support.forking.children import open_child
from tests.swarm.support.donor_child import generation, seeded_state
from tests.swarm.support.state_donors import (
    METHODS,
    NUMEL,
    SEED,
    SLOW,
    STATE,
    TREE,
    Joiner,
    arrived_whole,
    bare_host,
    donors,
    flipped,
    joiner,
    odd_donor,
)

__all__ = ["joiner"]


# -- the store -----------------------------------------------------------------------------------------------


async def test_commits_do_not_disturb_a_joiner_nor_grow_the_store(joiner: Joiner) -> None:
    limits = dataclasses.replace(SLOW, lease_pause_s=60.0, small_bytes=0)  # so that a slow test machine costs no lease
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, limits)
    snapshots.publish(generation(STATE, TREE))
    async with bare_host() as host:
        serve_snapshots(host.rpc, [snapshots])
        commits = 0

        def known() -> list[str]:  # called ten times a second: a clock for commits
            nonlocal commits
            if host.bytes_up > TREE.chunk_size and commits < 12:  # once the joiner is reading
                commits += 1
                newer = seeded_state(NUMEL, 100 + commits)
                snapshots.publish(generation(newer))
            return [joiner.know(host)]

        fetched = await joiner.fetch_from(known)
        assert arrived_whole(fetched) and commits > 3 and not joiner.penalized
        assert len(snapshots.state_hashes) <= 3


async def test_a_joiner_that_asks_and_does_not_read_costs_bounded_memory() -> None:
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(uploading_per_joiner=TREE.chunk_size * 2))
    snapshots.publish(generation(STATE, TREE))
    call = Call("joiner", AskChunk(TREE.root, 1), memoryview(b""))
    held = [await snapshots.send_chunk(call) for _ in range(3)]
    outcomes = [answer[0].outcome if isinstance(answer, tuple) else answer.outcome for answer in held]
    assert outcomes == ["here", "here", "busy"]
    other = await snapshots.send_chunk(Call("other", call.body, call.payload))
    assert isinstance(other, tuple)
    held.clear()
    assert isinstance(await snapshots.send_chunk(call), tuple)  # what has left does not count


async def test_requests_outside_the_state_are_violations() -> None:
    async with donors(SnapshotLimits()) as [host], bare_host() as asker:
        asker.book.add(host.peer_id, host.addresses)
        for index in (len(TREE.hashes), 1 << 53):
            with pytest.raises(RemoteError) as caught:
                await asker.rpc.call(host.peer_id, METHODS.chunk, AskChunk(TREE.root, index), timeout_s=60)
            assert caught.value.code == "ProtocolViolation"
        for index in (-1, 1 << 62):
            with pytest.raises(ConnectionLost):
                await asker.rpc.call(host.peer_id, METHODS.chunk, AskChunk(TREE.root, index), timeout_s=60)


async def test_during_an_exchange_joiners_get_a_small_share(joiner: Joiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.state.upload_limits._TELLING_BYTES", 1 << 30)  # so that the speed stays
    monkeypatch.setattr("swarm.state.upload_limits._SPEED_FIRST", 20e6)
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(share_in_exchange=0.1))
    snapshots.publish(generation(STATE, TREE))
    async with bare_host() as host:
        serve_snapshots(host.rpc, [snapshots])
        with snapshots.stepping_back():
            held_back = await joiner.fetch(host)
        assert snapshots._slots.rate is None
        free = await joiner.fetch(host)
    assert held_back.seconds > 0.8 * TREE.size_bytes / 2e6
    assert arrived_whole(free) and arrived_whole(held_back)


# -- missed results ------------------------------------------------------------------------------------------


async def test_the_results_of_the_last_rounds_are_kept(joiner: Joiner) -> None:
    snapshots = SnapshotStore(TREE.size_bytes, 1 << 16, SnapshotLimits(results=3, results_share=0.0, small_bytes=0))
    states = [seeded_state(1000, seed) for seed in range(6)]
    trees = [hash_state(state) for state in states]
    for n in range(6):
        parts = [bytes([n, part]) * 100 for part in range(5)]
        snapshots.publish(generation(states[n], trees[n]), head=b"head %d" % n, parts=parts if n != 4 else ())
    async with bare_host() as host:
        serve_snapshots(host.rpc, [snapshots])
        joiner.know(host)

        async def ask(after: int, part: int) -> Reply[ResultPart]:
            question = AskResult(trees[after].root, part)
            return await joiner.host.rpc.call(host.peer_id, METHODS.result, question, timeout_s=60)

        for after in (1, 2, 4):
            for part in range(5):
                reply = await ask(after, part)
                assert bytes(reply.payload) == bytes([after + 1, part]) * 100
                assert reply.body.leads_to == trees[after + 1].root and reply.body.parts == 5
                assert reply.body.head == b"head %d" % (after + 1)
        assert (await ask(0, 0)).body.outcome == "gone"  # too long ago
        assert (await ask(3, 0)).body.outcome == "gone"  # state 4 was fetched, without a result
        with pytest.raises(RemoteError, match="asked for part 5 of 5"):
            await ask(1, 5)


def test_results_are_kept_up_to_a_share_of_the_state() -> None:
    states = [seeded_state(1000, seed) for seed in range(9)]
    trees = [hash_state(state) for state in states]
    limits = SnapshotLimits(results=1, results_share=0.5, results_max=3, small_bytes=0)
    for size_bytes, kept in ((100, 3), (TREE.size_bytes // 4, 2), (TREE.size_bytes, 1)):
        snapshots = SnapshotStore(TREE.size_bytes, TREE.size_bytes, limits)
        for tree, state in zip(trees, states, strict=True):
            snapshots.publish(generation(state, tree), parts=[bytes(size_bytes)])
        assert list(snapshots._results) == [tree.root for tree in trees[-1 - kept : -1]]


# -- donors in processes of their own ------------------------------------------------------------------------


@dataclass(frozen=True)
class ChildDonor:
    process: subprocess.Popen[bytes]
    peer: str
    addresses: tuple[str, ...]

    @property
    def has_stopped(self) -> bool:
        """Whether it is dead or frozen."""
        options = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, options) is not None


@asynccontextmanager
async def child_donors(*faults: str) -> AsyncIterator[list[ChildDonor]]:
    """One donor process for each of `faults` (a BARNRAISE_FAULT, or "")."""
    async with AsyncExitStack() as stack:
        ready = []
        for fault in faults:
            command = ("tests.swarm.support.donor_child", str(NUMEL), str(SEED))
            opened = open_child(*command, env={**os.environ, "BARNRAISE_FAULT": fault})
            child = await stack.enter_async_context(opened)
            hello = json.loads(await child.line())
            ready.append(ChildDonor(child.process, hello["peer"], tuple(hello["addresses"])))
        yield ready


@pytest.mark.process
@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_a_donor_that_dies_or_freezes_in_the_middle(
    joiner: Joiner, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault fires when the donor is asked for a chunk. A lying donor is asked as well. A joiner that waited for the
    first donor would wait for an hour."""
    monkeypatch.setattr("swarm.state.chunk_scheduler._FIRST_DEADLINE_S", 3600.0)
    monkeypatch.setattr("swarm.state.chunk_scheduler._DEADLINE_MAX_S", 3600.0)
    async with child_donors(f"{fault}:during_state_transfer:1", "") as [bad, good], odd_donor(flipped) as liar:
        for child in (bad, good):
            joiner.host.book.add(child.peer, child.addresses)
        names = [bad.peer, joiner.know(liar), good.peer]

        def known() -> list[str]:  # else the good one could deliver all before the others are asked
            return names if joiner.penalized and bad.has_stopped else names[:2]

        fetched = await joiner.fetch_from(known)
        assert arrived_whole(fetched)
        assert set(fetched.donors) == {good.peer} and joiner.penalized == {liar.peer_id}
        if fault == "kill":
            assert bad.process.wait(60) == -signal.SIGKILL


@pytest.mark.process
async def test_a_frozen_donor_alone_is_waited_for(joiner: Joiner) -> None:
    async with child_donors("stop:during_state_transfer:1") as [donor]:
        joiner.host.book.add(donor.peer, donor.addresses)
        stopped = trio.Event()

        async def thaw() -> None:
            await trio.to_thread.run_sync(os.waitid, os.P_PID, donor.process.pid, os.WSTOPPED)
            stopped.set()
            donor.process.send_signal(signal.SIGCONT)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(thaw)
            fetched = await joiner.fetch(donor.peer)
        assert stopped.is_set() and arrived_whole(fetched)


def test_the_test_state_has_enough_chunks() -> None:
    assert isinstance(TREE, StateTree) and len(TREE.hashes) > 30
