"""Commits of a stage, fetched to a home and saved there with what proves them: backups, and a run's last state."""

from __future__ import annotations

import msgspec
import trio

from peer.files import write_atomically
from peer.identity import Identity
from swarm.membership.proven_heads import ProvenHead
from swarm.placement.stages import layout_of, open_store, state_bytes, vectors_of
from swarm.protocol.agreement.proof import HeadProof
from swarm.run.home import Home
from swarm.run.peer_context import Place
from swarm.state.fetch import Fetched, fetch_state


async def fetch_commit(place: Place, stage: int, proven: ProvenHead) -> Fetched:
    """Fetch the state of a head from its holders, checked against its hash. Raises NetworkError, ResourceError."""
    manifest, host = place.manifest, place.host
    folder = place.home.stage(stage, manifest.stages)
    await trio.to_thread.run_sync(lambda: folder.path.mkdir(parents=True, exist_ok=True))
    return await fetch_state(
        host.rpc,
        lambda: proven.holders,
        proven.head.state_hash,
        state_bytes(manifest, stage),
        folder.path / "backup.part",
        host.events,
        len(vectors_of(manifest, stage)),
    )


async def save_commit(
    place: Place, stage: int, proven: ProvenHead, state: Fetched, owner: Identity | None = None
) -> bool:
    """Write a fetched state of `stage` to disk, as a replica of it does; return whether that went well. `owner`: whose
    home it is, if not the host's. Raises ResourceError if the folder cannot be written."""
    manifest, host, head = place.manifest, place.host, proven.head
    store = open_store(place.home, manifest, stage, owner or host.identity, host.events)
    await trio.to_thread.run_sync(store.prepare)
    fetched = state.named(vectors_of(manifest, stage))
    if not await store.save(max(head.round, 0), msgspec.msgpack.encode(head), fetched, layout_of(manifest, stage)):
        return False
    folder = place.home.stage(stage, manifest.stages)
    await trio.to_thread.run_sync(save_proof, folder, proven.links)
    return True


def save_proof(home: Home, proof: HeadProof) -> None:
    """Write the proof of a commit that lies in `home`, the folder of its stage. Raises ResourceError."""
    write_atomically(home.proof, msgspec.msgpack.encode(proof))
