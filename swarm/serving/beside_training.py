"""A block server in a peer that trains: it serves the last commit of the run with the same identity, home and host.

The two have a worker each, since the weights that a trainer computes with are not those of a commit. The trainer goes
first: the server's worker gets the processor in its pauses, and little of it otherwise.
"""

from __future__ import annotations

import msgspec

from peer.machine import free_memory_bytes
from swarm.inference.record import check_commits
from swarm.membership.open_peer import OpenPeer
from swarm.placement.costs import USUAL_PEERS, RunShape
from swarm.run.home import Home
from swarm.run.manifest import Manifest
from swarm.run.peer_context import JoinConfig
from swarm.serving.config import ServeConfig
from swarm.serving.memory import FREE_SHARE
from swarm.serving.run_server import RunServer


async def serve_beside_training(
    config: JoinConfig, memory_bytes: float | None, peer: OpenPeer[Manifest], home: Home
) -> None:
    """Serve until cancelled, while a peer trains that joined with `config` (`swarm.training.peer.run_participant`).
    `memory_bytes`: for weights and caches; None: six tenths of what the trainer leaves. Raises ConfigError for a run
    without commits, ResourceError."""
    manifest = peer.run.manifest
    check_commits(manifest)
    memory = _left_by_training(manifest) if memory_bytes is None else memory_bytes
    serve_config = ServeConfig(
        home=config.home,
        invite=config.invite,
        folder=config.base,
        name=config.name,
        compute=msgspec.structs.replace(config.compute, memory_bytes=memory),
        beside_training=True,
    )
    await RunServer(serve_config, home, peer, manifest).run(lambda span: None)


def _left_by_training(manifest: Manifest) -> float:
    """Return what the server may have: the trainer has just been started, and may keep its states in memory."""
    shape = RunShape.of(manifest)
    works = (shape.workload(stage, USUAL_PEERS) for stage in range(manifest.stages))
    trains = max(shape.footprint(work).host_bytes for work in works)
    return FREE_SHARE * max(0.0, free_memory_bytes() - trains)
