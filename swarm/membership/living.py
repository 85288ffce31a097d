"""The members that an invite names beside the peer that prints it, so that the invite works while that one is away.

The reader of an invite trusts the peers in it as the members of the last head. So only such members are named
and, where there are no heads, those that have proved a scarce credential; where nothing is scarce, none. A member's
address is its own word: it is named only if something answers there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import trio
from multiaddr import Multiaddr

from peer.errors import ResourceError
from peer.net.address_book import is_circuit
from peer.net.host import Host
from swarm.membership.membership import PeerRecord
from swarm.run.home import Home
from swarm.run.invite import reach_of

NAMED_MAX: Final = 2  # each makes an invite longer by about 57 letters
LOOK_EVERY_S: Final = 60.0
FIRST_LOOK_S: Final = 10.0
CONNECT_S: Final = 4.0

View = Callable[[], Mapping[str, PeerRecord]]
"""Returns the records of the other peers."""
Answers = Callable[[str], Awaitable[bool]]
"""Tells whether something listens at a multiaddr."""


async def note_living(host: Host, home: Home, view: View, changed: Callable[[], None] = lambda: None) -> None:
    """Keep `Home.living` up to date until cancelled. `changed` is called after each change, also of our addresses."""
    named, own = home.living_addresses(), host.addresses
    await trio.sleep(FIRST_LOOK_S)
    while True:
        records = {peer: record for peer, record in view().items() if host.admissions.is_anchor(peer)}
        found = await living(records, host.addresses, named, is_answered)
        if (found, host.addresses) != (named, own):
            named, own = found, host.addresses
            try:
                home.note_living(found)
                changed()
            except ResourceError as error:
                host.events.emit("living_unsaved", reason=str(error))
        await trio.sleep(LOOK_EVERY_S)


async def living(
    records: Mapping[str, PeerRecord], own: Sequence[str], named: Sequence[str], answers: Answers
) -> tuple[str, ...]:
    """Return full addresses of at most `NAMED_MAX` members that are reached as far as `own` or farther: first those
    `named` before. A relayed member is named only if there is no other."""
    least = max((reach_of(address) for address in own if not is_circuit(address)), default=0)
    before = [address.rpartition("/p2p/")[2] for address in named]
    steady = sorted(records, key=lambda peer: (peer not in before, peer))
    found: list[str] = []
    relayed: list[str] = []
    for peer in steady:
        if len(found) == NAMED_MAX:
            break
        addresses = [f"{address}/p2p/{peer}" for address in records[peer].addresses]
        relayed += [address for address in addresses if is_circuit(address)][:1]
        for address in addresses:
            if not is_circuit(address) and reach_of(address) >= least and await answers(address):
                found.append(address)
                break
    return tuple(found or relayed[:1])


async def is_answered(address: str) -> bool:
    """Whether something listens at a multiaddr, which its member vouches for; a dial then checks the peer."""
    host, port = address.split("/")[2], int(str(Multiaddr(address).value_for_protocol("tcp")))
    answered = False
    with trio.move_on_after(CONNECT_S), suppress(OSError):
        await (await trio.open_tcp_stream(host, port)).aclose()
        answered = True
    return answered
