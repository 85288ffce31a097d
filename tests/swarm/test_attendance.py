"""Whoever is on its way to a stage when that loses its last replica sits down again, so that the keepers are asked."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import trio

from swarm import attendance as module
from swarm.attendance import Attendance
from swarm.membership import MemberRecord
from tests.swarm.kept_commits import STAGE, ground_of, record_of
from tests.swarm.test_roles import run_of


async def test_who_was_on_its_way_to_a_stage_that_was_lost_meanwhile_sits_down_again(
    tmp_path: Path, monkeypatch: object
) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.01)  # type: ignore[attr-defined]
    manifest = run_of(3)
    async with ground_of(manifest, tmp_path / "mine") as (ground, seen):
        replica = record_of(ground.host, manifest.first_head(STAGE), STAGE)
        arriving = msgspec.structs.replace(replica, ready_at=time.time() + 60)
        late = msgspec.structs.replace(arriving, at=time.time() - 20, ready_at=time.time() - 15)
        left = trio.Event()

        async def sit(attendance: Attendance) -> None:
            await attendance._until_needed_elsewhere()
            left.set()

        async def reads(attendance: Attendance, records: dict[str, MemberRecord], missing: list[str]) -> None:
            """And sees which stages nobody serves."""
            count = len(seen)
            attendance._membership.view = records
            while not any(e.name == "stages_missing" and e.fields["stages"] == missing for e in seen[count:]):
                await trio.sleep(0.01)

        everybody, without = ["0", "1", "2"], ["0", "2"]
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                attendance = Attendance(ground)
                attendance._go(STAGE)
                nursery.start_soon(sit, attendance)
                await reads(attendance, {"arriving": arriving}, everybody)
                await reads(attendance, {"late": late}, without)
                await reads(attendance, {"arriving": arriving}, everybody)
                assert not left.is_set(), "nobody has served it"
                await reads(attendance, {"replica": replica, "arriving": arriving}, without)
                attendance._membership.view = {"arriving": arriving}
                await left.wait()
