"""A peer whose machine has no memory left for a whole batch: it goes on with less at a time, and its rounds count."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.support.peer_process import PeerProcess
from tests.swarm.support.swarm_harness import RUN_TOML, open_swarm

WIDE = RUN_TOML.replace("batch_size = 4", 'batch_size = 256\ndtype = "fp32"').replace(
    "intermediate_size = 64", "intermediate_size = 512"
)
"""A batch keeps 400 MB of activations, beside weights of half a MB. In bf16, on a CPU that has units for it, the first
product alone would take more address space than there is."""
ROOM = 96 << 20


def hold(peer: PeerProcess) -> None:
    """Let the peer's worker have little more address space than it takes now."""
    worker = int(peer.all("worker_ready")[-1].fields["pid"])
    pages = int(Path(f"/proc/{worker}/statm").read_text().split()[0])
    resource.prlimit(worker, resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM,) * 2)


@pytest.mark.process
async def test_micro_batches_are_halved_and_the_round_is_merged(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, run=WIDE, steps=2) as swarm:
        held = swarm.join("held")
        await held.wait_for("worker_ready")
        hold(held)  # before its first step, which waits for a second peer: a process keeps what it had once
        other = swarm.join("other")
        halved = await held.wait_for("micro_batch_halved")
        assert halved.fields == {"sequences": 128, "recompute": "none"}
        await other.wait_for("round_committed", lambda fields: fields["contributions"] == 2)
        last = held.all("micro_batch_halved")[-1].fields["sequences"]
        assert 1 <= last < 128 and not held.all("worker_died") and not other.all("micro_batch_halved")
