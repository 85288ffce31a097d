"""A member's process ends and starts again: with its disk, with what a power cut leaves of it, and without."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio

from peer.checkpoint.hash_tree import hash_state
from peer.errors import ConnectionLost
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import open_host
from swarm.protocol.agreement.messages import VoteMessage
from swarm.protocol.agreement.records import BALLOT_KEY, BallotRecord
from swarm.protocol.messages import FETCH_RESULT, SliceOf
from swarm.rounds.fetched_states import FetchedStates
from swarm.rounds.messages import AGREE
from swarm.rounds.records import RecordFiles
from swarm.state.partial_file import PartFile
from swarm.state.upload_limits import SnapshotLimits
from tests.support.disk.shadow_disk import ShadowDisk, put_back
from tests.swarm.rounds.test_catch_up import miss, open_gates
from tests.swarm.rounds.test_driver import deltas
from tests.swarm.rounds.test_losses import QUICK
from tests.swarm.support.driven_group import DrivenGroup, DrivenReplica, GroupSetting, open_driven_group

pytestmark = pytest.mark.slow
PACED = GroupSetting(work_s=0.2)  # a round takes longer than fetching its state, as it does in earnest


async def grow(group: DrivenGroup, rounds: int, replicas: list[DrivenReplica]) -> None:
    """Wait until these replicas have committed that many further rounds."""
    await group.until_round(max(replica.head.round for replica in replicas) + rounds, replicas)


async def test_a_member_with_its_disk_goes_on_without_fetching(tmp_path: Path) -> None:
    identity, gate = Identity.generate(), trio.Event()
    async with open_driven_group(tmp_path, PACED) as group:
        others = [await group.enter(deltas) for _ in range(2)]
        first = await group.enter(deltas, identity)
        for replica in (*others, first):
            replica.trainer.hold(4, gate)  # no round after the third ends while one of them is away
        await group.until(lambda: all(replica.trainer.waiting for replica in (*others, first)))
        await group.leave(first)
        again = await group.enter(deltas, identity)
        assert again.driver.me == first.driver.me, "the same voter"
        await group.until(lambda: again.head == others[0].head)
        assert again.head.round >= first.head.round and again.state.tree.root == again.head.state_hash
        assert not again.seen("state_fetched"), "its results have led it to its head"
        gate.set()
        await grow(group, 3, [*others, again])
        group.check()
        await group.until(lambda: again.head.has(first.driver.me))  # a round may end without a member that is slow


async def test_a_member_that_leaves_as_it_commits_tells_that_commit(tmp_path: Path) -> None:
    """What it saves as it ends is a commit that it has told of, also if all members of the group end at once."""
    async with open_driven_group(tmp_path, PACED) as group:
        replicas = [await group.enter(deltas) for _ in range(3)]
        await group.until_round(1)
        leaver = replicas[0]
        builder: Any = leaver.actor.builder
        honest = builder.commit

        async def commit(*arguments: Any) -> None:
            await honest(*arguments)
            leaver.stop.cancel()

        builder.commit = commit
        await leaver.gone.wait()
        assert leaver.state.tree.root == leaver.head.state_hash
        assert leaver.heads[-1] == leaver.head


async def test_a_member_that_leaves_does_not_wait_for_the_coding_of_a_round_to_come(tmp_path: Path) -> None:
    """Where the coding depends on the state of a large model, it takes minutes: a second Ctrl-C was needed."""
    async with open_driven_group(tmp_path, PACED) as group:
        replicas = [await group.enter(deltas) for _ in range(3)]
        await group.until_round(1)
        leaver = replicas[0]
        strategy: Any = leaver.state.strategy
        honest, begun = strategy.coding, trio.Event()

        def coding(round_info: Any, state: Any, check: Any = None) -> Any:
            if check is None:
                return honest(round_info, state)
            trio.from_thread.run_sync(begun.set)
            while not leaver.gone.is_set():  # one that takes for ever
                check()

        strategy.coding = coding
        await begun.wait()
        leaver.stop.cancel()
        await leaver.gone.wait()
        assert leaver.state.tree.root == leaver.head.state_hash
        assert leaver.heads[-1] == leaver.head


@pytest.mark.soak  # each of them does what the one of the test before does
async def test_all_members_restart_at_once(tmp_path: Path) -> None:
    """The whole state of the run is on the members' disks."""
    identities = [Identity.generate() for _ in range(3)]
    async with open_driven_group(tmp_path, PACED) as group:
        before = [await group.enter(deltas, identity) for identity in identities]
        await group.until_round(3)
        for replica in before:
            await group.leave(replica)
        reached = max(replica.heads[-1].round for replica in before)
        after = [await group.enter(deltas, identity) for identity in identities]
        await group.until_round(reached + 2)
        group.check(before + after)
        assert after[0].head.term == before[0].head.term, "no new term was needed"


