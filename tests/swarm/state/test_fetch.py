"""A joiner fetches a whole state over real sockets, although some donors are slow, busy or lie."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from peer.checkpoint.hash_tree import hash_state
from peer.errors import NetworkError, NotAdmitted, ResourceError
from peer.net.rpc import Buffer, Call, Method
from swarm.state.chunk_fetch import StateGone
from swarm.state.fetch import fetch_state
from swarm.state.messages import AskChunk, AskHashes, StateMethods, StateReply
from swarm.state.partial_file import PartFile
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from swarm.state.upload_limits import SnapshotLimits
from tests.swarm.support.donor_child import generation, seeded_state
from tests.swarm.support.state_donors import (
    METHODS,
    SLOW,
    TREE,
    ChunkHandler,
    Joiner,
    arrived_whole,
    bare_host,
    donors,
    flipped,
    joiner,
    odd_donor,
)

__all__ = ["joiner"]


@pytest.fixture
def fair_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Donors leave each other their shares, however long one takes to answer."""
    for name in ("SHARE_GRACE_S", "_HEDGE_FIRST_S", "_HEDGE_MIN_S", "_HEDGE_MAX_S"):
        monkeypatch.setattr(f"swarm.state.chunk_scheduler.{name}", 60.0)


@pytest.mark.usefixtures("fair_shares")
async def test_a_state_arrives_bit_for_bit_from_all_donors(joiner: Joiner) -> None:
    async with donors(*[SnapshotLimits()] * 3) as hosts:
        fetched = await joiner.fetch(*hosts)
    assert arrived_whole(fetched) and fetched.tree == TREE
    assert set(fetched.donors) == {host.peer_id for host in hosts}
    assert sum(fetched.donors.values()) == TREE.size_bytes and fetched.resumed_bytes == 0
    assert not joiner.part_file.exists()


async def test_a_state_arrives_although_its_file_was_removed_meanwhile(joiner: Joiner) -> None:
    """A commit removes what earlier fetches have left, and the joiner ended with a traceback."""
    async with donors(SnapshotLimits()) as (host,):
        peer = joiner.know(host)

        def removed() -> list[str]:
            joiner.part_file.unlink(missing_ok=True)
            return [peer]

        fetched = await joiner.fetch_from(removed)
    assert arrived_whole(fetched) and fetched.tree == TREE and not joiner.part_file.exists()


async def test_one_donor_is_enough(joiner: Joiner) -> None:
    async with donors(SnapshotLimits()) as hosts:
        assert arrived_whole(await joiner.fetch(*hosts))


@pytest.mark.usefixtures("fair_shares")
@pytest.mark.parametrize("numel", [1, 1000, 20_000])
async def test_a_state_of_two_chunks_comes_from_two_donors(joiner: Joiner, numel: int) -> None:
    state = seeded_state(numel, 1)
    tree = hash_state(state)
    async with bare_host() as one, bare_host() as two:
        for host in (one, two):
            snapshots = SnapshotStore(tree.size_bytes, 1 << 16)
            snapshots.publish(generation(state, tree))
            serve_snapshots(host.rpc, [snapshots])
            joiner.know(host)
        names = [one.peer_id, two.peer_id]
        fetched = await fetch_state(
            joiner.host.rpc, lambda: names, tree.root, tree.size_bytes, joiner.part_file, joiner.events
        )
    assert torch.equal(fetched.tensors[0], state[0]) and torch.equal(fetched.tensors[1], state[1])
    assert len(fetched.donors) == min(2, len(tree.hashes))


def too_short(right: bytes, index: int) -> tuple[StateReply, Buffer]:
    return StateReply("here"), right[:-4]


def nothing(right: bytes, index: int) -> tuple[StateReply, Buffer]:
    return StateReply("here"), b""


def another_chunk(right: bytes, index: int) -> tuple[StateReply, Buffer]:
    return StateReply("here"), bytes(len(right))


@pytest.mark.usefixtures("fair_shares")
@pytest.mark.parametrize("lie", [flipped, too_short, nothing, another_chunk])
async def test_a_donor_of_wrong_bytes_is_penalized_and_dropped(joiner: Joiner, lie: ChunkHandler) -> None:
    asked: list[int] = []

    def counted(right: bytes, index: int) -> tuple[StateReply, Buffer]:
        asked.append(index)
        return lie(right, index)

    async with donors(SnapshotLimits()) as [good], odd_donor(counted) as bad:
        fetched = await joiner.fetch(bad, good)
    assert arrived_whole(fetched) and set(fetched.donors) == {good.peer_id}
    assert joiner.penalized == {bad.peer_id}
    assert len(asked) <= 3  # what was already under way


@pytest.mark.usefixtures("fair_shares")
async def test_a_donor_of_more_than_a_chunk_is_penalized(joiner: Joiner) -> None:
    loose = StateMethods(
        METHODS.hashes, Method("state.chunk", AskChunk, StateReply, reply_payload_max=1 << 22), METHODS.result
    )

    def too_long(right: bytes, index: int) -> tuple[StateReply, Buffer]:
        return StateReply("here"), right + bytes(1 << 20)

    async with donors(SnapshotLimits()) as [good], odd_donor(too_long, methods=loose) as bad:
        assert arrived_whole(await joiner.fetch(bad, good))
    assert joiner.penalized == {bad.peer_id}


