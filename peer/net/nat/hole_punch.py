"""Hole punching by DCUtR (https://github.com/libp2p/specs/blob/master/relay/DCUtR.md)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

import trio
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.dcutr import DCUtRProtocol, _local_tcp_listen_addrs
from multiaddr import Multiaddr

from peer.net.address_book import is_circuit

Path = Literal["direct", "hole-punched", "relayed"]

_PUNCH_S: Final = 4  # the kernel repeats a SYN that a NAT has dropped after 1 s and after 3 s
_PUNCH_ROUNDS: Final = 2
_PUNCH_ADDRESSES_MAX: Final = 8


class HolePunch(DCUtRProtocol):
    """The library's DCUtR with our own timing: the library exchanges addresses and agrees on the moment of the dials.

    Left alone it polls all connections, and dials for half a minute although a NAT decides in the first seconds.
    """

    def __init__(
        self, host: Any, until_direct: Callable[[str], Awaitable[None]], ended: Callable[[str, Path], None]
    ) -> None:
        super().__init__(host, dial_timeout=_PUNCH_S)
        self._until_direct = until_direct
        self._ended = ended

    def is_under_way(self, peer: str) -> bool:
        return ID.from_base58(peer) in self._in_progress

    async def _perform_hole_punch(self, peer_id: ID, addrs: list[Multiaddr], as_responder: bool = False) -> bool:
        """Dial from our listening port (both NATs expect its mapping) while the peer does the same."""
        wanted = [address for address in addrs if not is_circuit(str(address))][:_PUNCH_ADDRESSES_MAX]
        source = next(((ip, port) for family, ip, port in _local_tcp_listen_addrs(self.host) if family == 4), None)
        punched = False
        for _ in range(_PUNCH_ROUNDS):
            if not wanted or punched:
                break
            async with trio.open_nursery() as nursery:
                for address in wanted:
                    nursery.start_soon(self._dial_peer, peer_id, address, source, as_responder)
                with trio.move_on_after(_PUNCH_S):
                    await self._until_direct(str(peer_id))
                    punched = True
                nursery.cancel_scope.cancel()
        self._ended(str(peer_id), "hole-punched" if punched else "relayed")
        return punched

    async def _try_unilateral_upgrade(self, peer_id: ID) -> bool:
        return False  # `Traversal` has tried it

    async def _auto_drive_loop(self) -> None:
        await trio.sleep_forever()
