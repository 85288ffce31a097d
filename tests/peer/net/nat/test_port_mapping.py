"""A port opened on the router by UPnP, at a router on loopback that the real client talks to."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import miniupnpc
import pytest
import trio

from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import open_host
from peer.net.nat import port_mapping
from peer.net.nat.port_mapping import keep_mapped, port_to_map
from peer.net.reach import LOCAL
from tests.peer.net.nat.upnp_router import UpnpRouter, serving

Told = list[tuple[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "SEARCH_MS", 200)


def events_into(told: Told) -> EventLog:
    return EventLog(watch=lambda event: told.append((event.name, dict(event.fields))))


@pytest.mark.parametrize("leases", [True, False])
async def test_the_port_is_open_for_as_long_as_the_host_runs(leases: bool) -> None:
    router, told, opened = UpnpRouter(leases=leases), Told(), trio.Event()
    addresses: list[str] = []

    def found(address: str) -> None:
        addresses.append(address)
        opened.set()

    with serving(router):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_mapped, 4001, events_into(told), found, miniupnpc.UPnP("127.0.0.1"))
            with trio.fail_after(10):
                await opened.wait()
            assert addresses == ["/ip4/8.8.4.4/tcp/4001"]
            assert router.mapped == {4001: (4001, port_mapping.LEASE_S if leases else 0)}
            nursery.cancel_scope.cancel()
        assert router.mapped == {}
    assert [event for event, _ in told] == ["port_mapped"]


@pytest.mark.parametrize(
    ("router", "reason"),
    [
        (UpnpRouter(outside="100.64.0.9"), "is behind NAT"),
        (UpnpRouter(opens=False), "does not open port 4001"),
        (None, "no router here opens ports"),
    ],
)
async def test_a_router_that_opens_nothing_is_told(router: UpnpRouter | None, reason: str) -> None:
    told, client = Told(), miniupnpc.UPnP("127.0.0.1")
    with trio.fail_after(20):
        if router is None:
            await keep_mapped(4001, events_into(told), pytest.fail, client)
        else:
            with serving(router):
                await keep_mapped(4001, events_into(told), pytest.fail, client)
            assert router.mapped == {}
    ((event, fields),) = told
    assert event == "port_not_mapped" and reason in fields["reason"]


async def test_a_router_that_hangs_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    class Hanging:
        lanaddr = ""

        def discover(self) -> None:
            answers.wait(60)

    monkeypatch.setattr(port_mapping, "LIMIT_S", 0.05)
    told = Told()
    await keep_mapped(4001, events_into(told), pytest.fail, Hanging())
    answers.set()  # else its thread outlives the test
    assert "did not answer within" in told[0][1]["reason"]


async def test_a_host_announces_where_the_router_leads_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    router, on_loopback = UpnpRouter(), miniupnpc.UPnP
    monkeypatch.setattr("peer.net.nat.port_mapping.miniupnpc.UPnP", lambda: on_loopback("127.0.0.1"))
    monkeypatch.setattr("peer.net.host.port_to_map", lambda addresses: int(addresses[0].split("/")[4]))
    config = open_host(identity=Identity.generate(), events=EventLog(), reach=replace(LOCAL, map_port=True))
    with serving(router), trio.fail_after(20):
        async with config as host:
            (listening,) = host.addresses
            while len(host.addresses) < 2:
                await trio.sleep(0.02)
            port = int(listening.split("/")[4])
            assert host.addresses == (f"/ip4/8.8.4.4/tcp/{port}/p2p/{host.peer_id}", listening)
            assert list(router.mapped) == [port]
        assert router.mapped == {}


def test_only_a_port_behind_a_router_is_mapped() -> None:
    assert port_to_map(["/ip4/127.0.0.1/tcp/1"]) is None and port_to_map([]) is None
    assert port_to_map(["/ip4/8.8.8.8/tcp/1", "/ip6/fd00::1/tcp/2"]) is None
    assert port_to_map(["/ip4/127.0.0.1/tcp/1", "/ip4/192.168.1.4/tcp/4001"]) == 4001