@pytest.mark.parametrize("hashes", [bytes(32 * len(TREE.hashes)), b"".join(TREE.hashes[:-1]), b""])
async def test_a_forged_list_of_hashes_is_refused(joiner: Joiner, hashes: bytes) -> None:
    async with odd_donor(flipped, hashes) as bad:
        with pytest.raises(NetworkError, match="1 sent wrong bytes"):
            await joiner.fetch(bad)
        async with donors(SnapshotLimits()) as [good]:
            assert arrived_whole(await joiner.fetch(bad, good))
    assert joiner.penalized == {bad.peer_id}


@pytest.mark.parametrize("retry_after_s", [0.0, 1e9, float("nan"), 1e300])
async def test_a_busy_donor_makes_the_joiner_go_elsewhere(joiner: Joiner, retry_after_s: float) -> None:
    asked: list[int] = []

    def busy(right: bytes, index: int) -> tuple[StateReply, Buffer]:
        asked.append(index)
        return StateReply("busy", retry_after_s), b""

    async with donors(SnapshotLimits()) as [good], odd_donor(busy) as full:
        fetched = await joiner.fetch(full, good)
    assert arrived_whole(fetched) and set(fetched.donors) == {good.peer_id}
    honest = retry_after_s <= 1e9
    assert joiner.penalized == (set() if honest else {full.peer_id})
    assert len(asked) < 3 * (fetched.seconds / 0.1 + 2)  # three calls, no hot loop


async def test_a_donor_without_the_state_is_not_needed(joiner: Joiner) -> None:
    async with donors(SnapshotLimits()) as [good], bare_host() as other_run, bare_host() as late:
        serve_snapshots(late.rpc, [SnapshotStore(TREE.size_bytes, 1 << 16)])
        assert arrived_whole(await joiner.fetch(other_run, late, good))
    assert not joiner.penalized


async def test_when_no_donor_has_the_state_the_error_says_so(joiner: Joiner) -> None:
    async with donors(SnapshotLimits()) as hosts:
        with pytest.raises(NetworkError, match="1 do not hold it any more"):
            await joiner.fetch(*hosts, root=bytes(32))
    with pytest.raises(NetworkError, match="no donor is known"):
        await joiner.fetch()


