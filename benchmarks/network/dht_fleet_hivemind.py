"""Nodes of hivemind's DHT in one process, each with its Go daemon, for dht.py. Same protocol as dht_fleet.py.

hivemind runs as its users run it, with unsigned records. Its answers are checked for presence only.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import psutil
from hivemind.dht.node import DHTNode
from hivemind.utils import get_dht_time


def family() -> list[psutil.Process]:
    """Return this process and the Go daemons."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def cpu_s() -> float:
    return sum(sum(process.cpu_times()[:2]) for process in family())


async def answer(nodes: list[DHTNode], request: dict[str, Any]) -> dict[str, Any]:
    match request["do"]:
        case "cpu":
            before = cpu_s()
            await asyncio.sleep(request["seconds"])
            return {"cpu_s": cpu_s() - before}
        case "memory":
            return {"rss_mb": sum(process.memory_info().rss for process in family()) / 2**20}
    ms, ok = [], []
    for number, key in enumerate(request["keys"]):
        started = time.perf_counter()
        if request["do"] == "put":
            node = nodes[number % len(nodes)]
            expires = get_dht_time() + 300
            stored = await node.store(key, subkey=node.peer_id.to_base58(), value=bytes(100), expiration_time=expires)
            ok.append(bool(stored))
        else:
            ok.append(await nodes[(number + 1) % len(nodes)].get(key, latest=True) is not None)
        ms.append(1e3 * (time.perf_counter() - started))
    return {"ms": ms, "ok": ok}


async def main(count: int, bootstrap: list[str]) -> None:
    nodes, addresses, join_ms = [], [], []
    for _ in range(count):
        started = time.perf_counter()
        node = await DHTNode.create(initial_peers=bootstrap or addresses[:1])
        join_ms.append(1e3 * (time.perf_counter() - started))
        nodes.append(node)
        addresses.append(str((await node.get_visible_maddrs())[0]))
    print(json.dumps({"nodes": count, "join_ms": join_ms, "addresses": addresses}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await answer(nodes, json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
