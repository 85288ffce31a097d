"""The checkpoints in a peer's home: the last commit of a stage, and what proves it to others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec
import torch
import trio

from optim.strategies.interface import OuterStrategy
from optim.strategies.registry import build_strategy
from peer.checkpoint.store import CheckpointStore
from peer.decoding import MALFORMED
from peer.errors import ProtocolViolation
from peer.files import read_bounded, write_atomically
from peer.ipc.span import spans_of
from peer.model.layout import FlatLayout, init_flat
from swarm.placement.stages import layout_of, open_store
from swarm.protocol.agreement.messages import ChainLink
from swarm.protocol.agreement.proof import HeadProof, ProofChecker
from swarm.protocol.head import Head
from swarm.protocol.signer import KeySigner
from swarm.rounds.records import RecordFiles
from swarm.run.agreement import agreement_config
from swarm.run.home import Home
from swarm.run.manifest import Manifest
from swarm.run.peer_context import PeerContext
from swarm.state.outer_state import OuterState

PROOF_BYTES_MAX: Final = 1 << 20


@dataclass
class LocalCheckpoint:
    """A replica's state, and the files that it is saved to."""

    context: PeerContext
    home: Home
    """The folder of the stage."""
    layout: FlatLayout
    store: CheckpointStore
    state: OuterState
    head: Head
    """The head that the replica begins with."""
    _saved: Head = field(init=False)

    def __post_init__(self) -> None:
        self._saved = self.head

    @classmethod
    async def open(cls, context: PeerContext, stage: int) -> LocalCheckpoint:
        """Load the last checkpoint, or make the run's initial weights. Where these come out differently on this machine
        (or the run began from a checkpoint), round -1 stands for "no state yet", and the peer fetches one."""
        manifest, host = context.manifest, context.host
        home, layout = context.home.stage(stage, manifest.stages), layout_of(manifest, stage)
        store = open_store(context.home, manifest, stage, host.identity, host.events)
        store.prepare()
        strategy = build_strategy(manifest.outer, manifest.codec, layout, manifest.inner)
        state, head = await trio.to_thread.run_sync(_initial, store, manifest, stage, strategy)
        return cls(context, home, layout, store, state, head)

    async def save(self, head: Head) -> bool:
        """Write a checkpoint, unless this head is on disk already or the state has begun to change to another. Return
        whether it was written."""
        if head == self._saved or head.round < 0 or head.state_hash != self.state.tree.root:
            return False
        if await self.store.save(max(head.round, 0), msgspec.msgpack.encode(head), self.state.named(), self.layout):
            self._saved = head
            return True
        return False


def save_proof(home: Home, proof: HeadProof) -> None:
    """Write the proof of a commit that lies in `home`, the folder of its stage. Raises ResourceError."""
    write_atomically(home.proof, msgspec.msgpack.encode(proof))


def proof_of(context: PeerContext, stage: int, head: Head) -> tuple[ChainLink, ...] | None:
    """Return the proof of a commit of `stage` that lies in this home: what came with a backup, or what the replica that
    made it has on disk. None where there is none; none is needed for round 0, where it is empty."""
    manifest = context.manifest
    home = context.home.stage(stage, manifest.stages)
    checker = ProofChecker(agreement_config(manifest, stage, context.host.peer_id), KeySigner(context.host.identity))
    for proof in (saved_proof(home), checker.prove(RecordFiles(home.agreement).read(), head.hash)):
        try:
            checker.check(head, proof)
        except ProtocolViolation:
            continue
        return proof
    return None


def saved_proof(home: Home) -> tuple[ChainLink, ...]:
    """Return the proof that lies beside a backup in `home`, unchecked; empty where there is none."""
    try:
        found: tuple[ChainLink, ...] = msgspec.msgpack.decode(read_bounded(home.proof, PROOF_BYTES_MAX), type=HeadProof)
    except (OSError, *MALFORMED):
        return ()
    return found


def saved_stages(context: PeerContext) -> list[int]:
    """Return the stages that this home has a checkpoint of: first the peer's last stage, then the latest."""
    manifest, host = context.manifest, context.host
    latest = {}
    for stage in range(manifest.stages):
        if entries := open_store(context.home, manifest, stage, host.identity, host.events).list():
            latest[stage] = entries[-1].path.stat().st_mtime
    last = _last_stage(context)
    return sorted(latest, key=lambda stage: (stage != last, -latest[stage]))


def note_stage(context: PeerContext, stage: int) -> None:
    """Remember across restarts that this is the peer's stage: its backup of another stage may be as new."""
    write_atomically(context.home.replica, str(stage).encode())


def _last_stage(context: PeerContext) -> int | None:
    try:
        return int(context.home.replica.read_text())
    except (OSError, ValueError):
        return None


def _initial(
    store: CheckpointStore, manifest: Manifest, stage: int, strategy: OuterStrategy
) -> tuple[OuterState, Head]:
    loaded = store.load_latest()
    if loaded is not None and tuple(loaded.tensors) == ("theta", *strategy.shared):
        head = msgspec.msgpack.decode(loaded.head, type=Head)
        if head.state_hash == loaded.tree.root:
            return OuterState(list(loaded.tensors.values()), strategy), head
    first = manifest.first_head(stage)
    theta = init_flat(manifest.model, manifest.run.seed, span=spans_of(manifest.cuts)[stage])
    state = OuterState([theta, *(torch.zeros_like(theta) for _ in strategy.shared)], strategy)
    if state.tree.root == first.state_hash:
        return state, first
    return state, msgspec.structs.replace(first, round=-1, state_hash=state.tree.root)
