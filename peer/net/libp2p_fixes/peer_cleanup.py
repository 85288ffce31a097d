"""Peer cleanup: the library's data about a peer ends with the peer's last connection.

Stock 0.8.1 has a task that cleans its peerstore and starts it nowhere. It keeps keys, addresses and signed records of a
thousand peers, then evicts those without addresses first, which is the host itself with its private key. It also keeps
a note of every disconnection. Barnraise has its own address book, so none of this is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.peer.id import ID
from multiaddr import Multiaddr

LINGER_S: Final = 60.0  # for a peer that is not connected: it may be being dialled, or was identified late


class OnConnections(INotifee):
    """Calls `connected` for every new connection, and `gone` for every peer whose last connection has ended."""

    def __init__(self, connected: Callable[[ID], None], gone: Callable[[ID], None]) -> None:
        self._connected = connected
        self._gone = gone

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        self._connected(conn.muxed_conn.peer_id)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        peer = conn.muxed_conn.peer_id
        if not network.connections.get(peer):
            self._gone(peer)

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...


def forget_disconnected(network: Any) -> None:
    """Make this network drop its data about peers that are not connected, from now on."""

    def gone(peer: ID) -> None:
        store = network.peerstore
        oldest = time.time() - LINGER_S
        late = [p for p, data in store.peer_data_map.items() if _is_over(network, p) and data.last_identified < oldest]
        for forgotten in (peer, *late):
            store.peer_data_map.pop(forgotten, None)
            store.peer_record_map.pop(forgotten, None)
            network._round_robin_index.pop(forgotten, None)
        network.auto_connector.clear_cooldown(peer)

    network.register_notifee(OnConnections(lambda peer: None, gone))


def _is_over(network: Any, peer: ID) -> bool:
    return peer != network.get_peer_id() and not network.connections.get(peer)
