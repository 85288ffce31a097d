"""A port of this machine, opened on its router by UPnP for as long as the host runs.

The library blocks, so it works in threads, each with a limit of time; the host starts without waiting. All that it
raises is `Exception` itself, so nothing narrower can be caught. The router forgets the port when its lease, which is
renewed, lapses, and is asked to at the end. A router that is itself behind NAT, or whose port another machine has,
opens no port that others could dial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Final

import miniupnpc
import trio

from peer.catalogue.machine import PortMapped, PortNotMapped
from peer.errors import NetworkError
from peer.events import EventLog

SEARCH_MS: Final = 2000
LIMIT_S: Final = 15.0
CLOSE_S: Final = 2.0
LEASE_S: Final = 3600
_NAME: Final = "barnraise"


def port_to_map(addresses: Iterable[str]) -> int | None:
    """Return the port of the first address in a router's private network; None if there is none."""
    for address in addresses:
        _, kind, host, _, port = address.split("/")[:5]
        if kind == "ip4" and ip_address(host).is_private and not ip_address(host).is_loopback:
            return int(port)
    return None


async def keep_mapped(port: int, events: EventLog, opened: Callable[[str], None], router: Any = None) -> None:
    """Keep the TCP port open until cancelled; `opened` gets the address at which others dial it. Returns at once if the
    router does not open it. Events: port_mapped, port_not_mapped. `router`: what `miniupnpc.UPnP()` makes."""
    router = miniupnpc.UPnP() if router is None else router
    try:
        address = await _in_thread(_open, router, port, limit_s=LIMIT_S)
    except NetworkError as error:
        events.emit(PortNotMapped(port=port, reason=str(error)))
        return
    events.emit(PortMapped(port=port, address=address))
    opened(address)
    try:
        while True:
            await trio.sleep(LEASE_S / 2)
            try:
                await _in_thread(_forward, router, port, limit_s=LIMIT_S)
            except NetworkError as error:
                events.emit(PortNotMapped(port=port, reason=str(error)))
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_S):
            await trio.to_thread.run_sync(_close, router, port, abandon_on_cancel=True)  # type: ignore[call-arg]


async def _in_thread(work: Callable[[Any, int], str], router: Any, port: int, *, limit_s: float) -> str:
    """Raises NetworkError, also where the router takes too long. A port that it then opens ends with its lease."""
    with trio.move_on_after(limit_s):
        return await trio.to_thread.run_sync(work, router, port, abandon_on_cancel=True)  # type: ignore[call-arg]
    raise NetworkError(f"the router did not answer within {limit_s:.0f} s: forward the port by hand")


def _open(router: Any, port: int) -> str:
    router.discoverdelay = SEARCH_MS
    with suppress(Exception):  # it raises "Success" where it has found some
        router.discover()
    try:
        router.selectigd()
        outside = str(router.externalipaddress())
    except Exception as error:  # the library's, see above
        raise NetworkError("no router here opens ports by UPnP: turn it on there, or forward the port") from error
    if not _is_public(outside):
        raise NetworkError(f"the router's own address {outside[:64]} is behind NAT: ask the provider for a public one")
    _forward(router, port)
    return f"/ip4/{outside}/tcp/{port}"


def _forward(router: Any, port: int) -> str:
    """Have the router forward the port; if it supports no leases, until the mapping is removed."""
    refusal: Exception | None = None
    for lease_s in (LEASE_S, 0):
        try:
            if router.addportmapping(port, "TCP", router.lanaddr, port, _NAME, "", lease_s):
                return ""
        except Exception as error:  # noqa: BLE001 - the library's, see above
            refusal = error
    raise NetworkError(f"the router does not open port {port} ({str(refusal)[:64]}): choose another with --listen")


def _close(router: Any, port: int) -> None:
    with suppress(Exception):  # it is gone already, or ends with its lease
        router.deleteportmapping(port, "TCP")


def _is_public(address: str) -> bool:
    try:
        return ip_address(address).is_global
    except ValueError:
        return False
