"""Calls of peers that are in no head, and floods of a member: refused, bounded, and no round waits for them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio

from peer.errors import BarnraiseError, RemoteError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import open_host
from peer.net.method import Method
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.electorate import leader_of
from swarm.protocol.head import Head, Member
from swarm.protocol.messages import CONTRIBUTION, FETCH_RESULT, RESULT, SliceOf
from swarm.protocol.plan import PLAN_KIND
from swarm.rounds.handlers import serve_agreement
from swarm.rounds.messages import AGREE, MessageBatch
from swarm.rounds.replica_actor import EXCHANGES_MAX
from tests.swarm.rounds.test_driver import deltas
from tests.swarm.support.driven_group import DrivenReplica, GroupSetting, open_driven_group
from tests.swarm.support.hostile import Liar, hostile_scene

pytestmark = pytest.mark.slow


class Junk(msgspec.Struct):
    """A body that no method accepts."""

    head: Any = None
    member: Any = None


async def test_messages_of_another_group_are_refused_without_a_penalty(tmp_path: Path) -> None:
    """Peers move between groups, so this is no violation."""
    async with open_driven_group(tmp_path) as group:
        replica = await group.enter(deltas)
        async with open_host(identity=Identity.generate(), events=EventLog()) as asker:
            await asker.connect_address(replica.host.addresses[0], timeout_s=30)
            status = msg.StatusMessage((0, 0, 0), bytes(32), Member(asker.peer_id, "s"))
            with pytest.raises(RemoteError, match="in another group") as refused:
                await asker.rpc.call(replica.peer, AGREE, MessageBatch("another", (status,)), timeout_s=30)
            assert refused.value.code == "InOtherGroup"
            with pytest.raises(RemoteError) as refused:
                await asker.rpc.call(replica.peer, FETCH_RESULT, SliceOf(bytes(32), 0), timeout_s=30)
            assert refused.value.code == "RoundDiscarded"
        group.check()


async def test_a_peer_that_says_it_is_elsewhere_counts_as_down_until_it_is_back(tmp_path: Path) -> None:
    async def take(peer: str, messages: Any) -> None:
        await trio.lowlevel.checkpoint()

    groups: dict[str, Any] = {"another": SimpleNamespace(take=take)}
    async with open_driven_group(tmp_path) as group:
        driver = (await group.enter(deltas)).driver.group
        async with open_host(identity=Identity.generate(), events=EventLog()) as mover:
            await mover.connect_address(group.members[0].host.addresses[0], timeout_s=30)
            status = msg.StatusMessage((0, 0, 0), bytes(32), Member(mover.peer_id, "s"))

            async def until_down(expected: bool) -> None:
                while (mover.peer_id in driver._node._context.down) is not expected:
                    driver._sender.add(mover.peer_id, status)
                    driver._sender.send(1, group.nursery)
                    await trio.sleep(0.05)

            await until_down(True)  # while it opens a replica of another stage
            serve_agreement(mover.rpc, lambda: groups)
            groups[driver.group] = groups["another"]
            await until_down(False)
            del groups[driver.group]
            await until_down(True)
        group.check()


async def refused(liar: Liar, victim: DrivenReplica, *messages: Any) -> bool:
    try:
        await liar.tell(victim.peer, *messages)
    except RemoteError as error:
        return error.code == "ProtocolViolation"
    return False


def led_by_another(liar: Liar, head: Head) -> int:
    """Return an attempt, far from the present one, that another peer leads."""
    return next(a for a in range(1000, 1100) if leader_of(head, head.hash, a).peer != liar.peer)


async def test_orders_of_a_peer_that_does_not_lead_are_refused(tmp_path: Path) -> None:
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(1)
        liar, victim = scene.liar, scene.honest[0]
        gate = trio.Event()
        for replica in (*scene.honest, liar.member):
            replica.trainer.hold(0, gate)
            replica.trainer.speed = 0.05
        await scene.group.until(lambda: all(replica.trainer.waiting for replica in scene.honest))
        head, wrong = victim.driver.group.head, led_by_another(liar, victim.driver.group.head)
        plan = victim.actor.training.plan
        assert plan is not None
        forged = liar.sign(PLAN_KIND, msgspec.structs.replace(plan, attempt=wrong))
        roster = msg.RosterBody(head.hash, wrong, plan.hash, ())
        other = Member(scene.honest[1].peer, "s")
        start = msgspec.structs.replace(head, term=head.term + 1, previous=head.hash, attempt=-1)
        started = msg.ChainLink(start, start=liar.sign(evidence.START, msg.StartBody(start)))
        orders = {
            "prepare": msg.PrepareMessage(head.hash, wrong, position_of(head)),
            "plan": msg.PlanMessage(head.hash, wrong, forged),
            "roster": msg.RosterMessage(head.hash, wrong, forged, liar.sign(evidence.ROSTER, roster)),
            "vote": msg.VoteMessage(liar.sign(evidence.VOTE, msg.VoteBody(head.hash, 0, b"x" * 32, other))),
            "join": msg.JoinMessage(liar.sign(evidence.JOIN, msg.JoinBody(head.hash, other))),
            "start": msg.ChainMessage((started,)),
            "endorsement": msg.EndorsementMessage(liar.sign(evidence.ENDORSEMENT, msg.EndorsementBody(head.hash))),
            "witness": msg.WitnessMessage(liar.sign(evidence.WITNESS, msg.WitnessBody(head.run_id, other))),
        }
        passed = [name for name, order in orders.items() if not await refused(liar, victim, order)]
        assert victim.driver.group.head == head
        assert not passed, "taken without a penalty"
        gate.set()
        await scene.rounds(2)


async def test_floods_are_bounded_and_stop_no_round(tmp_path: Path) -> None:
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(1)
        victim, liar = scene.honest[0], scene.liar

        async def quietly(method: Method[Any, Any], body: Any, payload: bytes = b"") -> None:
            with suppress(BarnraiseError):
                await liar.call(victim.peer, method, body, payload)

        async with trio.open_nursery() as nursery:
            for i in range(200):
                head = victim.head
                vote = msg.VoteBody(head.hash, i, i.to_bytes(32, "big"), liar.member.driver.me)
                join = msg.JoinBody(head.hash, Member(f"12D3KooWSomebody{i}", "s"))
                said = (
                    msg.VoteMessage(liar.sign(evidence.VOTE, vote)),
                    msg.JoinMessage(liar.sign(evidence.JOIN, join)),
                    msg.AskChainMessage((i.to_bytes(32, "big"),)),
                    msg.StatusMessage((9, 0, i), i.to_bytes(32, "big"), liar.member.driver.me),
                )
                nursery.start_soon(quietly, AGREE, MessageBatch("run", said))
        nested: Any = []
        for _ in range(900):
            nested = [nested]
        junk = [Junk(), Junk("\x00", 2**63), Junk(b"\xff" * 5000), Junk(nested), Junk(float("nan"), [1, 2])]
        async with trio.open_nursery() as nursery:
            for method in (AGREE, CONTRIBUTION, RESULT, FETCH_RESULT):
                for body in junk:
                    call = Method(method.name, Junk, method.reply, 1 << 20, method.reply_payload_max)
                    nursery.start_soon(quietly, call, body, b"x" * 1000 if method.request_payload_max else b"")
        assert scene.penalties()
        await scene.rounds(2)
        assert len(victim.actor.exchanges) <= EXCHANGES_MAX


async def test_slices_of_unknown_exchanges_hold_no_memory(tmp_path: Path) -> None:
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(1)
        victim, codes = scene.honest[0], list[str]()

        async def send(number: int) -> None:
            slice_of = SliceOf(number.to_bytes(32, "big"), 0)
            with pytest.raises(RemoteError) as info:
                await scene.liar.call(victim.peer, CONTRIBUTION, slice_of, b"x" * 60_000)
            codes.append(info.value.code)

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(send, number)
        assert len(codes) == 40
        assert len(victim.actor.exchanges) <= EXCHANGES_MAX
        await scene.rounds(2)


async def test_slices_and_results_of_settled_rounds_are_let_go(tmp_path: Path) -> None:
    """A replica keeps the latest exchanges for slower peers, and nothing of older ones."""
    setting = GroupSetting(work_s=0.05)
    async with open_driven_group(tmp_path, setting) as group:
        replicas = [await group.enter(deltas) for _ in range(3)]
        await group.until_round(EXCHANGES_MAX + 4)
        for replica in replicas:
            actor = replica.actor
            assert len(actor.exchanges) <= EXCHANGES_MAX
            before = {exchange.order.before.round for exchange in actor.exchanges.values()}
            assert min(before) >= replica.head.round - EXCHANGES_MAX - 1, before
            assert len(actor.builder.holds) <= 3
            held = sum(len(found.data) for found in actor._slices.received.values())
            sizes = sum(actor.coding.message_bytes(index) for index in range(actor.coding.count))
            assert held <= len(replicas) * sizes, "no more than one exchange's"
        group.check()
