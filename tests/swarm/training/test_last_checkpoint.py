"""A peer that leaves with a full disk: the last holder of a state waits for room, and says what is lost."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from optim.strategies.registry import build_strategy
from peer.errors import ResourceError
from peer.events import Event
from peer.identity import Identity
from swarm.placement.stages import layout_of
from swarm.protocol.head import Head
from swarm.rounds.result_log import LoggedResult, ResultLog
from swarm.rounds.trainers import last_save
from swarm.state.outer_state import OuterState
from swarm.training.checkpoints import LocalCheckpoint
from tests.swarm.support.stage_commits import STAGE, commit_of, context_of
from tests.swarm.training.test_roles import run_of

ROUND = 7


class Leaving:
    """A replica at the end of its time, at round 7, on a disk that is full until `has_room` is set."""

    def __init__(self, local: LocalCheckpoint, head: Head, begun: Head, seen: list[Event], room: list[bool]) -> None:
        self.local, self.head, self.begun, self.seen, self.room = local, head, begun, seen, room
        self.log = ResultLog(local.home.path / "results")

    async def save(self, held_elsewhere: Callable[[], bool] = lambda: False) -> None:
        await self.local.save_last(self.head, held_elsewhere, self.log)

    def told(self, name: str) -> list[Event]:
        return [event for event in self.seen if event.name == name]


@pytest.fixture
async def leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Leaving]:
    room = [False]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=(1 << 40) * room[0]))
    monkeypatch.setattr(last_save, "LAST_SAVE_S", 0.3)
    monkeypatch.setattr(last_save, "_LAST_PAUSES_S", (0.05,))
    manifest = run_of(3)
    proven, fetched = commit_of(manifest, Identity.generate(), ROUND)
    async with context_of(manifest, tmp_path / "home") as (context, seen):
        opened = await LocalCheckpoint.open(context, STAGE)
        layout = layout_of(manifest, STAGE)
        strategy = build_strategy(manifest.outer, manifest.codec, layout, manifest.inner)
        state = OuterState.in_memory(list(fetched.tensors), strategy)
        local = LocalCheckpoint(context, opened.home, layout, opened.store, state, opened.head)
        yield Leaving(local, proven.head, opened.head, seen, room)


async def test_the_last_holder_waits_until_there_is_room(leaving: Leaving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_save, "LAST_SAVE_S", 300.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(leaving.save)
        with trio.fail_after(300):
            while len(leaving.told("state_at_risk")) < 2:
                await trio.sleep(0.01)
        leaving.room[0] = True
    assert [event.fields["round"] for event in leaving.told("checkpoint_saved")] == [ROUND]
    assert not leaving.told("last_checkpoint_failed") and leaving.local.store.load_latest() is not None


async def test_the_last_holder_says_what_is_lost(leaving: Leaving) -> None:
    with pytest.raises(ResourceError, match=f"state of round {ROUND}, which is lost") as caught:
        await leaving.save()
    assert caught.value.exit_code == 5 and "no checkpoint is there" in str(caught.value)
    (told,) = leaving.told("last_checkpoint_failed")
    assert told.fields == {"round": ROUND, "lost": True, "error": str(caught.value)}


async def test_an_older_checkpoint_is_named(leaving: Leaving) -> None:
    leaving.room[0] = True
    assert await leaving.local.store.save(3, b"", leaving.local.state.current, leaving.local.layout)
    leaving.room[0] = False
    with pytest.raises(ResourceError, match=f"round {ROUND} could .* newest checkpoint there is of round 3"):
        await leaving.save()


async def test_results_that_lead_to_the_state_are_no_loss(leaving: Leaving) -> None:
    result = LoggedResult(leaving.begun, leaving.head.state_hash, [memoryview(b"merged")])
    leaving.log.write(result, b"name")
    with pytest.raises(ResourceError, match="the results that lead to that round are: free some space, then join"):
        await leaving.save()
    assert [event.fields["lost"] for event in leaving.told("last_checkpoint_failed")] == [False]


async def test_a_state_that_another_peer_keeps_is_not_waited_for(leaving: Leaving) -> None:
    await leaving.save(lambda: True)
    assert len(leaving.told("checkpoint_failed")) == 1 and not leaving.told("state_at_risk")


async def test_what_is_saved_already_is_not_saved_again(leaving: Leaving) -> None:
    leaving.room[0] = True
    await leaving.save()
    leaving.room[0] = False
    await leaving.save()
    assert len(leaving.told("checkpoint_saved")) == 1 and not leaving.told("checkpoint_failed")
