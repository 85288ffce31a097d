"""A DHT node for the tests: node_child.py KEY NUMBER TTL_S [BOOTSTRAP...]. Prints one JSON line when it has joined."""

import json
import sys

import trio

from dht.node import NodeConfig, open_node
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import open_host
from tests.dht.support.local_swarm import CARDS, HASTY, RUN, Card


async def main(key: str, number: int, ttl_s: float, bootstrap: list[str]) -> None:
    config = open_host(identity=Identity.generate(), events=EventLog())
    async with config as host, open_node(host, NodeConfig(RUN, bootstrap, tuning=HASTY), [CARDS]) as node:
        await node.put(CARDS, key, Card(number), ttl_s)
        sys.stdout.write(json.dumps({"peer": host.peer_id, "address": host.addresses[0]}) + "\n")
        sys.stdout.flush()
        while True:
            await trio.sleep(ttl_s / 3)
            await node.put(CARDS, key, Card(number), ttl_s)


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