async def test_a_state_that_most_members_have_left_behind_is_gone_at_once(
    joiner: Joiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead strangers among the donors kept the hope up for seconds, while a fast group had gone on by fifty rounds. One
    member that says so is not enough: it may lie."""
    monkeypatch.setattr("swarm.state.chunk_fetch._may_deliver", lambda donor: True)
    async with donors(SnapshotLimits()) as [good], bare_host() as one, bare_host() as two:
        for host in (one, two):
            serve_snapshots(host.rpc, [SnapshotStore(TREE.size_bytes, 1 << 16)])
        members = [good.peer_id, one.peer_id, two.peer_id]
        with trio.fail_after(300), pytest.raises(NetworkError, match="3 do not hold it any more"):
            await joiner.fetch(one, two, good, root=bytes(32), certain=members)
        assert arrived_whole(await joiner.fetch(one, good, certain=members))


async def test_a_member_that_cannot_be_reached_gives_no_hope_where_the_other_one_refuses(
    joiner: Joiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a group of two, one was not most of them: the fetch went on until the dead one had failed four times."""
    monkeypatch.setattr("swarm.state.chunk_fetch.HOPELESS_FAILURES", math.inf)
    async with bare_host() as away:
        joiner.know(away)
    async with donors(SnapshotLimits()) as [here]:
        members = [here.peer_id, away.peer_id]
        with trio.fail_after(300), pytest.raises(NetworkError, match="1 cannot be reached, 1 do not hold it any more"):
            await joiner.fetch(here, away.peer_id, root=bytes(32), certain=members)


async def test_a_member_that_has_not_answered_yet_is_waited_for(
    joiner: Joiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one does not hold the state any more; this one is only slow."""
    asked, slow_down = trio.Event(), trio.Event()

    async def slowly(call: Call[AskHashes]) -> tuple[StateReply, bytes]:
        asked.set()
        await slow_down.wait()
        return StateReply("here"), b"".join(TREE.hashes)

    monkeypatch.setattr("swarm.state.chunk_fetch.HOPELESS_S", 0.0)
    async with donors(SnapshotLimits()) as [slow], bare_host() as gone:
        serve_snapshots(gone.rpc, [SnapshotStore(TREE.size_bytes, 1 << 16)])
        instead: Any = slow.rpc.server._methods[METHODS.hashes.name]
        instead.handler = slowly
        looks = 0

        def known() -> list[str]:  # called at each look at whether there is hope
            nonlocal looks
            looks += asked.is_set() and not slow_down.is_set()
            if looks > 5:
                slow_down.set()
            return [joiner.know(gone), joiner.know(slow)]

        assert arrived_whole(await joiner.fetch_from(known, certain=[gone.peer_id, slow.peer_id]))


async def test_a_refusal_is_not_told_as_a_state_that_is_gone(joiner: Joiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.state.chunk_fetch.HOPELESS_S", math.inf)  # it fails at once

    async def refuse(call: Call[AskHashes]) -> StateReply:
        raise NotAdmitted("this run does not know that peer")

    async with donors(SnapshotLimits()) as [host]:
        instead: Any = host.rpc.server._methods[METHODS.hashes.name]
        instead.handler = refuse
        with trio.fail_after(300), pytest.raises(NetworkError, match="1 refuse to serve it") as caught:
            await joiner.fetch(host)
    assert not isinstance(caught.value, StateGone) and joiner.part_file.exists()


async def test_peers_that_serve_no_states_are_not_waited_for(joiner: Joiner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the authority, if only its signed head is known."""
    monkeypatch.setattr("swarm.state.chunk_fetch.HOPELESS_S", math.inf)
    async with bare_host() as authority:
        joiner.know(authority)
        with trio.fail_after(300), pytest.raises(NetworkError, match="1 serve no state"):
            await joiner.fetch(authority)


async def test_a_state_that_is_gone_leaves_no_part_file(joiner: Joiner) -> None:
    gone = False

    def until_half(right: bytes, index: int) -> tuple[StateReply, Buffer]:
        nonlocal gone
        gone = gone or index >= len(TREE.hashes) // 2
        return (StateReply("gone"), b"") if gone else (StateReply("here"), right)

    async with odd_donor(until_half) as donor:
        with pytest.raises(NetworkError, match="1 do not hold it any more"):
            await joiner.fetch(donor)
        assert not joiner.part_file.exists()
        async with donors(SnapshotLimits()) as [other]:
            assert arrived_whole(await joiner.fetch(donor, other))


async def test_the_part_file_stays_while_a_donor_may_have_the_rest(
    joiner: Joiner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.state.chunk_fetch.HOPELESS_FAILURES", 1)
    async with bare_host() as away:
        joiner.know(away)
    part = PartFile(joiner.part_file, TREE.size_bytes)
    part.close()
    with pytest.raises(NetworkError, match="1 cannot be reached"):
        await joiner.fetch(away)
    assert joiner.part_file.exists()


async def test_a_donor_that_appears_during_the_fetch_is_used(joiner: Joiner) -> None:
    async with donors(SLOW, SnapshotLimits()) as [slow, quick]:
        names = [joiner.know(slow), joiner.know(quick)]

        def known() -> list[str]:
            return names if slow.bytes_up > 2 * TREE.chunk_size else names[:1]

        fetched = await joiner.fetch_from(known)
    assert arrived_whole(fetched) and set(fetched.donors) == set(names)


async def test_an_interrupted_fetch_is_resumed(joiner: Joiner) -> None:
    half = trio.CancelScope()
    served = 0

    def until_half(right: bytes, index: int) -> tuple[StateReply, Buffer]:
        nonlocal served
        served += 1
        if served == len(TREE.hashes) // 2:
            half.cancel()
        return StateReply("here"), right

    async with odd_donor(until_half) as donor:
        with half:
            await joiner.fetch(donor)
        assert half.cancelled_caught
    part = PartFile(joiner.part_file, TREE.size_bytes)
    kept = sorted(part.intact(TREE))
    part.close()
    assert 1 < len(kept) < len(TREE.hashes)
    with joiner.part_file.open("r+b") as file:  # a torn write, as after a power cut
        file.seek(TREE.span(kept[0])[0] + 5)
        file.write(b"torn")
    async with donors(SnapshotLimits()) as [quick]:
        fetched = await joiner.fetch(quick)
    assert arrived_whole(fetched)
    assert fetched.resumed_bytes == sum(end - start for start, end in map(TREE.span, kept[1:]))
    assert sum(fetched.donors.values()) == TREE.size_bytes - fetched.resumed_bytes


async def test_a_part_file_of_another_state_is_overwritten(joiner: Joiner) -> None:
    joiner.part_file.write_bytes(os.urandom(2 * TREE.size_bytes))
    async with donors(SnapshotLimits()) as hosts:
        fetched = await joiner.fetch(*hosts)
    assert arrived_whole(fetched) and fetched.resumed_bytes == 0


@pytest.fixture
def tiny_disk(tmp_path: Path) -> object:
    where = tmp_path / "disk"
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", where], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"this test mounts a tmpfs, which needs root: {done.stderr.strip()}")
    yield where
    subprocess.run(["umount", where], check=True)


async def test_a_full_disk_is_reported_before_anything_is_fetched(joiner: Joiner, tiny_disk: Path) -> None:
    joiner.part_file = tiny_disk / "state.part"
    with pytest.raises(ResourceError, match=r"is full, 4 MiB are needed .*free some space"):
        await joiner.fetch("a peer")
    assert not joiner.part_file.exists()
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    with pytest.raises(ResourceError, match="choose a writable folder"):
        await joiner.fetch("a peer")
