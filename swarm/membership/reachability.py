"""Dial-back: whether others can dial this machine (AutoNAT). The answering peer tries the caller's TCP ports at the
address that it sees the caller at.

The caller names ports only, no address, so no peer can be made to dial a third party.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec
import trio

from peer.bounds import Latest
from peer.errors import BarnraiseError, ProtocolViolation
from peer.net.address_book import closed_range
from peer.net.host import Host
from peer.net.rpc import Call, Method

LOOK_S: Final = 60.0
LOOK_AGAIN_S: Final = 5.0  # while nothing is known, or the peer cannot be dialled
ASKED_MAX: Final = 3

Outcome = Literal["open", "refused", "timeout", "unreachable"]
PORTS_MAX: Final = 4
CONNECT_S: Final = 4.0
ASK_EVERY_S: Final = 2.0  # one peer may ask this often
ASKERS_MAX: Final = 1024

Port = Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]


class DialBackRequest(msgspec.Struct, frozen=True):
    """A request to connect to these TCP ports of the sender."""

    ports: Annotated[tuple[Port, ...], msgspec.Meta(max_length=PORTS_MAX)]


class DialBackReply(msgspec.Struct, frozen=True):
    """The result for each port."""

    seen_at: Annotated[str, msgspec.Meta(max_length=64)]
    """The caller's IP address as the answerer sees it, empty if they are connected through a relay."""
    outcomes: Annotated[tuple[tuple[Port, Outcome], ...], msgspec.Meta(max_length=PORTS_MAX)]
    """(port, outcome)."""


DIAL_BACK: Final = Method("net.dial_back", DialBackRequest, DialBackReply, access="client")


def serve_dial_back(host: Host) -> None:
    """Answer peers that ask whether they can be dialled."""
    asked = Latest[str, float](ASKERS_MAX)

    async def answer(call: Call[DialBackRequest]) -> DialBackReply:
        now = trio.current_time()
        if now - asked.get(call.peer, -ASK_EVERY_S) < ASK_EVERY_S:
            raise ProtocolViolation(f"ask again in {ASK_EVERY_S:.0f} seconds")
        asked[call.peer] = now
        ip = host.remote_ip(call.peer)
        if ip is None:
            return DialBackReply("", ())
        outcomes: dict[int, Outcome] = {}
        async with trio.open_nursery() as nursery:
            for port in set(call.body.ports):
                nursery.start_soon(_try, ip, port, outcomes)
        return DialBackReply(ip, tuple(sorted(outcomes.items())))

    host.rpc.register(DIAL_BACK, answer)


class DialWatch:
    """Finds out again and again whether other peers can dial this one. If not it becomes a client
    (`Traversal.set_client`): it announces no address of its own, dials the others, and merges nothing."""

    def __init__(self, host: Host, always: bool = False) -> None:
        """`always`: it is a client in any case, as its owner wants."""
        self._host, self._always = host, always

    async def run(self) -> None:
        """Look until cancelled."""
        if self._always:
            self._host.traversal.set_client(True)
            return
        while True:
            open_to = await self.is_open()
            if open_to is not None:
                self._host.traversal.set_client(not open_to)
            await trio.sleep(LOOK_S if open_to else LOOK_AGAIN_S)

    async def is_open(self) -> bool | None:
        """Ask some members to dial this peer. Return whether one of them could; None if too few have tried: two, where
        two are connected. Strangers and clients are not asked: their keys cost nothing, and they could make any peer a
        client. Nor are members of the same home, where two others are connected: they pass no router. One other may be
        the coordinator, which merges nothing: members that are all in one home need none but each other."""
        ports = tcp_ports(self._host.listening())
        members, tried = sorted(filter(self._host.admissions.is_anchor, self._host.connected)), 0
        far = [peer for peer in members if not self._is_near(peer)]
        members = far if len(far) > 1 else members
        for peer in random.sample(members, min(ASKED_MAX, len(members))):
            try:
                reply = await self._host.rpc.call(peer, DIAL_BACK, DialBackRequest(ports), timeout_s=2 * CONNECT_S)
            except BarnraiseError:
                continue
            outcomes = [outcome for port, outcome in reply.body.outcomes if port in ports]
            if "open" in outcomes:
                return True
            tried += bool(outcomes)
        return False if tried >= max(1, min(2, len(members))) else None

    def _is_near(self, peer: str) -> bool:
        ip = self._host.remote_ip(peer)
        return ip is not None and closed_range(ip) is not None


def tcp_ports(addresses: Iterable[str]) -> tuple[int, ...]:
    """Return the TCP ports of multiaddrs, as many as may be asked about."""
    found = (int(parts[parts.index("tcp") + 1]) for address in addresses if "tcp" in (parts := address.split("/")))
    return tuple(dict.fromkeys(found))[:PORTS_MAX]


async def _try(ip: str, port: int, outcomes: dict[int, Outcome]) -> None:
    outcomes[port] = "timeout"
    family = trio.socket.AF_INET6 if ":" in ip else trio.socket.AF_INET
    with trio.socket.socket(family, trio.socket.SOCK_STREAM) as sock, trio.move_on_after(CONNECT_S):
        try:
            await sock.connect((ip, port))
        except ConnectionRefusedError:
            outcomes[port] = "refused"
        except OSError:
            outcomes[port] = "unreachable"
        else:
            outcomes[port] = "open"