async def test_a_lost_disk_makes_another_voter(tmp_path: Path) -> None:
    identity = Identity.generate()
    async with open_driven_group(tmp_path, PACED) as group:
        others = [await group.enter(deltas) for _ in range(2)]
        first = await group.enter(deltas, identity)
        await group.until_round(2)
        await group.leave(first)
        shutil.rmtree(tmp_path / first.peer)
        again = await group.enter(deltas, identity)
        assert again.driver.me.peer == first.driver.me.peer
        assert again.driver.me.session != first.driver.me.session, "it has forgotten its votes"
        await group.until(lambda: again.head.has(again.driver.me))
        assert not again.head.has(first.driver.me), "the new voter takes the old one's place"
        await grow(group, 2, [*others, again])
        group.check()
        assert again.seen("state_fetched")


SOAKED = [pytest.param(lost, marks=pytest.mark.soak) for lost in ("results", "agreement")]


@pytest.mark.parametrize("lost", ["what was not synced", *SOAKED])
async def test_power_fails_as_a_vote_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The vote and the results that lead to its value are on disk before anyone hears of it. A disk that has lost its
    results only fetches; one that has lost its records is another voter."""
    identity = Identity.generate()
    disk = ShadowDisk(tmp_path, monkeypatch)
    kept: dict[Path, bytes] = {}
    async with open_driven_group(tmp_path, PACED) as group:
        others = [await group.enter(deltas) for _ in range(2)]
        first = await group.enter(deltas, identity)
        rpc: Any = first.host.rpc
        honest = rpc.call

        async def call(peer: str, method: Any, body: Any, *arguments: Any, **options: Any) -> Any:
            votes = method is AGREE and any(isinstance(message, VoteMessage) for message in body.messages)
            if votes and first.head.round >= 2:
                kept.update(kept or disk.files())
                first.stop.cancel()
                raise ConnectionLost("the power has failed")
            return await honest(peer, method, body, *arguments, **options)

        rpc.call = call
        await first.gone.wait()
        mine = {path.relative_to(first.peer): content for path, content in kept.items() if path.parts[0] == first.peer}
        assert any(path.parts[0] == "results" for path in mine) and any(path.parts[0] == "agreement" for path in mine)
        put_back({path: content for path, content in mine.items() if path.parts[0] != lost}, tmp_path / first.peer)
        again = await group.enter(deltas, identity)
        assert (again.driver.me == first.driver.me) == (lost != "agreement")
        await group.until(lambda: again.heads and again.heads[-1].has(again.driver.me))
        await grow(group, 2, [*others, again])
        group.check([*others, first, again])


async def test_power_fails_after_a_state_was_fetched_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was on no disk until the next checkpoint, so what was voted for next stood on nothing after a restart."""
    identity = Identity.generate()
    disk = ShadowDisk(tmp_path, monkeypatch)
    kept: dict[Path, bytes] = {}
    scarce = SnapshotLimits(small_bytes=0)
    setting = GroupSetting(limits=QUICK, work_s=0.3, snapshots=scarce)
    async with open_driven_group(tmp_path, setting) as group:
        away = await group.enter(deltas, identity)
        others = [await group.enter(deltas) for _ in range(2)]
        await group.until_round(1)
        goal = await miss(group, away, others, int(scarce.results_share * 8) + 2)
        await group.until(lambda: away.head.round == goal and away.state.tree.root == away.head.state_hash)
        assert not away.seen("state_fetched")[-1].fields["replayed"]
        rpc: Any = away.host.rpc
        honest = rpc.call

        async def call(peer: str, method: Any, body: Any, *arguments: Any, **options: Any) -> Any:
            if method is AGREE and any(isinstance(message, VoteMessage) for message in body.messages):
                kept.update(kept or disk.files())
                away.stop.cancel()
                raise ConnectionLost("the power has failed")
            return await honest(peer, method, body, *arguments, **options)

        rpc.call = call
        open_gates(group)
        await away.gone.wait()
        mine = {path.relative_to(away.peer): content for path, content in kept.items() if path.parts[0] == away.peer}
        put_back(mine, tmp_path / away.peer)
        record = RecordFiles(tmp_path / away.peer / "agreement").read()[BALLOT_KEY]
        ballot = msgspec.msgpack.decode(record, type=BallotRecord)
        assert ballot.accepted is not None
        again = await group.enter(deltas, identity)
        assert again.driver.me == away.driver.me
        assert again.head.round >= goal and not again.seen("state_fetched")
        assert again.state.tree.root == again.head.state_hash, "it is on its disk, too"
        assert again.head.hash in (ballot.head, ballot.accepted.value.hash), "as the cut has left it, or a round later"
        assert ballot.accepted.value.state_hash in again.actor.builder.holds, "and what it has voted for"
        await grow(group, 2, [*others, again])
        group.check([*others, away, again])
        kept_states = list((tmp_path / away.peer / "fetched").iterdir())
        assert len(kept_states) == 1, "no checkpoint covers it yet"
        again.driver.checkpointed(again.head, again.driver.fetched.base)
        assert not kept_states[0].exists()


