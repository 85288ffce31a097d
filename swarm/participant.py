"""One volunteer's peer: everything a run needs of one machine, put together and taken apart again.

home lock -> identity -> host -> charter -> gate -> DHT node -> worker -> state -> engine
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch
import trio

from dht.node import Node, open_node
from optim.config import Gossip
from optim.recipes.interface import Recipe
from optim.recipes.registry import build_recipe
from peer.checkpoint import CheckpointStore
from peer.errors import BarnraiseError, ProtocolViolation
from peer.events import EventLog
from peer.gang import Gang, GangConfig, open_gang
from peer.host import Host, HostConfig, open_host
from peer.identity import Identity, Signed
from peer.layout import FlatLayout, init_flat
from swarm.chain import Head, Member
from swarm.charter import TOKENIZER_FILE, serve_charter, write_atomically
from swarm.contact import obtain_charter
from swarm.desk import RunFacts
from swarm.engine import Engine
from swarm.fetch import fetch_state
from swarm.follow import Sighting, open_regroup
from swarm.gang_trainer import GangTrainer
from swarm.gate import Gate
from swarm.gossip.participant import Premises, run_gossip
from swarm.home import Home
from swarm.invite import Invite
from swarm.manifest import BYTES_TOKENIZER, Manifest, open_manifest
from swarm.membership import MEMBERS, MemberRecord, Membership, Own, describe
from swarm.messages import SLICE_BYTES_MAX
from swarm.outer_state import OuterState
from swarm.overlap import trainer_of
from swarm.pace import Pace
from swarm.post import Post
from swarm.reach import serve_reach
from swarm.replay import ROUNDS_MAX, replay
from swarm.snapshots import SnapshotShelf
from swarm.tempo import Tempo

COMPUTE_S_MAX: Final = 3600.0
CHECKPOINT_EVERY_S: Final = 10.0


@dataclass(frozen=True)
class JoinConfig:
    """How this machine takes part. `data_folder` overrides the manifest's; caps in bytes per second, None for no
    cap."""

    home: Path
    invite: Invite
    name: str = ""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    device: str = "auto"
    data_folder: str = ""
    threads: int | None = None
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None


async def run_participant(config: JoinConfig) -> None:
    """Join the run and train until it is complete or the task is cancelled; the last commit is then saved.

    Raises what stands in the way of joining: ConfigError, NetworkError, NotAdmitted, ResourceError, CheckpointError.
    """
    home = Home(config.home)
    with home.locked():
        events = EventLog(home.events)
        identity = Identity.load_or_create(home.identity)
        host_config = HostConfig(
            identity=identity,
            events=events,
            listen=config.listen,
            announce=config.announce,
            relays=config.relays,
            upload_bytes_per_s=config.upload_bytes_per_s,
            download_bytes_per_s=config.download_bytes_per_s,
        )
        async with open_host(host_config) as host:
            charter, tokenizer = await obtain_charter(host, config.invite, home.path)
            manifest = open_manifest(charter, config.invite.run_id)
            write_atomically(home.invite, f"{config.invite}\n".encode())
            gate = Gate(host.rpc, manifest, config.invite.token)
            serve_charter(host.rpc, charter, tokenizer)
            serve_reach(host)
            async with (
                open_node(host, config.invite.addresses, [MEMBERS], home.addresses, manifest.run_id) as node,
                open_gang(_gang_config(config, manifest, events)) as gang,
            ):
                if isinstance(manifest.outer, Gossip):
                    await run_gossip(Premises(config.name, home, manifest, host, gate, node, gang))
                    return
                participant = await _assemble(config, manifest, host, node, gang)
                await participant.run()


def _gang_config(config: JoinConfig, manifest: Manifest, events: EventLog) -> GangConfig:
    data = manifest.data
    if config.data_folder:
        data = msgspec.structs.replace(data, source="folder", path=config.data_folder)
    own = manifest.tokenizer != BYTES_TOKENIZER
    return GangConfig(
        model=manifest.model,
        data=data,
        inner=manifest.inner,
        tokenizer=str(config.home / TOKENIZER_FILE) if own else BYTES_TOKENIZER,
        device=config.device,
        directory=config.home,
        seed=manifest.run.seed,
        threads=config.threads,
        events=events,
    )


async def _assemble(config: JoinConfig, manifest: Manifest, host: Host, node: Node, gang: Gang) -> Participant:
    home = Home(config.home)
    store = CheckpointStore(home.checkpoints, host.identity, manifest.run_id, host.events)
    store.prepare()
    recipe = build_recipe(manifest.outer, manifest.codec, gang.layout, manifest.inner)
    first = manifest.first_head()
    state, head = await trio.to_thread.run_sync(_initial_state, store, manifest, recipe, first)
    pace = Pace(manifest.outer, manifest.inner, manifest.data.seq_len, COMPUTE_S_MAX)
    trainer = trainer_of(gang, manifest.outer, recipe, host.events)
    trainer.adopt(state.theta, None)
    me = Member(host.peer_id, secrets.token_hex(8))
    tempo = Tempo(manifest.run.patience_s)
    shelf = SnapshotShelf(state.size_bytes, SLICE_BYTES_MAX)
    post = Post(me, host.identity, host, state, shelf, trainer, pace, tempo, host.events)
    facts = RunFacts(first, manifest.authority, manifest.run.rounds, manifest.run.max_peers)
    return Participant(config, post, facts, head, node, store, gang.layout, trainer)


def _initial_state(
    store: CheckpointStore, manifest: Manifest, recipe: Recipe, first: Head
) -> tuple[OuterState, Head]:
    """The last checkpoint, or the run's initial weights. Where these come out differently on this machine (or the run
    began from a checkpoint), a head before round 0 stands for "no state yet": it is fetched like any other."""
    loaded = store.load_latest()
    if loaded is not None and tuple(loaded.tensors) == ("theta", *recipe.shared):
        head = msgspec.msgpack.decode(loaded.head, type=Head)
        if head.state_hash == loaded.tree.root:
            return OuterState(list(loaded.tensors.values()), recipe), head
    theta = init_flat(manifest.model, manifest.run.seed)
    state = OuterState([theta, *(torch.zeros_like(theta) for _ in recipe.shared)], recipe)
    if state.tree.root == manifest.genesis[0]:
        return state, first
    return state, msgspec.structs.replace(first, round=-1, state_hash=state.tree.root)


class Participant:
    """Keeps what the engine commits: shelf, checkpoints, worker weights, the published record. Implements `Keeper`."""

    def __init__(
        self,
        config: JoinConfig,
        post: Post,
        facts: RunFacts,
        head: Head,
        node: Node,
        store: CheckpointStore,
        layout: FlatLayout,
        trainer: GangTrainer,
    ) -> None:
        self._config, self._post, self._facts = config, post, facts
        self._store, self._layout, self._trainer = store, layout, trainer
        self._home = Home(config.home)
        self._joined_at = time.time()
        self._saved_at = trio.current_time()
        self._saved_head = head
        self._adopted = head.state_hash
        self._round_began = trio.current_time()
        self._tasks: trio.Nursery | None = None
        post.shelf.publish(post.state.tree, post.state.tensors, msgspec.msgpack.encode(head))
        post.shelf.serve(post.host.rpc)
        self.engine = Engine(post, facts, head, self._load_regroup(head), self)
        self.membership = Membership(node, post.host, head.run_id, self.describe, post.events)

    async def run(self) -> None:
        """Take part until the run is complete; leave the last commit on disk, also when cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._tasks = nursery
                nursery.start_soon(self.membership.run)
                nursery.start_soon(self._trainer.run)
                await self.engine.run()
                await self._finish()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._save(self.engine.head)

    def describe(self) -> MemberRecord:
        """What this peer publishes of itself."""
        own = Own(
            session=self._post.me.session,
            name=self._config.name,
            role="full",
            phase=self.engine.phase,
            joined_at=self._joined_at,
            speed=self._trainer.speed,
            loss=self._trainer.loss,
            val_loss=self._trainer.val_loss,
        )
        return describe(self._post.host, self.engine.head, own)

    # -- Keeper ------------------------------------------------------------------------------------------------------

    def known_peers(self) -> Iterable[str]:
        return [peer for peer in self.membership.view if peer != self._post.me.peer]

    async def committed(self, head: Head, results: list[memoryview]) -> None:
        post = self._post
        encoded = msgspec.msgpack.encode(head)
        await trio.to_thread.run_sync(post.shelf.publish, post.state.tree, post.state.tensors, encoded, results)
        self._trainer.adopt(post.state.theta, self._changed(head, bool(results)))
        if head.members and head.members[0] == post.me:  # one peer measures for all
            self._trainer.validate_round = head.round
        now = trio.current_time()
        post.events.emit(
            "round_committed" if results else "head_adopted",
            round=head.round,
            term=head.term,
            state_hash=head.state_hash.hex(),
            head=head.hash.hex(),
            previous=head.previous.hex(),
            members=len(head.members),
            tokens=head.tokens,
            loss=self._trainer.loss,
            bytes_up=post.host.bytes_up,
            bytes_down=post.host.bytes_down,
            seconds=round(now - self._round_began, 3),
        )
        self._round_began = now
        self._keep_regroup()
        self._home.state_part.unlink(missing_ok=True)  # of a fetch that has become needless
        if now - self._saved_at >= CHECKPOINT_EVERY_S and self._tasks is not None:
            self._saved_at = now
            self._tasks.start_soon(self._save, head)

    async def fetch(self, sighting: Sighting, mine: Head) -> None:
        """Catch up by replaying the last results if we missed only those, else by fetching the whole state."""
        post, head = self._post, sighting.head
        donors = list(sighting.holders)
        began = trio.current_time()
        near = mine.round >= 0 and head.round - mine.round <= ROUNDS_MAX
        replayed = near and await replay(post, mine, head.state_hash, donors)
        if not replayed:
            fetched = await fetch_state(
                post.host.rpc,
                lambda: self._donors(sighting),
                head.state_hash,
                post.state.size_bytes,
                self._home.state_part,
                post.events,
                len(post.state.tensors),
            )
            donors = list(fetched.donors)
            post.state.replace(fetched.tensors, fetched.tree)
        post.events.emit(
            "state_fetched",
            round=head.round,
            donors=len(donors),
            replayed=replayed,
            seconds=round(trio.current_time() - began, 3),
        )

    def _changed(self, head: Head, by_commit: bool) -> tuple[slice, ...] | None:
        """Where the weights changed on the way to `head`; None if the state was fetched, or replayed."""
        if head.state_hash == self._adopted:
            return ()
        self._adopted = head.state_hash
        return self._post.state.changed if by_commit else None

    # -- inside ------------------------------------------------------------------------------------------------------

    def _donors(self, sighting: Sighting) -> list[str]:
        """Who was seen at that head, and whoever has published it since."""
        published = [peer for peer, record in self.membership.view.items() if record.head == sighting.head.hash]
        return list(dict.fromkeys([*sighting.holders, *published]))

    async def _finish(self) -> None:
        head = self.engine.head
        if head.members and head.members[0] == self._post.me:
            self._trainer.validate_round = head.round
            await self._trainer.validate()
        self._post.events.emit("run_finished", round=head.round, state_hash=head.state_hash.hex())

    async def _save(self, head: Head) -> None:
        """Write a checkpoint, unless this head is on disk already or we were on our way to another."""
        if head == self._saved_head or head.round < 0 or head.state_hash != self._post.state.tree.root:
            return
        named = self._post.state.named()
        if await self._store.save(max(head.round, 0), msgspec.msgpack.encode(head), named, self._layout):
            self._saved_head = head

    def _keep_regroup(self) -> None:
        if self.engine.regroup is not None:
            try:
                write_atomically(self._home.regroup, msgspec.msgpack.encode(self.engine.regroup))
            except BarnraiseError as error:
                self._post.events.emit("regroup_unsaved", reason=str(error))

    def _load_regroup(self, head: Head) -> Signed | None:
        """The authority's signature of the term of a head that was read from disk."""
        try:
            signed = msgspec.msgpack.decode(self._home.regroup.read_bytes(), type=Signed)
            begun = open_regroup(signed, self._facts.authority, head.run_id)
        except (OSError, msgspec.MsgspecError, ProtocolViolation):
            return None
        return signed if begun.term == head.term else None
