"""When a peer opens its replica again, and when it may leave its stage."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import trio

from peer.identity import Identity
from swarm.membership.member_record import MemberRecord
from swarm.membership.proven_heads import ask_proven_heads
from swarm.protocol.head import Member
from swarm.protocol.messages import HeadReport
from swarm.training import stage_selection as module
from swarm.training.stage_selection import StageSelection
from tests.swarm.support.stage_commits import STAGE, begun, context_of, record_of, serve_head_report, started
from tests.swarm.training.test_roles import run_of


async def test_an_arriving_peer_starts_again_if_its_stage_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.01)
    manifest = run_of(3)
    async with context_of(manifest, tmp_path / "mine") as (context, seen):
        replica = record_of(context.host, manifest.first_head(STAGE), STAGE)
        arriving = msgspec.structs.replace(replica, ready_at=time.time() + 60)
        late = msgspec.structs.replace(arriving, at=time.time() - 20, ready_at=time.time() - 15)
        left = trio.Event()

        async def wait(selection: StageSelection) -> None:
            await selection.until_needed_elsewhere()
            left.set()

        async def reads(selection: StageSelection, records: dict[str, MemberRecord], missing: list[str]) -> None:
            """And notes the stages without replicas."""
            count = len(seen)
            selection.membership.view = records
            while not any(e.name == "stages_missing" and e.fields["stages"] == missing for e in seen[count:]):
                await trio.sleep(0.01)

        all_stages, without = ["0", "1", "2"], ["0", "2"]
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                selection = StageSelection(context)
                selection.go(STAGE)
                nursery.start_soon(wait, selection)
                await reads(selection, {"arriving": arriving}, all_stages)
                await reads(selection, {"late": late}, without)
                await reads(selection, {"arriving": arriving}, all_stages)
                assert not left.is_set(), "no peer has served it"
                await reads(selection, {"replica": replica, "arriving": arriving}, without)
                selection.membership.view = {"arriving": arriving}
                await left.wait()


@pytest.mark.parametrize(("restored", "again_s"), [(0, module.RESTORE_FIRST_S), (2, module.RESTORE_AGAIN_S)])
async def test_a_peer_outside_the_group_asks_the_backup_holders_again(
    tmp_path: Path, restored: int, again_s: float
) -> None:
    """No peer serves its stage. One that found no backup when it came waited a minute for a coordinator that could not
    go on with what it had, and all stages with it."""
    manifest = run_of(3)
    async with context_of(manifest, tmp_path / "mine") as (context, _):
        first = manifest.first_head(0)
        begun = record_of(context.host, msgspec.structs.replace(first, round=3), 0)
        idle = SimpleNamespace(service_s=0.0, queue=0.0)
        replica = SimpleNamespace(
            stage=STAGE,
            head=msgspec.structs.replace(manifest.first_head(STAGE), round=restored),
            phase="joining",
            is_member=False,
            passed=0,
            load=lambda: idle,
            measures_last=False,
        )
        selection = StageSelection(context)
        selection.go(STAGE)
        selection._replica = cast(Any, replica)
        selection._missing, selection._opened_at = (STAGE,), trio.current_time()
        selection.membership.view = {"another": begun}
        assert not selection._is_orphaned, "the authority may still take it in"
        selection._opened_at -= again_s - 5
        assert not selection._is_orphaned
        selection._opened_at -= 6
        assert selection._is_orphaned
        selection.membership.view = {"another": record_of(context.host, first, 0)}
        assert not selection._is_orphaned, "the run has not begun"


async def test_a_leaving_peer_needs_another_member_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger publishes that it is a replica of the stage, and says so when it is asked."""
    monkeypatch.setattr(module, "ask_proven_heads", partial(ask_proven_heads, timeout_s=60.0))
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    async with (
        context_of(manifest, tmp_path / "mine") as (context, _),
        context_of(manifest, tmp_path / "mate") as (mate, _),
        context_of(manifest, tmp_path / "stranger") as (stranger, _),
    ):
        hosts = [context.host, mate.host, stranger.host]
        me, left, unknown = (Member(host.peer_id, "s") for host in hosts)
        first = manifest.first_head(STAGE)
        head, forged = begun(first, me, left), begun(first, me, unknown)
        for host, member, theirs in ((mate.host, left, head), (stranger.host, unknown, forged)):
            serve_head_report(host, HeadReport(theirs, member, "training", started(authority, theirs).links))
            await context.host.connect_address(host.addresses[0], timeout_s=30)
        selection = StageSelection(context)
        selection._replica = cast(Any, SimpleNamespace(head=head))
        mates, claims = record_of(mate.host, head, STAGE), record_of(stranger.host, forged, STAGE)
        moving = msgspec.structs.replace(mates, ready_at=time.time() + 60)
        for records, expected in (
            ({left.peer: mates}, True),
            ({unknown.peer: claims}, False),
            ({left.peer: moving, unknown.peer: claims}, False),
            ({left.peer: mates, unknown.peer: claims}, True),
        ):
            selection.membership.view = records
            assert await selection._has_other_replica(STAGE) is expected
        selection._replica = cast(Any, SimpleNamespace(head=forged))
        selection.membership.view = {left.peer: mates}
        assert not await selection._has_other_replica(STAGE), "it is no member any more"


