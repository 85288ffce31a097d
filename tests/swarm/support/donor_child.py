"""Child of test_state: a donor in a process of its own, to be killed or frozen.

donor_child.py NUMEL SEED     prints {"peer": ..., "addresses": [...]}, then serves until its stdin ends
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch
import trio

from peer.checkpoint.generation import StateGeneration
from peer.checkpoint.hash_tree import StateTree
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import open_host
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from swarm.state.upload_limits import SnapshotLimits
from tests.support.newer_trio import run_abandonable


def seeded_state(numel: int, seed: int) -> list[torch.Tensor]:
    """theta and momentum, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator) for _ in range(2)]


def generation(tensors: Sequence[torch.Tensor], tree: StateTree | None = None) -> StateGeneration:
    """These vectors as a state."""
    return StateGeneration({f"vector {number}": tensor for number, tensor in enumerate(tensors)}, tree)


async def main() -> None:
    torch.set_num_threads(1)
    state = generation(seeded_state(int(sys.argv[1]), int(sys.argv[2])))
    snapshots = SnapshotStore(state.size_bytes, 1 << 20, SnapshotLimits())
    snapshots.publish(state)
    async with open_host(identity=Identity.generate(), events=EventLog()) as host:
        serve_snapshots(host.rpc, [snapshots])
        sys.stdout.write(json.dumps({"peer": host.peer_id, "addresses": host.addresses}) + "\n")
        sys.stdout.flush()
        await run_abandonable(sys.stdin.read)


if __name__ == "__main__":
    trio.run(main)
