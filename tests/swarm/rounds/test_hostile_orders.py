"""A hostile member that gives false orders, floods calls, or leads badly is refused, bounded and replaced."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import trio

from peer.errors import BarnraiseError, RemoteError
from peer.identity import open_body, sign_body
from peer.net.method import Method
from swarm.protocol import messages as say
from swarm.protocol.head import TRIES_PER_LEADER, Head, Member
from swarm.protocol.paxos import ATTEMPTS_KEPT, Accepted
from swarm.protocol.plan import PLAN_KIND, Roster, WorkPlan
from swarm.rounds.round import Round
from tests.swarm.support.group import InventedTrainer, StageReplica
from tests.swarm.support.hostile import Scene, hostile_scene

replace = msgspec.structs.replace


class Junk(msgspec.Struct):
    """A body that no method accepts."""

    head: Any = None
    member: Any = None


def round_of(replica: StageReplica) -> Round:
    assert replica.engine._state.round is not None
    return replica.engine._state.round


def not_led_by(peer: str, head: Head) -> int:
    """Return an attempt, too late for the round to reach, that another peer leads."""
    return next(attempt for attempt in range(1000, 1100) if head.leader(attempt).peer != peer)


async def refused(scene: Scene, victim: StageReplica, method: Method[Any, Any], body: Any, payload: bytes = b"") -> str:
    with pytest.raises(RemoteError) as info:
        await scene.liar.call(victim.host.peer_id, method, body, payload)
    return info.value.code


async def test_orders_of_a_peer_that_does_not_lead_are_refused(tmp_path: Path) -> None:
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(1)
        liar, gate = scene.liar, trio.Event()
        replicas = (*scene.honest, liar.member)
        trainers: list[Any] = [replica.context.trainer for replica in replicas]
        begun = max(replica.engine.head.round for replica in replicas) + 1  # some may have computed it already
        for trainer in trainers:
            trainer.gate, trainer.gated_from = gate, begun + 1
            trainer.speed = 0.01  # as it reports: the deadline of that round is a minute away
        # A member that was slow to promise has no part in that round, which stands still once one trainer waits.
        while not (
            held := [replica for replica in scene.honest if cast(InventedTrainer, replica.context.trainer).waiting]
        ):
            await trio.sleep(0.02)
        victim = held[0]
        round_state = round_of(victim).round_state
        head, plan = round_state.head, round_state.plan
        assert plan is not None and round_state.signed_plan is not None
        wrong = not_led_by(liar.peer, head)
        vote = Accepted(wrong, head, b"")
        roster = Roster(head.hash, plan.hash, wrong, (), ())
        orders: list[tuple[Method[Any, Any], Any]] = [
            (say.PREPARE, say.Prepare(head, wrong, {})),
            (say.PREPARE, say.Prepare(head, -1, {})),
            (say.START_EXCHANGE, say.StartExchange(roster)),
            (say.FINISH, say.Finish(wrong, vote, round_state.signed_plan, roster, liar.peer)),
            (
                say.START_ROUND,
                say.StartRound(sign_body(liar.member.context.identity, PLAN_KIND, replace(plan, attempt=wrong))),
            ),
            (say.VOTE, say.Vote(head.hash, 0, b"x" * 32, victim.context.me)),
            (say.REQUEST_JOIN, say.JoinRequest(head.hash, head.round, victim.context.me, ())),
        ]
        promised = max(round_state.acceptor.promised, 0)
        leader = head.leader(promised).peer
        overdue = leader != liar.peer and round_of(victim)._may_have_led(liar.peer, promised)
        for method, body in orders:
            # An earlier leader may not know of the later attempt: its order is refused without a penalty.
            expected = "RoundDiscarded" if method is say.START_ROUND and overdue else "ProtocolViolation"
            assert await refused(scene, victim, method, body) == expected, method.name
        assert scene.penalties()
        if leader != liar.peer:
            await refused(scene, victim, say.START_ROUND, say.StartRound(round_state.signed_plan, finish_early=True))
            assert not gate.is_set(), "a replayed plan must not cut the work short"
        gate.set()
        await scene.rounds(2)


async def test_floods_of_votes_requests_and_garbage_are_bounded(tmp_path: Path) -> None:
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(1)
        victim, liar = scene.honest[0], scene.liar
        me = liar.member.context.me

        async def quietly(method: Method[Any, Any], body: Any, payload: bytes = b"") -> None:
            with suppress(BarnraiseError):
                await liar.call(victim.host.peer_id, method, body, payload)

        async with trio.open_nursery() as nursery:
            for i in range(300):
                head = victim.engine.head
                vote = say.Vote(head.hash, i, i.to_bytes(32, "big"), me)
                request_join = say.JoinRequest(head.hash, head.round, Member(f"12D3KooWSomebody{i}", "s"), ())
                nursery.start_soon(quietly, say.VOTE, vote)
                nursery.start_soon(quietly, say.REQUEST_JOIN, request_join)
        # an honest peer that missed a round asks to join, too
        known = {replica.host.peer_id for replica in (*scene.honest, liar.member)}
        assert victim.engine._join_requests._waiting.keys() <= known
        assert sum(len(cast) for cast in round_of(victim).round_state.votes._votes.values()) <= 4 * ATTEMPTS_KEPT
        long_name = say.JoinRequest(victim.engine.head.hash, 0, Member(liar.peer, "s" * 900_000), ())
        await quietly(say.REQUEST_JOIN, long_name)

        methods = [m for m in vars(say).values() if isinstance(m, Method) and not m.name.startswith("authority.")]
        nested: Any = []
        for _ in range(900):
            nested = [nested]
        junk = [Junk(), Junk("\x00", 2**63), Junk(b"\xff" * 5000), Junk(nested), Junk(float("nan"), [1, 2])]
        async with trio.open_nursery() as nursery:
            for method in methods:
                for body in junk:
                    call = Method(method.name, Junk, method.reply, 1 << 20, method.reply_payload_max)
                    nursery.start_soon(quietly, call, body, b"x" * 1000 if method.request_payload_max else b"")
        assert scene.penalties()
        await scene.rounds(2)


async def test_slices_of_unknown_exchanges_are_refused(tmp_path: Path) -> None:
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(1)
        victim = scene.honest[0]
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                for i in range(50):
                    slice_of = say.SliceOf(i.to_bytes(32, "big"), -1)
                    nursery.start_soon(refused, scene, victim, say.CONTRIBUTION, slice_of, b"x" * 100_000)
        await scene.rounds(2)


async def test_calls_for_the_next_attempt_do_not_stop_a_round(tmp_path: Path) -> None:
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(1)
        liar = scene.liar

        async def interrupt(victim: StageReplica) -> None:
            while True:
                head = victim.engine.head
                mine = [
                    a for a in range(4 * TRIES_PER_LEADER, 8 * TRIES_PER_LEADER) if head.leader(a).peer == liar.peer
                ]
                if mine:
                    with suppress(BarnraiseError):
                        await liar.call(victim.host.peer_id, say.PREPARE, say.Prepare(head, mine[0], {}))
                await trio.sleep(0.05)

        async with trio.open_nursery() as nursery:
            for replica in scene.honest:
                nursery.start_soon(interrupt, replica)
            await scene.rounds(4)
            nursery.cancel_scope.cancel()


def silence(peer: str, body: Any, payload: bytes) -> None:
    """Send nothing after the promises."""


def absurd_deadline(scene: Scene) -> Any:
    def forge(peer: str, body: Any, payload: bytes) -> tuple[Any, bytes]:
        plan = open_body(body.plan, PLAN_KIND, WorkPlan)
        return say.StartRound(
            sign_body(scene.liar.member.context.identity, PLAN_KIND, replace(plan, deadline_s=1e9))
        ), payload

    return forge


def the_same_samples_for_all(scene: Scene) -> Any:
    def forge(peer: str, body: Any, payload: bytes) -> tuple[Any, bytes]:
        plan = open_body(body.plan, PLAN_KIND, WorkPlan)
        same = tuple(replace(a, ranges=plan.assignments[0].ranges) for a in plan.assignments)
        return say.StartRound(
            sign_body(scene.liar.member.context.identity, PLAN_KIND, replace(plan, assignments=same))
        ), payload

    return forge


@pytest.mark.parametrize("lead", [lambda scene: silence, absurd_deadline, the_same_samples_for_all])
async def test_a_leader_that_stalls_or_orders_nonsense_is_replaced(tmp_path: Path, lead: Any) -> None:
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(1)
        led, forge = trio.Event(), lead(scene)

        def forged(peer: str, body: Any, payload: bytes) -> tuple[Any, bytes] | None:
            led.set()
            return forge(peer, body, payload)

        scene.liar.sends(say.START_ROUND, forged)
        await led.wait()
        while forge is not silence and not scene.penalties():
            await trio.sleep(0.05)
        await scene.rounds(2)
