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
from swarm.protocol.messages import HEAD_REPORT, AskHead, HeadReport
from swarm.protocol.quorum import ask_head_reports
from swarm.training import lifecycle as module
from swarm.training.lifecycle import PeerLifecycle
from tests.swarm.support.kept_commits import STAGE, context_of, record_of
from tests.swarm.training.test_roles import run_of


async def test_who_was_on_its_way_to_a_stage_that_was_lost_meanwhile_sits_down_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.01)
    manifest = run_of(3)
    async with context_of(manifest, tmp_path / "mine") as (context, seen):
        replica = record_of(context.host, manifest.first_head(STAGE), STAGE)
        arriving = msgspec.structs.replace(replica, ready_at=time.time() + 60)
        late = msgspec.structs.replace(arriving, at=time.time() - 20, ready_at=time.time() - 15)
        left = trio.Event()

        async def sit(lifecycle: PeerLifecycle) -> None:
            await lifecycle._until_needed_elsewhere()
            left.set()

        async def reads(lifecycle: PeerLifecycle, records: dict[str, MemberRecord], missing: list[str]) -> None:
            """And sees which stages nobody serves."""
            count = len(seen)
            lifecycle._membership.view = records
            while not any(e.name == "stages_missing" and e.fields["stages"] == missing for e in seen[count:]):
                await trio.sleep(0.01)

        everybody, without = ["0", "1", "2"], ["0", "2"]
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                lifecycle = PeerLifecycle(context)
                lifecycle._go(STAGE)
                nursery.start_soon(sit, lifecycle)
                await reads(lifecycle, {"arriving": arriving}, everybody)
                await reads(lifecycle, {"late": late}, without)
                await reads(lifecycle, {"arriving": arriving}, everybody)
                assert not left.is_set(), "nobody has served it"
                await reads(lifecycle, {"replica": replica, "arriving": arriving}, without)
                lifecycle._membership.view = {"arriving": arriving}
                await left.wait()


async def test_who_is_not_taken_in_with_what_it_has_asks_the_keepers_again(tmp_path: Path) -> None:
    """Nobody serves its stage, and it found no keeper when it came."""
    manifest = run_of(3)
    async with context_of(manifest, tmp_path / "mine") as (context, _):
        first = manifest.first_head(0)
        begun = record_of(context.host, msgspec.structs.replace(first, round=3), 0)
        engine = SimpleNamespace(head=manifest.first_head(STAGE), phase="joining")
        idle = SimpleNamespace(service_s=0.0, queue=0.0)
        replica = SimpleNamespace(
            stage=STAGE, engine=engine, is_member=False, passed=0, load=lambda: idle, measures_last=False
        )
        lifecycle = PeerLifecycle(context)
        lifecycle._go(STAGE)
        lifecycle._replica = cast(Any, replica)
        lifecycle._missing, lifecycle._seated_at = (STAGE,), trio.current_time()
        lifecycle._membership.view = {"another": begun}
        assert not lifecycle._is_orphaned, "the authority may still take it in"
        lifecycle._seated_at -= module.RESTORE_AGAIN_S + 1
        assert lifecycle._is_orphaned
        lifecycle._membership.view = {"another": record_of(context.host, first, 0)}
        assert not lifecycle._is_orphaned, "the run has not begun"


async def test_who_leaves_has_a_deputy_that_the_group_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger publishes that it is a replica of the stage, and says so when it is asked."""
    monkeypatch.setattr("swarm.training.lifecycle.ask_head_reports", partial(ask_head_reports, timeout_s=60.0))
    manifest = run_of(3)
    async with (
        context_of(manifest, tmp_path / "mine") as (context, _),
        context_of(manifest, tmp_path / "mate") as (mate, _),
        context_of(manifest, tmp_path / "stranger") as (stranger, _),
    ):
        hosts = [context.host, mate.host, stranger.host]
        me, left, unknown = (Member(host.peer_id, "s") for host in hosts)
        first = manifest.first_head(STAGE)
        head, forged = first.regrouped((me, left), 1), first.regrouped((me, unknown), 1)
        for host, member, theirs in ((mate.host, left, head), (stranger.host, unknown, forged)):
            serve_head_report(host, HeadReport(theirs, member, "training", None))
            await context.host.connect_address(host.addresses[0], timeout_s=30)
        lifecycle = PeerLifecycle(context)
        lifecycle._replica = cast(Any, SimpleNamespace(engine=SimpleNamespace(head=head)))
        mates, claims = record_of(mate.host, head, STAGE), record_of(stranger.host, forged, STAGE)
        moving = msgspec.structs.replace(mates, ready_at=time.time() + 60)
        for records, expected in (
            ({left.peer: mates}, True),
            ({unknown.peer: claims}, False),
            ({left.peer: moving, unknown.peer: claims}, False),
            ({left.peer: mates, unknown.peer: claims}, True),
        ):
            lifecycle._membership.view = records
            assert await lifecycle._has_other_replica(STAGE) is expected
        lifecycle._replica = cast(Any, SimpleNamespace(engine=SimpleNamespace(head=forged)))
        lifecycle._membership.view = {left.peer: mates}
        assert not await lifecycle._has_other_replica(STAGE), "it is no member any more"


def serve_head_report(host: Host, report: HeadReport) -> None:
    async def answer(call: Call[AskHead]) -> HeadReport:
        return report

    host.rpc.register(HEAD_REPORT, answer)