async def test_no_stage_is_missed_after_the_last_round(tmp_path: Path) -> None:
    """The other stages have made their last commit, and their peers leave."""
    manifest = run_of(3)
    manifest = msgspec.structs.replace(manifest, run=msgspec.structs.replace(manifest.run, rounds=4))
    async with context_of(manifest, tmp_path / "mine") as (context, seen):

        def stands(stage: int, number: int) -> MemberRecord:
            head = msgspec.structs.replace(manifest.first_head(max(stage, 0)), round=number)
            return record_of(context.host, head, stage)

        def coordinator(number: int) -> dict[str, MemberRecord]:
            return {manifest.authority: msgspec.structs.replace(stands(-1, number), role="coordinator")}

        def missing(records: dict[str, MemberRecord]) -> list[int]:
            selection.membership.view = records
            selection._note_missing()
            return list(selection._missing)

        selection = StageSelection(context)
        selection.go(STAGE)
        mine = {"me": stands(STAGE, 4)}
        selection._replica = cast(Any, SimpleNamespace(head=msgspec.structs.replace(manifest.first_head(1), round=4)))
        assert missing(coordinator(3) | mine | {"a": stands(0, 4)}) == [2], "stage 2 has its last round to make"
        assert missing(coordinator(4) | mine) == [], "the coordinator says that all stages have made it"
        assert missing(mine) == [0, 2], "it is away, and of stage 2 nothing was heard"
        assert missing(mine | {"b": stands(2, 4)}) == [], "both have made it, as they said"
        assert missing(mine) == []
        assert missing(coordinator(3) | mine) == [], "the coordinator hears of it a moment later"
        assert [event.fields["stages"] for event in seen if event.name == "stages_missing"][-1] == []
        selection._replica = None
        assert missing(mine) == [0, 2], "who has yet to get its own last commit goes by what is there"


async def test_a_peer_drains_no_longer_once_its_new_stage_has_lost_its_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is merged then, and it waited a minute for that, on its way to the stage for which all waited."""
    monkeypatch.setattr(module, "REFRESH_S", 0.01)
    manifest = run_of(3)
    async with context_of(manifest, tmp_path / "mine") as (context, _):
        replica = record_of(context.host, manifest.first_head(STAGE), STAGE)
        selection = StageSelection(context)
        selection.go(STAGE)
        selection.membership.view = {"replica": replica}
        with trio.fail_after(300):
            async with trio.open_nursery() as leaving:
                leaving.start_soon(selection.cancel_once_urgent, leaving.cancel_scope)
                while selection._missing != (0, 2):
                    await trio.sleep(0.01)
                assert not leaving.cancel_scope.cancel_called
                selection.membership.view = {}
                await trio.sleep_forever()
