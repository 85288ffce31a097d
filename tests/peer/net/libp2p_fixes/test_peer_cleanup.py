"""A host keeps nothing of disconnected peers, and everything of connected ones."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import trio

from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.libp2p_fixes.peer_cleanup import LINGER_S
from tests.peer.net.test_rpc import ECHO, Number, echo

STRANGERS = 6


def new_host() -> AbstractAsyncContextManager[Host]:
    return open_host(identity=Identity.generate(), events=EventLog())


def kept_of_others(host: Host) -> dict[str, int]:
    """Count the entries in each of the host's tables, without its own entry in the peerstore."""
    network = host.libp2p.get_network()
    return {
        "peerstore": len(network.peerstore.peer_data_map) - 1,
        "records": len(network.peerstore.peer_record_map),
        "disconnects": len(network.auto_connector._recent_disconnects),
        "bulk": len({*host._connections._bulk, *host._connections._bulk_dials}),
        "links": len(host._bulk._links),
    }


async def test_nothing_is_kept_of_disconnected_peers() -> None:
    async with new_host() as host, new_host() as friend:
        host.rpc.register(ECHO, echo)
        friend.rpc.register(ECHO, echo)
        await host.connect_address(friend.addresses[0], timeout_s=30)
        await host.rpc.call(friend.peer_id, ECHO, Number(1), bytes(1 << 20), timeout_s=30, bulk=True)
        for _ in range(STRANGERS):
            async with new_host() as stranger:
                stranger.rpc.register(ECHO, echo)
                await stranger.connect_address(host.addresses[0], timeout_s=30)
                for caller, called in ((stranger, host), (host, stranger)):
                    await caller.rpc.call(called.peer_id, ECHO, Number(1), bytes(1 << 20), timeout_s=30, bulk=True)
        with trio.move_on_after(60):  # the assertion below reports what is left
            while any(count > 1 for count in kept_of_others(host).values()):
                await trio.sleep(0.01)
        assert all(count <= 1 for count in kept_of_others(host).values()), kept_of_others(host)
        assert host.connected == {friend.peer_id}
        assert host.libp2p.get_peerstore().has_peer(host.libp2p.get_id())
        assert (await host.rpc.call(friend.peer_id, ECHO, Number(7), timeout_s=30)).body == Number(8)


async def test_late_entries_are_dropped_at_the_next_disconnection() -> None:
    """A peer that is about to be dialled may tell its addresses after its connection has ended."""
    async with new_host() as host:
        store = host.libp2p.get_peerstore()
        async with new_host() as late, new_host() as early:
            late_id, early_id = late.libp2p.get_id(), early.libp2p.get_id()
        for peer in (late_id, early_id):
            store.add_protocols(peer, ["/whatever"])
        store.peer_data_map[late_id].last_identified -= int(2 * LINGER_S)
        async with new_host() as stranger:
            await stranger.connect_address(host.addresses[0], timeout_s=30)
        with trio.fail_after(300):
            while store.has_peer(late_id):
                await trio.sleep(0.01)
        assert store.has_peer(early_id)  # it may be being dialled
