"""Allowances of strangers: few calls and connections a second, none for peers that are admitted or trusted."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from libp2p.peer.id import ID

from peer.identity import Identity
from peer.net.admissions import Admissions
from peer.net.strangers.allowances import (
    GROUP_CALLS,
    GROUP_CONNECTIONS,
    KEYS_MAX,
    PEER_CALLS,
    Allowance,
    Allowances,
)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Remote:
    """The other end of a connection."""

    peer_id: ID
    ip: str | None = "203.0.113.7"

    def get_remote_address(self) -> tuple[str, int] | None:
        return None if self.ip is None else (self.ip, 4001)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admissions() -> Admissions:
    admissions = Admissions()
    admissions.guard()
    return admissions


def a_peer(ip: str | None = "203.0.113.7") -> Remote:
    return Remote(ID.from_base58(Identity.generate().peer_id), ip)


def calls(allowances: Allowances, remote: Remote, tried: int = 1000) -> int:
    """How many of some calls at once are allowed."""
    return sum(allowances.take_call(remote) for _ in range(tried))


def test_a_stranger_may_call_a_few_times_at_once_and_slowly_after_that(admissions: Admissions, clock: Clock) -> None:
    allowances, stranger = Allowances(admissions, clock), a_peer()
    burst, per_s = PEER_CALLS
    assert calls(allowances, stranger) == burst
    clock.now += 2
    assert calls(allowances, stranger) == 2 * per_s
    clock.now += 3600
    assert calls(allowances, stranger) == burst
    assert calls(allowances, a_peer()) == burst


def test_a_newcomer_comes_before_strangers_of_its_network_that_call_without_pause(
    admissions: Admissions, clock: Clock
) -> None:
    allowances, strangers = Allowances(admissions, clock), [a_peer() for _ in range(5)]
    for stranger in strangers:  # what they have at once is soon spent
        calls(allowances, stranger)
    clock.now += 1
    refused = 0
    for _ in range(100):
        clock.now += 0.5
        for stranger in strangers:
            calls(allowances, stranger, 10)
        newcomer = a_peer()
        refused += 3 - calls(allowances, newcomer, 3)  # as many as one that enters the run makes at once
    assert refused == 0


def test_new_identities_of_one_network_share_its_allowance(admissions: Admissions, clock: Clock) -> None:
    allowances = Allowances(admissions, clock)
    burst, per_s = GROUP_CALLS
    assert sum(calls(allowances, a_peer(f"203.0.113.{number}"), 10) for number in range(100)) == burst
    clock.now += 1
    assert sum(calls(allowances, a_peer(), 10) for _ in range(100)) == per_s
    assert calls(allowances, a_peer("198.51.100.7"), 10) == 10
    assert calls(allowances, a_peer(None), 10) == 10


def test_who_is_refused_for_itself_takes_nothing_from_its_network(admissions: Admissions, clock: Clock) -> None:
    allowances = Allowances(admissions, clock)
    calls(allowances, a_peer())
    assert sum(calls(allowances, a_peer(), 10) for _ in range(100)) == GROUP_CALLS[0] - PEER_CALLS[0]


def test_admitted_and_trusted_peers_call_beside_a_flood_from_their_network(
    admissions: Admissions, clock: Clock
) -> None:
    allowances = Allowances(admissions, clock)
    admitted, trusted = a_peer(), a_peer()
    admissions.grant(str(admitted.peer_id), "client", trusted=False)
    admissions.trust("head", [str(trusted.peer_id)])
    for _ in range(100):
        calls(allowances, a_peer(), 10)
    assert calls(allowances, admitted) == calls(allowances, trusted) == 1000
    admissions.bar([str(admitted.peer_id)])
    assert calls(allowances, admitted) == 0


def test_connections_are_counted_by_network(admissions: Admissions, clock: Clock) -> None:
    allowances = Allowances(admissions, clock)
    burst, per_s = GROUP_CONNECTIONS
    assert sum(allowances.take_connection("a") for _ in range(1000)) == burst
    assert allowances.take_connection("b")
    clock.now += 10
    assert sum(allowances.take_connection("a") for _ in range(1000)) == min(burst, 10 * per_s)


def test_a_host_of_no_run_has_no_limits(clock: Clock) -> None:
    allowances = Allowances(Admissions(), clock)
    assert calls(allowances, a_peer()) == 1000
    assert all(allowances.take_connection("a") for _ in range(1000))


def test_the_key_unseen_the_longest_is_forgotten(clock: Clock) -> None:
    allowance = Allowance(1, 0.001, clock)
    assert allowance.take("first") and not allowance.take("first")
    for number in range(KEYS_MAX - 1):
        assert allowance.take(f"{number}")
    assert len(allowance) == KEYS_MAX
    assert not allowance.take("first")
    assert allowance.take("one more")
    assert len(allowance) == KEYS_MAX
    assert not allowance.take("first")
    assert allowance.take("0")