async def test_a_damaged_fetched_state_is_fetched_again(tmp_path: Path) -> None:
    fetched, events = FetchedStates(tmp_path, 8, 2), EventLog()
    seen: list[Event] = []
    state = [torch.tensor([1.0]), torch.tensor([2.0])]
    root = hash_state(state).root
    part = PartFile(fetched.part_file, 8)
    fetched.part_file.write_bytes(torch.cat(state).numpy().tobytes())
    part.keep(fetched.path_of(root))
    assert not fetched.part_file.exists()
    [whole] = fetched.load(events)
    assert whole.tree.root == root and torch.equal(torch.cat(whole.tensors), torch.cat(state))
    fetched.path_of(root).write_bytes(bytes(8))
    with events.subscribed(seen.append):
        assert not fetched.load(events)
    assert [event.name for event in seen] == ["fetched_state_damaged"] and not fetched.path_of(root).exists()


async def test_a_home_without_fetched_states_is_looked_at_once(tmp_path: Path) -> None:
    """Each commit asks what may go; the disk is only read once a state was fetched."""
    fetched, here = FetchedStates(tmp_path, 8, 2), bytes(32)
    assert not fetched.load(EventLog())
    path = fetched.path_of(b"x" * 32)
    path.parent.mkdir()
    path.touch()  # behind its back
    await fetched.committed(here, here)
    assert path.exists(), "it was not looked for"
    with fetched.arriving(b"y" * 32) as files:
        await fetched.committed(here, here)
        assert not path.exists() and files.kept == fetched.path_of(b"y" * 32)
        files.kept.touch()
    await fetched.committed(here, here)
    assert not files.kept.exists(), "it arrived, and nothing has led to it"
    path.touch()
    await fetched.committed(here, here)
    assert path.exists(), "none was left"


async def test_a_restarted_voter_serves_the_results_that_it_has_voted_for(tmp_path: Path) -> None:
    """The value may have been chosen, and the owners who have merged its slices may be gone."""
    identity = Identity.generate()
    async with open_driven_group(tmp_path, PACED) as group:
        others = [await group.enter(deltas) for _ in range(2)]
        first = await group.enter(deltas, identity)
        await group.until_round(1)
        for replica in (first, *others):  # no vote arrives any more
            _drops_votes(replica)
        await group.until(lambda: _votes_on_disk(tmp_path, first))
        key, exchange = next(reversed(first.actor.exchanges.items()))
        at, results = first.head, [bytes(data) for _, (_, data) in sorted(exchange.results.items())]
        await group.leave(first)
        for other in others:
            await group.leave(other)
        again = await group.enter(deltas, identity)
        assert again.driver.group.head.round >= at.round and not again.actor.exchanges
        async with open_host(identity=Identity.generate(), events=EventLog()) as asker:
            await asker.connect_address(again.host.addresses[0], timeout_s=30)
            for index, result in enumerate(results):
                reply = await asker.rpc.call(again.peer, FETCH_RESULT, SliceOf(key, index), timeout_s=30)
                assert bytes(reply.payload) == result


def _drops_votes(replica: DrivenReplica) -> None:
    rpc: Any = replica.host.rpc
    honest = rpc.call

    async def call(peer: str, method: Any, body: Any, *arguments: Any, **options: Any) -> Any:
        if method is AGREE and any(isinstance(message, VoteMessage) for message in body.messages):
            raise ConnectionLost("the vote is lost")
        return await honest(peer, method, body, *arguments, **options)

    rpc.call = call


def _votes_on_disk(folder: Path, replica: DrivenReplica) -> bool:
    """Return whether the replica has voted after the head where it stands."""
    record = RecordFiles(folder / replica.peer / "agreement").read().get(BALLOT_KEY)
    ballot = msgspec.msgpack.decode(record, type=BallotRecord) if record else None
    return ballot is not None and ballot.head == replica.head.hash and ballot.accepted is not None
