"""Who gathers a synchronous batch counts in what any member of the head has, unless it is known to be lost."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from optim.config import AllReduce
from peer.errors import BarnraiseError
from peer.host import Host
from peer.identity import Identity
from peer.method import Call
from peer.serving import BUSY
from swarm.ledger import Range
from swarm.pipeline.messages import COUNTED, AskCounted, Counted
from tests.swarm.pipeline_harness import Table, open_impostor, open_replica
from tests.swarm.stage_scene import BATCH
from tests.swarm.stage_seats import Setting, StageSeat, entry_of, seated

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="stages run in worker processes, supervised through /proc"),
]
SETTING = Setting(2, AllReduce(batch=BATCH), rounds=1)


class Busy(BarnraiseError):
    """What a peer answers that has too many calls at once."""


@dataclass
class Mate:
    """Another member of the group that says it has counted `has`, or that it is busy."""

    host: Host
    has: tuple[Range, ...] = ()
    busy: bool = False
    asked: int = 0

    async def on_counted(self, call: Call[AskCounted]) -> Counted:
        self.asked += 1
        if self.busy:
            raise Busy("too many calls at once")
        return Counted(self.has)


@asynccontextmanager
async def open_group(folder: Path, mates: int) -> AsyncIterator[tuple[StageSeat, list[Mate]]]:
    """A replica of stage 1 of 2, and so many mates; nobody is on stage 0."""
    authority = Identity.load_or_create(folder / "authority.key")
    table: Table = {}
    async with open_replica(folder, 2, 1, **SETTING.spec) as replica, AsyncExitStack() as stack:
        found = []
        for _ in range(mates):
            mate = Mate(await stack.enter_async_context(open_impostor(SETTING.rules, 1, {}, None)))
            mate.host.rpc.serve(COUNTED, mate.on_counted)
            table[mate.host.peer_id] = {"stage": 1, "addresses": list(mate.host.addresses), "session": "x"}
            found.append(mate)
        table[replica.peer] = entry_of(replica)
        yield await stack.enter_async_context(seated(replica, SETTING, table, authority, folder)), found


async def test_a_batch_is_whole_also_where_who_counted_it_is_not_in_the_plan(tmp_path: Path) -> None:
    """It did not answer in time, but goes on: the next plan has it, and nothing is issued once more."""
    async with open_group(tmp_path, 2) as (seat, [planned, left_out]):
        planned.has, left_out.has = ((0, BATCH // 2),), ((BATCH // 2, BATCH),)
        with trio.fail_after(60):
            await seat.trainer.gather([seat.replica.peer, planned.host.peer_id])
        assert not seat.replica.seen("pipeline_reissued")


async def test_who_is_too_busy_to_say_has_what_it_had(tmp_path: Path) -> None:
    assert Busy.__name__ == BUSY
    async with open_group(tmp_path, 2) as (seat, [busy, slow]):
        busy.has = ((0, BATCH // 2),)
        members = [seat.replica.peer, *(mate.host.peer_id for mate in (busy, slow))]
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(seat.trainer.gather, members)
                for wanted in (2, 4):  # it has said what it has; it has been busy
                    while busy.asked < wanted:
                        await trio.sleep(0.01)
                    busy.busy = True
                slow.has = ((BATCH // 2, BATCH),)
        assert not [e for e in seat.replica.seen("pipeline_reissued") if "gone" in str(e.fields["reason"])]
