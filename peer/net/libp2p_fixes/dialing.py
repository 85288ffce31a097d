"""Dialling by peer id, as the library's own parts do it. Our calls use `peer.net.dialing`.

Stock 0.8.1 tries only the first TCP address of a peer. It waits a quarter of a second even if a dial succeeds at once,
and refuses for a minute to dial a peer again that could not be reached. It stores a thousand addresses of any peer that
sends them, comparing each with each, every time. And it lets through all exceptions that the Noise library raises on a
handshake of garbage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio
from cryptography.exceptions import InvalidTag
from libp2p.abc import INetConn
from libp2p.network.exceptions import SwarmDialAllFailedError, SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerdata import PeerData
from libp2p.peer.peerstore import PeerStoreError
from multiaddr import Multiaddr
from noise.exceptions import NoiseHandshakeError, NoiseInvalidMessage, NoiseValueError

from peer.errors import DialError
from peer.net.dialing import race

ADDRESSES_MAX: Final = 8
KEPT_MAX: Final = 32
_ATTEMPT_S: Final = 5.0
_STAGGER_S: Final = 0.25

GARBLED: Final = (ValueError, EOFError, InvalidTag, NoiseHandshakeError, NoiseInvalidMessage, NoiseValueError)
"""Exceptions of a handshake, besides the library's own errors, if the other side sends garbage."""


def apply() -> None:
    """Replace `Swarm.dial_peer`, and bound the addresses that are kept of a peer."""
    Swarm.dial_peer = dial_peer  # type: ignore[method-assign]
    PeerData.add_addrs = _add_addresses  # type: ignore[method-assign]


async def dial_peer(self: Swarm, peer_id: ID) -> list[INetConn]:
    """Return the live connections to a peer, or a new one by the address that answers first. Raises SwarmException."""
    while True:
        live = [connection for connection in self.get_connections(peer_id) if not connection.is_closed]
        if live:
            return live
        under_way = self._ongoing_dials.get(peer_id)
        if under_way is None:
            break
        await under_way.wait()
    done = self._ongoing_dials[peer_id] = trio.Event()
    try:
        return [await _dial(self, peer_id, await _candidates(self, peer_id))]
    finally:
        del self._ongoing_dials[peer_id]
        done.set()


def _add_addresses(self: PeerData, addrs: Sequence[Multiaddr]) -> None:
    """Keep the first `KEPT_MAX` addresses that a peer reports, then older ones as far as there is room."""
    told = list(dict.fromkeys(addrs[:KEPT_MAX]))
    self.addrs = [*told, *(known for known in self.addrs if known not in told)][:KEPT_MAX]


async def _candidates(swarm: Swarm, peer_id: ID) -> list[str]:
    """Return the peer's known direct addresses that this host may and can dial. Raises SwarmException."""
    try:
        known = swarm.peerstore.addrs(peer_id)
    except PeerStoreError as error:
        raise SwarmException(f"no address of {peer_id} is known") from error
    found = []
    for address in known:
        if "p2p-circuit" in str(address) or swarm.transport_manager.transport_for_dialing(address) is None:
            continue
        if await swarm.connection_gate.is_allowed(address):
            found.append(str(address))
    if not found:
        raise SwarmException(f"no address of {peer_id} can be dialled")
    return list(dict.fromkeys(found))[:ADDRESSES_MAX]


async def _dial(swarm: Swarm, peer_id: ID, addresses: list[str]) -> INetConn:
    async def attempt(address: str) -> INetConn:
        async with swarm._global_dial_limiter:
            try:
                return await swarm._dial_addr_single_attempt(Multiaddr(address), peer_id)
            except GARBLED as error:
                raise SwarmException(f"the handshake with {peer_id} failed: {error!r}") from error

    def discard(connection: INetConn) -> None:
        swarm.manager.run_task(connection.close)

    try:
        connection: INetConn = await race(
            str(peer_id), addresses, attempt, timeout_s=_ATTEMPT_S, stagger_s=_STAGGER_S, discard=discard
        )
    except DialError as error:
        raise SwarmDialAllFailedError(str(error), peer_id=peer_id, num_addrs_tried=len(addresses)) from error
    return connection
