"""The checkpoints in a peer's home: the last commit of a stage, and what proves it to others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio

from optim.strategies.interface import OuterStrategy
from optim.strategies.registry import build_strategy
from peer.catalogue.machine import LastCheckpointFailed
from peer.checkpoint.generation import FileRoom, MemoryRoom, StateGeneration, StateRoom
from peer.checkpoint.store import CheckpointStore
from peer.decoding import MALFORMED
from peer.errors import ProtocolViolation, ResourceError
from peer.files import read_bounded, write_atomically
from peer.ipc.span import spans_of
from peer.model.layout import FlatLayout, init_flat
from swarm.placement.stages import layout_of, open_store, vectors_of
from swarm.protocol.agreement.messages import ChainLink
from swarm.protocol.agreement.proof import HeadProof, ProofChecker
from swarm.protocol.head import Head
from swarm.protocol.signer import KeySigner
from swarm.rounds.records import RecordFiles
from swarm.rounds.result_log import ResultLog, path_between
from swarm.rounds.trainers.last_save import lost_round, save_or_wait
from swarm.run.agreement import agreement_config
from swarm.run.home import Home
from swarm.run.manifest import Manifest
from swarm.run.peer_context import PeerContext
from swarm.state.outer_state import OuterState
from swarm.training.machine_memory import state_lies_on_disk

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
        (or the run began from a checkpoint), round -1 means "no state yet", and the peer fetches one."""
        manifest, host = context.manifest, context.host
        home, layout = context.home.stage(stage, manifest.stages), layout_of(manifest, stage)
        store = open_store(context.home, manifest, stage, host.identity, host.events)
        store.prepare()
        room = await trio.to_thread.run_sync(_room, context, stage, layout)
        strategy = build_strategy(manifest.outer, manifest.codec, layout, manifest.inner, room.vector)
        state, head = await trio.to_thread.run_sync(_initial, store, manifest, stage, strategy, room)
        return cls(context, home, layout, store, state, head)

    async def save(self, head: Head) -> bool:
        """Write a checkpoint, unless this head is on disk already or the state has begun to change to another. Return
        whether it was written."""
        if not self._is_due(head):
            return False
        state = self.state.current
        saved = await self.store.save(max(head.round, 0), msgspec.msgpack.encode(head), state, self.layout)
        self._saved = head if saved else self._saved
        return saved

    async def save_last(self, head: Head, held_elsewhere: Callable[[], bool], log: ResultLog) -> None:
        """Write the checkpoint of the last commit, as `save`. While the disk does not take it and no other peer keeps
        the state, wait for room, `LAST_SAVE_S` at most.

        Raises ResourceError, with what is lost: the state of which round, and what the disk has.
        """
        folder, events = self.home.path, self.context.host.events

        async def save() -> bool:
            return not self._is_due(head) or await self.save(head)

        if not await save_or_wait(save, held_elsewhere, head.round, folder, events):
            lost, sentence = await trio.to_thread.run_sync(self._what_is_lost, head, log)
            events.emit(LastCheckpointFailed(round=head.round, lost=lost, error=sentence))
            raise ResourceError(sentence)

    def _is_due(self, head: Head) -> bool:
        return head != self._saved and head.round >= 0 and head.state_hash == self.state.tree.root

    def _what_is_lost(self, head: Head, log: ResultLog) -> tuple[bool, str]:
        """Return whether the state of `head` is lost with this process, and the error's sentence."""
        on_disk, results = self.store.list(), log.load()
        problem = lost_round(head.round, self.home.path, on_disk[-1].round if on_disk else None)
        if path_between(results, self._saved.state_hash, head.state_hash):
            return False, f"{problem}, but the results that lead to that round are: free some space, then join again"
        return True, f"{problem}; no other peer keeps the state of round {head.round}, which is lost: free some space"


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
    last = last_stage(context)
    return sorted(latest, key=lambda stage: (stage != last, -latest[stage]))


def note_stage(context: PeerContext, stage: int) -> None:
    """Remember across restarts that this is the peer's stage: its backup of another stage may be as new."""
    write_atomically(context.home.replica, str(stage).encode())


def last_stage(context: PeerContext) -> int | None:
    """Return the stage of this peer's last replica; None before the first."""
    try:
        return int(context.home.replica.read_text())
    except (OSError, ValueError):
        return None


def _room(context: PeerContext, stage: int, layout: FlatLayout) -> StateRoom:
    """Return where this peer's states of a stage lie. Raises ResourceError."""
    home, vectors = context.home.stage(stage, context.manifest.stages), vectors_of(context.manifest, stage)
    if state_lies_on_disk(context.config, context.manifest, stage):
        context.host.events.emit("state_in_files", folder=str(home.states))
        return FileRoom(vectors, layout, home.states)
    shutil.rmtree(home.states, ignore_errors=True)  # what a killed process left that kept them there
    return MemoryRoom(vectors, layout.numel, home.path)


def _initial(
    store: CheckpointStore, manifest: Manifest, stage: int, strategy: OuterStrategy, room: StateRoom
) -> tuple[OuterState, Head]:
    loaded = store.load_latest()
    if loaded is not None and tuple(loaded.tensors) == ("theta", *strategy.shared):
        head = msgspec.msgpack.decode(loaded.head, type=Head)
        if head.state_hash == loaded.tree.root:
            return OuterState(StateGeneration(loaded.tensors, loaded.tree), strategy, room), head
    first = manifest.first_head(stage)
    begun = room.new()
    for vector, tensor in begun.tensors.items():
        if vector == "theta":
            init_flat(manifest.model, manifest.run.seed, tensor, spans_of(manifest.cuts)[stage])
        else:
            tensor.zero_()
    state = OuterState(begun, strategy, room)
    if state.tree.root == first.state_hash:
        return state, first
    return state, msgspec.structs.replace(first, round=-1, state_hash=state.tree.root)
