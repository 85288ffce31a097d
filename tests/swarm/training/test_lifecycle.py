"""When a peer takes its seat again, and when it may leave it."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import trio

from peer.net.host import Host
from peer.net.method import Call
from swarm.membership.membership import MemberRecord
from swarm.protocol.head import Member
from swarm.protocol.messages import STANDING, AskHead, HeadReport
from swarm.protocol.quorum import ask_standings
from swarm.training import lifecycle as module
from swarm.training.lifecycle import PeerLifecycle
from tests.swarm.support.kept_commits import STAGE, ground_of, record_of
from tests.swarm.training.test_roles import run_of


async def test_who_was_on_its_way_to_a_stage_that_was_lost_meanwhile_sits_down_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.01)
    manifest = run_of(3)
    async with ground_of(manifest, tmp_path / "mine") as (ground, seen):
        replica = record_of(ground.host, manifest.first_head(STAGE), STAGE)
        arriving = msgspec.structs.replace(replica, ready_at=time.time() + 60)
        late = msgspec.structs.replace(arriving, at=time.time() - 20, ready_at=time.time() - 15)
        left = trio.Event()

        async def sit(attendance: PeerLifecycle) -> None:
            await attendance._until_needed_elsewhere()
            left.set()

        async def reads(attendance: PeerLifecycle, records: dict[str, MemberRecord], missing: list[str]) -> None:
            """And sees which stages nobody serves."""
            count = len(seen)
            attendance._membership.view = records
            while not any(e.name == "stages_missing" and e.fields["stages"] == missing for e in seen[count:]):
                await trio.sleep(0.01)

        everybody, without = ["0", "1", "2"], ["0", "2"]
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                attendance = PeerLifecycle(ground)
                attendance._go(STAGE)
                nursery.start_soon(sit, attendance)
                await reads(attendance, {"arriving": arriving}, everybody)
                await reads(attendance, {"late": late}, without)
                await reads(attendance, {"arriving": arriving}, everybody)
                assert not left.is_set(), "nobody has served it"
                await reads(attendance, {"replica": replica, "arriving": arriving}, without)
                attendance._membership.view = {"arriving": arriving}
                await left.wait()


async def test_who_is_not_taken_in_with_what_it_has_asks_the_keepers_again(tmp_path: Path) -> None:
    """Nobody serves its stage, and it found no keeper when it came."""
    manifest = run_of(3)
    async with ground_of(manifest, tmp_path / "mine") as (ground, _):
        first = manifest.first_head(0)
        begun = record_of(ground.host, msgspec.structs.replace(first, round=3), 0)
        engine = SimpleNamespace(head=manifest.first_head(STAGE), phase="knocking")
        idle = SimpleNamespace(service_s=0.0, queue=0.0)
        seat = SimpleNamespace(
            stage=STAGE, engine=engine, is_member=False, passed=0, load=lambda: idle, measures_last=False
        )
        attendance = PeerLifecycle(ground)
        attendance._go(STAGE)
        attendance._seat = cast(Any, seat)
        attendance._missing, attendance._seated_at = (STAGE,), trio.current_time()
        attendance._membership.view = {"another": begun}
        assert not attendance._is_orphaned, "the authority may still take it in"
        attendance._seated_at -= module.RESTORE_AGAIN_S + 1
        assert attendance._is_orphaned
        attendance._membership.view = {"another": record_of(ground.host, first, 0)}
        assert not attendance._is_orphaned, "the run has not begun"


async def test_who_leaves_has_a_deputy_that_the_group_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger publishes that it is a replica of the stage, and says so when it is asked."""
    monkeypatch.setattr("swarm.training.lifecycle.ask_standings", partial(ask_standings, timeout_s=60.0))
    manifest = run_of(3)
    async with (
        ground_of(manifest, tmp_path / "mine") as (ground, _),
        ground_of(manifest, tmp_path / "mate") as (mate, _),
        ground_of(manifest, tmp_path / "stranger") as (stranger, _),
    ):
        hosts = [ground.host, mate.host, stranger.host]
        me, left, unknown = (Member(host.peer_id, "s") for host in hosts)
        first = manifest.first_head(STAGE)
        head, forged = first.regrouped((me, left), 1), first.regrouped((me, unknown), 1)
        for host, member, theirs in ((mate.host, left, head), (stranger.host, unknown, forged)):
            serve_standing(host, HeadReport(theirs, member, "training", None))
            await ground.host.connect_address(host.addresses[0], timeout_s=30)
        attendance = PeerLifecycle(ground)
        attendance._seat = cast(Any, SimpleNamespace(engine=SimpleNamespace(head=head)))
        mates, claims = record_of(mate.host, head, STAGE), record_of(stranger.host, forged, STAGE)
        moving = msgspec.structs.replace(mates, ready_at=time.time() + 60)
        for records, expected in (
            ({left.peer: mates}, True),
            ({unknown.peer: claims}, False),
            ({left.peer: moving, unknown.peer: claims}, False),
            ({left.peer: mates, unknown.peer: claims}, True),
        ):
            attendance._membership.view = records
            assert await attendance._has_deputy(STAGE) is expected
        attendance._seat = cast(Any, SimpleNamespace(engine=SimpleNamespace(head=forged)))
        attendance._membership.view = {left.peer: mates}
        assert not await attendance._has_deputy(STAGE), "it is no member any more"


def serve_standing(host: Host, standing: HeadReport) -> None:
    async def answer(call: Call[AskHead]) -> HeadReport:
        return standing

    host.rpc.serve(STANDING, answer)
