"""The leader that gathers a synchronous batch includes what any member of the head has, unless it is lost."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from optim.config import AllReduceConfig
from peer.errors import BarnraiseError
from peer.identity import Identity, open_body, sign_body
from peer.net.host import Host
from peer.net.method import Call, Empty
from peer.net.rpc_server import BUSY
from swarm.pipeline.messages import COUNTED, REDISPATCH, AskCounted, Counted, Redispatch
from swarm.pipeline.synchronous import Synchronous
from swarm.protocol.agreement import events
from swarm.protocol.ledger import Range
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution
from tests.swarm.support.group import regrouped
from tests.swarm.support.pipeline_harness import Table, open_impostor, open_replica, without_haste
from tests.swarm.support.stage_replicas import Setting, StageMember, entry_of, open_member
from tests.swarm.support.stage_scene import BATCH, check_one_process, scene_of, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="stages run in worker processes, supervised through /proc"),
]
SETTING = Setting(2, AllReduceConfig(batch=BATCH), rounds=1)


class Busy(BarnraiseError):
    """The error of a peer with too many calls at once."""


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
async def open_group(folder: Path, mates: int) -> AsyncIterator[tuple[StageMember, list[Mate]]]:
    """Open a replica of stage 1 of 2 and so many mates; stage 0 has no replica."""
    authority = Identity.load_or_create(folder / "authority.key")
    table: Table = {}
    async with open_replica(folder, 2, 1, **SETTING.spec) as replica, AsyncExitStack() as stack:
        found = []
        for _ in range(mates):
            mate = Mate(await stack.enter_async_context(open_impostor(SETTING.rules, 1, {}, None)))
            mate.host.rpc.register(COUNTED, mate.on_counted)
            table[mate.host.peer_id] = {"stage": 1, "addresses": list(mate.host.addresses), "session": "x"}
            found.append(mate)
        table[replica.peer] = entry_of(replica)
        yield await stack.enter_async_context(open_member(replica, SETTING, table, authority, folder)), found


async def test_batch_is_complete_across_members(tmp_path: Path) -> None:
    async with open_group(tmp_path, 2) as (member, [one, two]):
        one.has, two.has = ((0, BATCH // 2),), ((BATCH // 2, BATCH),)
        names = [member.replica.peer, one.host.peer_id, two.host.peer_id]
        with trio.fail_after(300):
            claims = await member.trainer.gather(names)
        assert claims == dict(zip(names, ((), one.has, two.has), strict=True))
        assert not member.replica.seen("pipeline_redispatched")


async def test_busy_member_keeps_its_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_haste(monkeypatch)  # else a member may be asked again before its answer comes
    assert Busy.__name__ == BUSY
    async with open_group(tmp_path, 2) as (member, [busy, slow]):
        busy.has = ((0, BATCH // 2),)
        members = [member.replica.peer, *(mate.host.peer_id for mate in (busy, slow))]
        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(member.trainer.gather, members)
                for wanted in (2, 4):  # it has said what it has; it has been busy
                    while busy.asked < wanted:
                        await trio.sleep(0.01)
                    busy.busy = True
                slow.has = ((BATCH // 2, BATCH),)
        assert not [e for e in member.replica.seen("pipeline_redispatched") if "gone" in str(e.fields["reason"])]


async def test_resumed_round_is_redispatched_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group was regrouped at the head that it had. What is not in flight now was counted by a member that is
    gone."""
    without_haste(monkeypatch)
    async with open_group(tmp_path, 1) as (member, [mate]):
        before, at = member.head, member.context.host
        redispatched = trio.Event()

        async def on_redispatch(call: Call[Redispatch]) -> Empty:
            assert call.body.ranges and mate.asked <= 3, "soon, and not when it has waited for long"
            redispatched.set()
            return Empty()

        mate.host.rpc.register(REDISPATCH, on_redispatch)
        at.book.add(mate.host.peer_id, list(mate.host.addresses))
        assert isinstance(member.trainer, Synchronous)
        member.trainer._tracker._redispatcher._sources = lambda: [mate.host.peer_id]
        with trio.fail_after(300):
            await until(lambda: member.trainer.head == before and member.trainer._adoption is None)
            member.trainer.adopt(member.context.state.theta, (), regrouped(before, before.members, before.term + 1))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(member.trainer.gather, [member.replica.peer, mate.host.peer_id])
                await redispatched.wait()
                nursery.cancel_scope.cancel()


# -- members that do not submit what they say they have ---------------------------------------------------------------


@pytest.mark.soak  # the test below is of its kind
async def test_false_claim_delays_no_round(tmp_path: Path) -> None:
    """The member that claims the batch gets no micro-batch either."""
    setting = Setting(2, AllReduceConfig(batch=BATCH), rounds=2)
    async with scene_of(tmp_path, setting, [1, 3]) as scene:
        liar = scene.stages[1][0].replica
        scene.table[liar.peer]["stage"] = -1

        async def claim(call: Call[AskCounted]) -> Counted:
            return Counted(((call.body.epoch * BATCH, (call.body.epoch + 1) * BATCH),))

        liar.host.rpc.server._methods[COUNTED.name].handler = claim
        with trio.fail_after(300):
            await scene.run()
        scene.check(2)
        check_one_process(scene, 2)


async def test_unusable_contribution_is_recomputed(tmp_path: Path) -> None:
    """What the member had counted is dispatched again."""
    setting = Setting(2, AllReduceConfig(batch=BATCH), rounds=3)
    async with scene_of(tmp_path, setting, [1, 2]) as scene:
        member = scene.stages[1][0]
        identity, actor = member.replica.host.identity, member.driver.actor
        spoilt: dict[int, bytes] = {}
        assert actor is not None
        feed = actor.training._feed

        def spoil(event: events.Event) -> None:
            """Spoil the submission under the first plan of each round in which it has counted anything."""
            assert isinstance(event, events.Submitted)
            body = open_body(event.contribution, CONTRIBUTION_KIND, Contribution)
            if body.counted and spoilt.setdefault(member.head.round, body.plan) == body.plan:
                body = replace(body, sqnorms=(math.inf,) * len(body.sqnorms))
                event = replace(event, contribution=sign_body(identity, CONTRIBUTION_KIND, body))
            feed(event)

        actor.training._feed = spoil
        with trio.fail_after(300):
            await scene.run()
        for members in scene.stages:
            assert all(member.heads[-1].round == 3 for member in members)
        check_one_process(scene, 3)
