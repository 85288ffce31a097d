"""Dial-back: whether others can dial this machine (AutoNAT). The answering peer tries the caller's TCP ports at the
address that it sees the caller at.

The caller names ports only, no address, so no peer can be made to dial a third party.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Final, Literal

import msgspec
import trio

from peer.errors import ProtocolViolation
from peer.net.host import Host
from peer.net.rpc import Call, Method

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
    """What came of each port."""

    seen_at: Annotated[str, msgspec.Meta(max_length=64)]
    """The caller's IP address as the answerer sees it, empty if they are connected through a relay."""
    outcomes: Annotated[tuple[tuple[Port, Outcome], ...], msgspec.Meta(max_length=PORTS_MAX)]
    """(port, outcome)."""


DIAL_BACK: Final = Method("net.dial_back", DialBackRequest, DialBackReply, access="client")


def serve_dial_back(host: Host) -> None:
    """Answer peers that ask whether they can be dialled."""
    asked: OrderedDict[str, float] = OrderedDict()

    async def answer(call: Call[DialBackRequest]) -> DialBackReply:
        now = trio.current_time()
        if now - asked.get(call.peer, -ASK_EVERY_S) < ASK_EVERY_S:
            raise ProtocolViolation(f"ask again in {ASK_EVERY_S:.0f} seconds")
        asked[call.peer] = now
        asked.move_to_end(call.peer)
        while len(asked) > ASKERS_MAX:
            asked.popitem(last=False)
        ip = host.remote_ip(call.peer)
        if ip is None:
            return DialBackReply("", ())
        outcomes: dict[int, Outcome] = {}
        async with trio.open_nursery() as nursery:
            for port in set(call.body.ports):
                nursery.start_soon(_try, ip, port, outcomes)
        return DialBackReply(ip, tuple(sorted(outcomes.items())))

    host.rpc.register(DIAL_BACK, answer)


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
