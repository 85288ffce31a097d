"""Two thousand silent sockets and two thousand dials without an answer: a host is neither deaf nor mute after them."""

from __future__ import annotations

import pytest
import trio

from peer.errors import DialError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import open_host
from peer.net.limits import NetLimits
from tests.support.silence import connect_here_and_there, dial_silently, emptied, silent_port

MANY = 2000
AT_ONCE = 100

pytestmark = pytest.mark.soak


async def test_two_thousand_silent_sockets_and_two_thousand_dials_to_silent_peers() -> None:
    config = open_host(identity=Identity.generate(), events=EventLog(), limits=NetLimits(dial_timeout_s=1.0))
    async with (
        config as host,
        open_host(identity=Identity.generate(), events=EventLog()) as other,
    ):
        await dial_silently(host, MANY)
        await connect_here_and_there(host, other)
        with silent_port() as port:

            async def dial() -> None:
                with pytest.raises(DialError):
                    await host.connect_address(
                        f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.generate().peer_id}", timeout_s=300
                    )

            for _ in range(MANY // AT_ONCE):
                async with trio.open_nursery() as nursery:
                    for _ in range(AT_ONCE):
                        nursery.start_soon(dial)
        await connect_here_and_there(host, other)
        with silent_port() as port:  # and some that another address of the same peer wins
            for _ in range(MANY // AT_ONCE):
                host.book.add(other.peer_id, [f"/ip4/127.0.0.1/tcp/{port}", *other.addresses])
                await host.connect(other.peer_id, timeout_s=60)
                await host.disconnect(other.peer_id)
        await emptied(host)
        await emptied(other)
        print(f"\nafter {MANY} of each: {host.counts.now()}", flush=True)
