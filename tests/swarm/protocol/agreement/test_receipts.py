"""A span of a later stage belongs to the peer from which the stage before has taken its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from optim.config import AllReduceConfig, DilocoConfig, OuterConfig
from peer.config import InnerConfig
from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement.messages import ChainLink, Measurements
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.ledger import Range, common, count
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution, WorkPlan
from swarm.protocol.receipts import RECEIPT_KIND, ReceiptBody, StageProof
from swarm.protocol.round_schedule import RoundSchedule
from tests.swarm.protocol.agreement.group import SCHEDULE, WORK, GroupOfNodes, Machine

MICRO_BATCH, BATCH = 4, 24
BEFORE = msgspec.structs.replace(genesis("stage 0", b"s" * 32), members=(Member("P", "s"), Member("Q", "s")))
SHARES = {"A": ((0, 8), (16, 24)), "B": ((8, 16),)}
ALL = ((0, BATCH),)


class Stages:
    """Other stages: their heads are believed, receipts are looked up in the table of signatures."""

    def __init__(self) -> None:
        self.group: GroupOfNodes | None = None

    def head(self, stage: int, links: StageProof) -> Head:
        assert stage == 0
        return links[-1].head

    def receipt(self, signed: Signed) -> ReceiptBody:
        assert self.group is not None
        return self.group.table.of("any").open(signed, RECEIPT_KIND, ReceiptBody)


def stage_one(outer: OuterConfig, claims: Mapping[str, tuple[Range, ...]], receipts: dict[str, Any]) -> GroupOfNodes:
    """Return the replicas of stage 1, which claim these samples of each round's `BATCH`, with these receipts: the
    signer and the samples."""
    schedule = RoundSchedule(
        outer,
        InnerConfig(lr=1e-2, batch_size=4, total_steps=1000),
        seq_len=SCHEDULE.seq_len,
        compute_s_max=30.0,
        stage=1,
        stages=2,
        micro_batch=MICRO_BATCH,
    )
    stages = Stages()
    group = GroupOfNodes("".join(claims), work=dataclasses.replace(WORK, schedule=schedule, stages=stages))
    stages.group, make = group, group.contribution

    def moved(ranges: tuple[Range, ...], number: int) -> tuple[Range, ...]:
        begin = (number - 1) * BATCH
        return tuple((first + begin, last + begin) for first, last in ranges)

    def counted(peer: str, plan: WorkPlan) -> tuple[Range, ...]:
        return moved(claims[peer], plan.round)

    def contribution(machine: Machine, plan: WorkPlan) -> Signed:
        body = msgspec.msgpack.decode(make(machine, plan).body, type=Contribution)
        given = [
            group.sign(signer, RECEIPT_KIND, ReceiptBody(body.head, machine.peer, moved(ranges, plan.round)))
            for signer, ranges in receipts.get(machine.peer, {}).items()
        ]
        proof = () if "P" in machine.node.head.senders else (ChainLink(BEFORE),)
        body = msgspec.structs.replace(body, receipts=tuple(given), stage_before=proof)
        return group.sign(machine.peer, CONTRIBUTION_KIND, body)

    group.counted, group.contribution = counted, contribution  # type: ignore[method-assign]
    return group


LIARS: dict[str, dict[str, tuple[Range, ...]]] = {
    "has no receipt": {},
    "signs for itself with another key": {"X": ALL},
    "has one for its own part": {"Q": ((8, 12),)},
}


@pytest.mark.parametrize("lie", list(LIARS))
def test_who_claims_all_of_a_stage_does_not_take_the_round(lie: str) -> None:
    """B claims everything. Without receipts the larger claim would win, each round."""
    claims = {"A": SHARES["A"], "B": ALL}
    group = stage_one(DilocoConfig(steps=8), claims, {"A": {"P": SHARES["A"]}, "B": LIARS[lie]})
    group.run_to(3)
    head = group.head("A")
    assert head.tokens == 3 * count(SHARES["A"]) * SCHEDULE.seq_len and head.senders == ("P", "Q")
    assert not common(head.ledger.returned, [(r * BATCH, r * BATCH + 8) for r in range(3)])
    assert {member.peer for member in head.members} == {"A", "B"} and not group.accusations()


def test_who_claims_all_of_a_batch_does_not_take_it() -> None:
    claims = {**SHARES, "C": ALL}
    given = {"A": {"P": SHARES["A"]}, "B": {"Q": SHARES["B"]}}
    group = stage_one(AllReduceConfig(batch=BATCH), claims, given)
    group.run_to(3)
    ledger = group.head("A").ledger
    assert (ledger.cursor, ledger.returned, ledger.lost) == (3 * BATCH, (), 0) and not group.accusations()


def test_of_two_that_have_counted_one_the_one_with_the_receipt_is_merged() -> None:
    claims = {"A": ((0, 8),), "B": ((4, 24),)}
    group = stage_one(DilocoConfig(steps=8), claims, {"A": {"P": ((0, 8),)}, "B": {"Q": ((8, 24),)}})
    group.run_to(1)
    assert group.head("A").ledger.is_free([(8, 24)]) and not group.head("A").ledger.is_free([(0, 8)])


def test_a_receipt_counts_for_one_peer_and_round() -> None:
    group = stage_one(DilocoConfig(steps=8), {"A": ((0, 8),), "B": ((8, 16),)}, {})
    group.run_to(1)
    head, work = group.head("A"), group.work
    plan = work.plan(head, 0, {group.member("A"): Measurements(1.0), group.member("B"): Measurements(1.0)}, ())
    samples = ((BATCH, BATCH + 8),)
    body = Contribution(
        plan.head, plan.hash, group.member("A"), 1, 8, 1.0, (b"h" * 32,) * 4, (1.0,) * 4, counted=samples
    )

    def signed(signer: str, **changes: Any) -> Signed:
        receipt = msgspec.structs.replace(ReceiptBody(head.hash, "A", samples), **changes)
        return group.sign(signer, RECEIPT_KIND, receipt)

    def check(*receipts: Signed) -> None:
        work.check_contribution(msgspec.structs.replace(body, receipts=receipts), plan, head)

    check(signed("P"), signed("Q"))
    for receipts, why in (
        ((signed("P", head=b"h" * 32),), "another round or peer"),
        ((signed("P", peer="B"),), "another round or peer"),
        ((signed("P"), signed("P", ranges=())), "two receipts"),
        ((signed("A"),), "one of its own"),
        ((Signed(signed("P").body, "R", b""),), "."),
    ):
        with pytest.raises(ProtocolViolation, match=why):
            check(*receipts)
