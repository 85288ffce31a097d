"""Child of test_state: a donor in a process of its own, to be killed or frozen.

donor_child.py NUMEL SEED     prints {"peer": ..., "addresses": [...]}, then serves until its stdin ends
"""

from __future__ import annotations

import json
import sys

import torch
import trio

from peer.checkpoint.hash_tree import hash_state
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import HostConfig, open_host
from swarm.state.snapshots import SnapshotStore
from swarm.state.upload_limits import SnapshotLimits
from tests.support.newer_trio import run_abandonable


def seeded_state(numel: int, seed: int) -> list[torch.Tensor]:
    """theta and momentum, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(2)]


async def main() -> None:
    torch.set_num_threads(1)
    state = seeded_state(int(sys.argv[1]), int(sys.argv[2]))
    tree = hash_state(state)
    snapshots = SnapshotStore(tree.size_bytes, 1 << 20, SnapshotLimits())
    snapshots.publish(tree, state)
    async with open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as host:
        snapshots.serve(host.rpc)
        sys.stdout.write(json.dumps({"peer": host.peer_id, "addresses": host.addresses}) + "\n")
        sys.stdout.flush()
        await run_abandonable(sys.stdin.read)


if __name__ == "__main__":
    trio.run(main)
