"""The caps of a relay: by peer, by address prefix and in all."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest
from libp2p.peer.id import ID

from peer.net.relay.ledger import Full, RelayLedger, RelayLimits

A, B, C, D = (ID(name) for name in (b"a", b"b", b"c", b"d"))
HERE, THERE = "192.0.2.0/24", "198.51.100.0/24"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_reservations_have_caps_by_prefix_and_in_all() -> None:
    ledger = RelayLedger(RelayLimits(reservations=3, reservations_per_prefix=2), Clock())
    ledger.reserve(A, HERE)
    ledger.reserve(B, HERE)
    with pytest.raises(Full):
        ledger.reserve(C, HERE)
    ledger.reserve(C, THERE)
    with pytest.raises(Full):
        ledger.reserve(D, THERE)
    ledger.reserve(A, HERE)  # renewed
    with pytest.raises(Full):
        ledger.reserve(C, HERE)  # moved into a full prefix: it keeps the place that it has
    assert ledger.reservations == 3 and all(map(ledger.holds, (A, B, C))) and not ledger.holds(D)
    ledger.forget(B)
    ledger.reserve(D, HERE)
    assert ledger.holds(D) and not ledger.holds(B)


def test_a_reservation_ends_unless_it_is_renewed() -> None:
    clock = Clock()
    ledger = RelayLedger(RelayLimits(reservations=2, reservation_s=100), clock)
    ledger.reserve(A, HERE)
    ledger.reserve(B, HERE)
    clock.now = 60.0
    ledger.reserve(A, HERE)
    clock.now = 100.0
    assert ledger.holds(A) and not ledger.holds(B) and ledger.reservations == 1
    clock.now = 160.0
    assert not ledger.holds(A)
    ledger.reserve(C, THERE)
    assert ledger.reservations == 1


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        (RelayLimits(circuits=4), (D, HERE, D)),
        (RelayLimits(circuits_per_peer=2), (A, THERE, D)),
        (RelayLimits(circuits_per_peer=2), (D, THERE, C)),
    ],
    ids=["prefix", "caller", "called"],
)
def test_circuits_have_caps(limits: RelayLimits, refused: tuple[ID, str, ID]) -> None:
    ledger = RelayLedger(limits, Clock())
    with ExitStack() as two:
        two.enter_context(ledger.circuit(A, HERE, B if limits.circuits_per_peer == 2 and refused[0] == A else C))
        two.enter_context(ledger.circuit(A if refused[0] == A else B, HERE, C))
        with pytest.raises(Full), ledger.circuit(*refused):
            pass
        assert ledger.circuits == 2
    assert ledger.circuits == 0
    with ledger.circuit(*refused):
        assert ledger.circuits == 1


def test_a_few_prefixes_never_have_all_circuits() -> None:
    """Two once did: each may have had a half."""
    ledger = RelayLedger(RelayLimits(circuits=16, circuits_per_peer=100), Clock())
    with ExitStack() as all_of_them:

        def opened(prefix: str) -> int:
            count = 0
            with suppress(Full):
                while True:
                    all_of_them.enter_context(ledger.circuit(A, prefix, C))
                    count += 1
            return count

        assert [opened(prefix) for prefix in ("a", "b", "c", "d", "e")] == [8, 4, 2, 1, 1]
        assert ledger.circuits == 16
        with pytest.raises(Full), ledger.circuit(D, "f", D):
            pass
