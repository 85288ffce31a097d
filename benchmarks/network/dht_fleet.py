"""Nodes of our DHT in one process, for dht.py: `python -m benchmarks.network.dht_fleet COUNT [BOOTSTRAP...]`, JSON on
stdin."""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import trio

from dht.node import Node, NodeConfig, Schema, open_node
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host


class Blob(msgspec.Struct):
    data: bytes


BLOBS = Schema("blob", Blob, ttl_max_s=600.0, size_max=1000, signer=lambda key, peer: True)


async def start(stack: AsyncExitStack, bootstrap: list[str]) -> tuple[Host, Node]:
    host = await stack.enter_async_context(open_host(identity=Identity.generate(), events=EventLog()))
    node = await stack.enter_async_context(open_node(host, NodeConfig("benchmark", bootstrap), [BLOBS]))
    return host, node


async def answer(nodes: list[Node], request: dict[str, Any]) -> dict[str, Any]:
    """Carry out one request. Keys go round the nodes; other nodes read than write."""
    match request["do"]:
        case "cpu":
            before = time.process_time()
            await trio.sleep(request["seconds"])
            return {"cpu_s": time.process_time() - before}
        case "memory":
            return {"rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    ms, ok = [], []
    for number, key in enumerate(request["keys"]):
        started = time.perf_counter()
        if request["do"] == "put":
            ok.append(await nodes[number % len(nodes)].put(BLOBS, key, Blob(bytes(100)), ttl_s=300.0) > 0)
        else:
            ok.append(bool(await nodes[(number + 1) % len(nodes)].get(BLOBS, key)))
        ms.append(1e3 * (time.perf_counter() - started))
    return {"ms": ms, "ok": ok}


async def main(count: int, bootstrap: list[str]) -> None:
    async with AsyncExitStack() as stack:
        hosts: list[Host] = []
        nodes: list[Node] = []
        join_ms: list[float] = []
        for _ in range(count):
            started = time.perf_counter()
            host, node = await start(stack, bootstrap or [host.addresses[0] for host in hosts[:1]])
            join_ms.append(1e3 * (time.perf_counter() - started))
            hosts.append(host)
            nodes.append(node)
        hello = {"nodes": count, "join_ms": join_ms, "addresses": [host.addresses[0] for host in hosts]}
        print(json.dumps(hello), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            print(json.dumps(await answer(nodes, json.loads(line))), flush=True)


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), sys.argv[2:])
