"""Peers of a run on one network: they find each other, and others there can make them do little."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.lan import discovery, responder
from peer.net.lan.announcement import instance_name
from peer.net.lan.discovery import PEERS_MAX, Lan, on_lan
from peer.net.lan.responder import MulticastResponder
from peer.net.strangers.claims import FAILURES_MAX

RUN = "r" * 32
OWN = ("127.0.0.1",)
Told = list[tuple[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_PACE_S", 0.0)
    monkeypatch.setattr(discovery, "_LOOK_S", 0.02)


@asynccontextmanager
async def host_on(lan: Lan | None, told: Told | None = None) -> AsyncIterator[Host]:
    events = EventLog(watch=lambda event: None if told is None else told.append((event.name, dict(event.fields))))
    async with open_host(identity=Identity.generate(), events=events) as host, on_lan(lan, host):
        yield host


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not condition():
            await trio.sleep(0.01)


@asynccontextmanager
async def meeting(lan: Lan, host: Host, resolve: Callable[[str], tuple[list[str], int]]) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lan.meet, host, OWN, resolve)
        yield
        nursery.cancel_scope.cancel()


def port_of(host: Host) -> int:
    return int(host.addresses[0].split("/")[4])


async def test_peers_of_a_run_find_each_other_and_no_others() -> None:
    """With real multicast on loopback."""
    lans, told = [Lan(RUN), Lan(RUN), Lan("s" * 32)], Told()
    async with host_on(lans[0], told) as a, host_on(lans[1]) as b, host_on(lans[2]) as other:
        with trio.fail_after(30):
            assert await lans[0].met.receive() == b.peer_id and await lans[1].met.receive() == a.peer_id
        assert lans[0].found() == (b.peer_id,) and not other.connected
        assert a.book.vouched(b.peer_id) or b.book.vouched(a.peer_id)
        name = instance_name(RUN, a.peer_id)
        assert [event for event, _ in told if event.startswith("lan_")] == ["lan_announced", "lan_met"]
        looker = MulticastResponder(instance_name("t" * 32, a.peer_id), OWN, 1)
        await trio.to_thread.run_sync(looker.open, lambda name: None)
        assert await trio.to_thread.run_sync(looker.resolve, name) == (["127.0.0.1"], port_of(a))
        await trio.to_thread.run_sync(looker.close)
    later = MulticastResponder(instance_name("t" * 32, Identity.generate().peer_id), OWN, 1)
    await trio.to_thread.run_sync(later.open, lambda name: None)
    assert await trio.to_thread.run_sync(later.resolve, name) == ([], 0), "it was taken back"
    await trio.to_thread.run_sync(later.close)
    assert await trio.to_thread.run_sync(later.resolve, name) == ([], 0), "nor does a closed one fail"


async def test_a_machine_that_lies_about_addresses_has_few_dialled() -> None:
    """It knows the run's id, and says that many peers are at machines here that have nothing to do with it."""
    lan, connects = Lan(RUN), list[str]()
    places: dict[str, Sequence[str]] = {}

    async def victim(stream: trio.SocketStream) -> None:
        connects.append(stream.socket.getsockname()[0])
        await stream.aclose()

    async with host_on(None) as host, trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="0.0.0.0")
        port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, victim, [listener])
        for number in range(PEERS_MAX):
            name = instance_name(RUN, Identity.generate().peer_id)
            places[name] = ["127.0.0.99"] if number < PEERS_MAX // 2 else [f"127.0.1.{number}", f"127.0.2.{number}"]
            lan.note(name)
        asked = list[str]()

        def resolve(name: str) -> tuple[list[str], int]:
            asked.append(name)
            return list(places[name]), port

        async with meeting(lan, host, resolve):
            await until(lambda: len(asked) == PEERS_MAX)
            await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    assert connects.count("127.0.0.99") == 1 and len(connects) <= FAILURES_MAX + 1
    assert len(set(connects)) == len(connects) and len(asked) == len(set(asked)), "each name is asked for once a while"


async def test_an_address_is_not_believed_of_a_peer_that_is_connected() -> None:
    lan, asked = Lan(RUN), list[str]()

    def resolve(name: str) -> tuple[list[str], int]:
        asked.append(name)
        return ["127.0.0.1"], 1

    async with host_on(None) as a, host_on(None) as b:
        await b.connect_address(a.addresses[0], timeout_s=10)
        lan.note(instance_name(RUN, b.peer_id))
        async with meeting(lan, a, resolve):
            with trio.fail_after(30):
                assert await lan.met.receive() == b.peer_id, "who dials us is told of, too"
            assert lan.found() == (b.peer_id,) and not asked
            assert "/ip4/127.0.0.1/tcp/1" not in a.book.get(b.peer_id)
            await b.disconnect(a.peer_id)
            await until(lambda: not lan.found())


async def test_as_many_names_as_there_may_be_are_remembered() -> None:
    lan, resolved = Lan(RUN), list[str]()
    for _ in range(PEERS_MAX):
        lan.note(instance_name("s" * 32, Identity.generate().peer_id))
    names = [instance_name(RUN, Identity.generate().peer_id) for _ in range(2 * PEERS_MAX)]
    for name in names:
        lan.note(name)
        lan.note(names[0])  # heard of again and again

    def resolve(name: str) -> tuple[list[str], int]:
        resolved.append(name)
        return [], 0

    async with host_on(None) as host, meeting(lan, host, resolve):
        await until(lambda: len(resolved) == PEERS_MAX)
        await trio.sleep(0.1)
    assert set(resolved) == {names[0], *names[-PEERS_MAX + 1 :]}


async def test_what_prevents_it_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(**options: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(responder, "Zeroconf", taken)
    told = Told()
    async with host_on(Lan(RUN), told):
        await until(lambda: bool(told))
        await trio.sleep(0.05)
    ((event, fields),) = told
    assert event == "lan_unusable" and "Address already in use" in fields["reason"] and "5353" in fields["reason"]
    told.clear()
    async with host_on(None, told) as host:
        monkeypatch.setattr(host, "listening", lambda: ["/ip4/8.8.8.8/tcp/1"])
        await Lan(RUN).run(host)
    assert [event for event, _ in told] == ["lan_unusable"] and "no address" in told[0][1]["reason"]


async def test_a_library_that_hangs_holds_up_nothing_and_announces_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, closed = threading.Event(), threading.Event()

    class Hanging:
        def __init__(self, **options: object) -> None:
            goes_on.wait(60)
            made.append(self)

        def close(self) -> None:
            closed.set()

        def register_service(self, *service: object, **options: object) -> None: ...

    made: list[Hanging] = []
    monkeypatch.setattr(responder, "Zeroconf", Hanging)
    monkeypatch.setattr(responder, "ServiceBrowser", lambda *parts, **options: None)
    monkeypatch.setattr(discovery, "OPEN_S", 0.05)
    monkeypatch.setattr(discovery, "CLOSE_S", 0.05)
    told = Told()
    async with host_on(Lan(RUN), told):
        await until(lambda: bool(told))
    assert "did not answer within" in told[0][1]["reason"]
    goes_on.set()  # else its thread outlives the test
    assert await trio.to_thread.run_sync(closed.wait, 30)


async def test_an_error_inside_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with host_on(Lan(RUN)):
            raise KeyError("ours")
