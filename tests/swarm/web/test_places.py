"""Which connections of a web server give way to newcomers."""

from __future__ import annotations

import pytest

from swarm.web import places as places_module
from swarm.web.places import CONNECTIONS_MAX, STRANGERS_MAX, ClientPlace, ClientPlaces, keep_place, let_in

HERE = "127.0.0.1"


class Opened:
    """ClientPlaces, and the numbers of those that gave way."""

    def __init__(self) -> None:
        self.places, self.gone, self._count = ClientPlaces(), list[int](), 0

    def take(self, ip: str = HERE) -> ClientPlace | None:
        number = self._count
        self._count += 1
        return self.places.take(ip, lambda: self.gone.append(number))

    def taken(self, ip: str = HERE) -> ClientPlace:
        place = self.take(ip)
        assert place is not None
        return place


def request(place: ClientPlace) -> dict[str, object]:
    """Return the scope of a request on that connection."""
    return {"type": "http", "state": dict(place.state)}


def test_the_longest_silent_one_gives_way() -> None:
    opened = Opened()
    taken = [opened.taken() for _ in range(CONNECTIONS_MAX)]
    opened.places.rest(taken[0])
    opened.places.leave(taken[1])
    opened.taken()
    assert opened.gone == []
    opened.taken()
    opened.taken()
    assert opened.gone == [2, 3] and len(opened.places) == CONNECTIONS_MAX


def test_a_known_client_gives_way_last_and_one_that_is_answered_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "CONNECTIONS_MAX", 3)
    opened = Opened()
    answered, known, silent = opened.taken(), opened.taken(), opened.taken()
    keep_place(request(answered))
    let_in(request(known))
    keep_place(request(opened.taken()))
    assert opened.gone == [2], "the silent one"
    keep_place(request(opened.taken()))
    assert opened.gone == [2, 1], "the one that rests"
    assert opened.take() is None and opened.gone == [2, 1], "all are being answered"
    opened.places.rest(answered)
    opened.taken()
    assert opened.gone == [2, 1, 0]
    opened.places.rest(silent)  # it is gone, and stays so
    assert len(opened.places) == 3


@pytest.mark.parametrize(
    ("ours", "same", "other"),
    [
        ("192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2"),
        ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"),
        ("fe80::1%eth0", "fe80::2%eth1", "fe81::1"),
    ],
)
def test_strangers_of_one_address(ours: str, same: str, other: str) -> None:
    opened = Opened()
    let_in(request(opened.taken(ours)))
    for _ in range(STRANGERS_MAX):
        opened.taken(ours)
    opened.taken(other)
    assert opened.gone == []
    opened.taken(same)
    opened.taken(ours)
    assert opened.gone == [1, 2], "the oldest of that address, but not the known one"


@pytest.mark.parametrize("ip", [HERE, "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_this_machine_has_no_such_limit(ip: str) -> None:
    opened = Opened()
    for _ in range(2 * STRANGERS_MAX):
        opened.taken(ip)
    assert opened.gone == []
