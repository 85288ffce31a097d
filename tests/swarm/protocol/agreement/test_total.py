"""A node is a function of its events: it never raises, says the same twice, and its memory has bounds."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgspec
import pytest

from optim.config import AllReduceConfig, DilocoConfig, OuterConfig, PerStepConfig, StreamingConfig
from peer.config import InnerConfig
from peer.identity import Signed
from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.node import AgreementNode
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.records import LINK_KEY
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.head import Member
from swarm.protocol.ledger import count, without
from swarm.protocol.round_schedule import RoundSchedule
from tests.swarm.protocol.agreement.group import WORK, GroupOfNodes, TableSigner

BODIES: dict[str, type[msgspec.Struct]] = {
    **evidence.ONE_AN_ATTEMPT,
    evidence.PROMISE: msg.PromiseBody,
    evidence.START: msg.StartBody,
    evidence.JOIN: msg.JoinBody,
}


class Mutator:
    """Changes any field of any message; what it signs again, it signs as the liar."""

    def __init__(self, group: GroupOfNodes, liar: str, seed: int) -> None:
        self._group, self._liar, self._random = group, liar, random.Random(seed)
        self._kinds = {body: kind for _, kind, body in sorted(group.table.signed)}

    def mutate(self, value: Any, depth: int = 0) -> Any:
        chance = self._random
        if isinstance(value, Signed):
            return self._sign(value) if chance.random() < 0.5 else value
        if isinstance(value, msgspec.Struct):
            name = chance.choice([*value.__struct_fields__]) if value.__struct_fields__ else ""
            return msgspec.structs.replace(value, **{name: self.mutate(getattr(value, name))}) if name else value
        if isinstance(value, tuple):
            kept = [self.mutate(item) if chance.random() < 0.4 else item for item in value]
            return tuple(kept[: chance.randint(0, len(kept))] if chance.random() < 0.3 else kept)
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return chance.choice([value, -1, 0, value + 1, 1 << 53, (1 << 53) - 1])
        if isinstance(value, float):
            return chance.choice([0.0, value, 1e18])
        if isinstance(value, bytes):
            return chance.choice([b"", bytes(32), value])
        if isinstance(value, str):
            return chance.choice(["", "W", self._liar, value])
        return None if chance.random() < 0.2 else value

    def _sign(self, signed: Signed) -> Signed:
        kind = self._kinds.get(signed.body, "")
        if kind not in BODIES:
            return Signed(b"\xc1", self._liar, b"")
        body = msgspec.msgpack.decode(signed.body, type=BODIES[kind])
        return self._group.sign(self._liar, kind, self.mutate(body))


@pytest.mark.parametrize(
    ("peers", "config"),
    [("ABC", {}), ("AB", {}), ("ABCD", {}), ("ABC", {"mode": "required"})],
)
def test_no_mutated_message_raises_or_moves_a_node(peers: str, config: dict[str, Any]) -> None:
    """In every mode, at members, newcomers and the coordinator; and the group goes on: one liar stops none by
    wrong messages, which these are."""
    group = GroupOfNodes(peers, min_peers=len(peers), **config)
    group.run_to(2)
    group.start("X")
    group.run(6.0)
    group.event("W", events.RegroupRequested())
    group.run(3.0)
    liar = peers[-1]
    mutator = Mutator(group, liar, seed=7)
    for index, (_, _, message) in enumerate(list(group.sent)[-1500:]):
        target = ["W", "X", *peers[:-1]][index % (len(peers) + 1)]
        mutated = mutator.mutate(message)
        encoded = encode(mutated)
        try:
            wire = msgspec.msgpack.decode(encoded, type=msg.Message)
        except msgspec.ValidationError:
            continue  # refused by its type, before the node sees it
        group.event(target, events.Received(liar, wire))
        if index % 50 == 0:
            group.run(0.01)
    group.check()


def test_the_same_events_give_the_same_actions() -> None:
    first, second = (GroupOfNodes("ABC", mode="required") for _ in range(2))
    for group in (first, second):
        group.start("D")
        group.at(5.0, lambda group=group: group.crash("B"))  # type: ignore[misc]
        group.at(9.0, lambda group=group: group.start("B"))  # type: ignore[misc]
        group.run(20.0)
    assert [encode(message) for _, _, message in first.sent] == [encode(message) for _, _, message in second.sent]
    assert first.head("A") == second.head("A") and first.round("A") > 3


@pytest.mark.parametrize(
    "outer",
    [
        DilocoConfig(steps=4),
        StreamingConfig(steps=8, fragments=2),
        AllReduceConfig(batch=24),
        PerStepConfig(),
    ],
)
def test_every_method_runs_on_the_core(outer: OuterConfig) -> None:
    """Work in shares, work promised ahead in the ledger, one step a round: plans and ledgers follow from the method."""
    schedule = RoundSchedule(outer, InnerConfig(lr=1e-2, batch_size=2, total_steps=1000), seq_len=8, compute_s_max=30.0)
    group = GroupOfNodes("ABC", work=dataclasses.replace(WORK, schedule=schedule))
    group.run_to(3)
    group.start("D")
    group.crash("B")
    group.run_to(9, "ACD")
    assert group.head("D").has(group.member("D")) and not group.accusations()
    ledger = group.head("A").ledger
    assert bool(ledger.promised) == schedule.overlaps
    merged = sum(last - first for first, last in without([(0, ledger.cursor)], ledger.returned))
    assert group.head("A").tokens == 8 * (merged - sum(count(ranges) for _, ranges in ledger.promised))


def test_events_before_the_start_and_events_of_the_past_do_nothing() -> None:
    group = GroupOfNodes("ABC")
    config = AgreementConfig(genesis=group.head("A"), coordinator="W", peer="A")
    fresh = AgreementNode(config, TableSigner(group.table, "A"), group.machines["A"].node._context.work)
    assert fresh.step(0.0, events.TimerFired("poll")) == []
    group.run_to(2)
    for event in (
        events.Persisted(10**9),
        events.TimerFired("no such timer"),
        events.Built(b"?", b"?", bytes(32)),
        events.SliceResult(b"?", 10**9, b""),
        events.StateFetched(bytes(32), True),
        events.Missing(b"?", ("Q",), ("R",)),
        events.Gathered(b"?", {}),
        events.Judged(("Q", "nobody")),
        events.RegroupRequested(),
        events.PeerDown("Q"),
        events.PeerUp("Q"),
    ):
        group.event("A", event)
    group.run_to(4)


def test_memory_and_disk_have_bounds() -> None:
    """Invariant 14: a flood of early messages, join requests and attempts leaves no more than the caps."""
    group = GroupOfNodes("ABC")
    group.run_to(2)
    node, head = group.machines["A"].node, group.head("A")
    for i in range(3000):
        name = f"flood{i}"
        join = group.sign(name, evidence.JOIN, msg.JoinBody(head.hash, Member(name, "0")))
        group.give("A", msg.JoinMessage(join), name)
        group.give("A", msg.PrepareMessage(i.to_bytes(32, "big"), i, (1, 0, i)), name)
        vote = msg.VoteBody(head.hash, i, bytes(32), group.member("B"))
        group.give("A", msg.VoteMessage(group.sign("B", evidence.VOTE, vote)), "B")
    assert len(node._applicants.waiting()) <= 1024 and len(node._early._kept) <= 128
    assert sum(len(cast) for cast in node._round.instance.votes.values()) <= 16 * 3
    assert len(node._context.known) <= 4096
    assert len([key for key in group.machines["A"].records if not key.startswith(LINK_KEY)]) <= 4
