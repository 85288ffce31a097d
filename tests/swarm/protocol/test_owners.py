"""Owners follow the shares of a plan, what members have measured of each other, and the word of clients."""

from __future__ import annotations

import dataclasses
from collections import Counter

import msgspec
import pytest

from peer.errors import ProtocolViolation
from swarm.protocol.agreement.messages import Measurements
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.rules.electorate import owners_of
from swarm.protocol.shares import CODE_MAX, code_of
from tests.swarm.protocol.agreement.group import WORK
from tests.swarm.protocol.agreement.test_electorate import Scene, head_of, members

BY_LINK = dataclasses.replace(
    WORK, schedule=dataclasses.replace(WORK.schedule, by_link=True), bytes_of=lambda head: (25e6, 25e6)
)


def test_owners_follow_the_shares_of_a_plan() -> None:
    """Whoever leads, none gets more than four equal shares, nor than half."""
    contributors = members("ABCDE")
    for name in (bytes([i]) * 32 for i in range(20)):
        counts = Counter(owners_of(name, contributors, 64, (255, 255, 0, 128, 1)))
        assert [counts[member] for member in contributors] == pytest.approx([25.5, 25.5, 0, 13, 0], abs=0.5)
        greedy = Counter(owners_of(name, contributors, 64, (255, 0, 0, 0, 1)))
        assert [greedy[member] for member in contributors] == [32, 0, 0, 0, 32]
        assert owners_of(name, contributors, 64, (9,) * 5) == owners_of(name, contributors, 64)


@pytest.mark.parametrize("clients", ["", "A", "AB", "ABC"])
def test_a_client_owns_nothing_as_long_as_another_can(clients: str) -> None:
    """By its own signed word in the roster. What it contributes is merged."""
    opened = Scene(head_of("ABC"), BY_LINK).roster("ABC", clients=clients)
    assert {owner.peer for owner in opened.owners} == (set("ABC") - set(clients) or set("ABC"))
    assert len(opened.merged) == 3
    with pytest.raises(ProtocolViolation, match="client"):
        Scene(head_of("ABC")).roster("ABC", clients="A")


def test_owners_follow_what_members_have_measured_of_each_other() -> None:
    """The others' medians count, not what a member says of itself; in a run without the feature, nothing does."""
    fast, slow = code_of(12.5e6), code_of(2.5e6)
    honest = Measurements(1.0, bytes((fast, 0)) * 4 + bytes((slow, slow)))
    claim = Measurements(1.0, bytes((1, 1)) * 4 + bytes((CODE_MAX, 0)))
    told = {**dict.fromkeys("ABCD", honest), "E": claim}
    owners = Counter(owner.peer for owner in Scene(head_of("ABCDE"), BY_LINK).roster("ABCDE", told=told).owners)
    assert set(owners) == set("ABCD") and set(owners.values()) == {1}
    plain = Scene(head_of("ABCDE"))
    assert plain.roster("ABCDE", told=told).owners == plain.roster("ABCDE").owners
    with pytest.raises(ProtocolViolation, match="shares"):
        plan = msgspec.structs.replace(plain.roster("ABCDE").plan, shares=(1,) * 5)
        WORK.check_plan(plan, plain.head)
    short = msgspec.structs.replace(plain.roster("ABCDE").plan, shares=(1,) * 4)
    with pytest.raises(ProtocolViolation, match="shares"):
        BY_LINK.check_plan(short, plain.head)


def test_members_with_slow_links_are_planned_for_though_they_come_late() -> None:
    """They were left out of each plan, since others had the result before them: for ever, where nothing is waited for
    but the exchange."""
    fast, slow = code_of(12.5e6), code_of(2.5e6)
    told = {m: Measurements(1.0, bytes((fast, 0)) * 4 + bytes((slow, 0))) for m in members("ABCD")}
    assert BY_LINK.later(head_of("ABCDE"), told, 0.25) == list(members("E"))
    assert BY_LINK.later(head_of("ABCDE"), told, 9.0) == [] == WORK.later(head_of("ABCDE"), told, 0.25)
    assert BY_LINK.later(head_of("ABCDE"), dict.fromkeys(members("ABCD"), Measurements()), 0.25) == []


def test_a_run_without_shares_encodes_plans_and_contributions_as_before() -> None:
    opened = Scene(head_of("ABC")).roster("ABC")
    assert b"shares" not in opened.signed_plan.body
    assert all(b"client" not in encode(body) for body in opened.contributions)
