"""A guarded node whose key holds as many records as a key may, as the victim of `tests.peer.support.scene`.

With ATTACKERS... (what `attack_child` is told) it is their process instead: they fetch pages of the key and read none.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import trio

from dht.key import record_key
from dht.node import NodeConfig, open_node
from dht.origin import TRUSTED
from dht.protocol import FETCH, FetchRequest
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import open_host
from peer.net.method import Call
from tests.dht.support.local_swarm import CARDS, RUN
from tests.dht.support.open_run import guard
from tests.dht.test_storage import record
from tests.peer.support import attack_child
from tests.peer.support.clock import CLOCK, clock
from tests.peer.support.honest_child import CALLER
from tests.peer.support.victim_child import ATTACKERS, FIGURES, HONEST, Figures, Text, attacker, resident_bytes

RECORDS = 1024
RECORD_BYTES = 2500
DIGEST = record_key(RUN, CARDS.name, "key")


async def figures(call: Call[Text]) -> Figures:
    return Figures(resident_bytes(), 0, 0)


async def serve() -> None:
    honest = [HONEST.peer_id, CALLER.peer_id]
    async with open_host(identity=Identity.generate(), events=EventLog()) as host:
        guard(host, members=honest)
        for peer in (*honest, *(attacker(number).peer_id for number in range(ATTACKERS))):
            host.admissions.grant(peer, "member", trusted=peer in honest)
        host.rpc.register(FIGURES, figures)
        host.rpc.register(CLOCK, clock)
        async with open_node(host, NodeConfig(RUN), [CARDS]) as node:
            for number in range(RECORDS):
                held = record(f"{number:052}", "key", 1, size=RECORD_BYTES, ttl_ms=600_000)
                node._storage.put(replace(held, digest=DIGEST), trio.current_time(), TRUSTED)
            sys.stdout.write(host.addresses[0] + "\n")
            sys.stdout.flush()
            stdin = trio.lowlevel.FdStream(0)
            while await stdin.receive_some():
                pass


if __name__ == "__main__":
    if len(sys.argv) > 1:
        attack_child.ATTACKS["pages"] = attack_child.frame(FETCH, FetchRequest(RUN, (), DIGEST))
        trio.run(attack_child.main)
    else:
        trio.run(serve)
