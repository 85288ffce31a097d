"""The run's owner: founds it, invites to it, holds its door open, begins it and regroups it. It does not train.

Training goes on without it. What it needs to come back after a crash is in its home: key, manifest, initial state, and
the last regroup that it signed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import trio

from dht.node import open_node
from optim.recipes.registry import shared_vectors
from peer.checkpoint import CheckpointStore
from peer.chunks import StateTree, hash_state
from peer.errors import CheckpointError, ConfigError
from peer.events import EventLog
from peer.hf import load_pretrained
from peer.host import Host, HostConfig, open_host
from peer.identity import Identity, Signed
from peer.layout import FlatLayout, init_flat
from swarm.admission import TOKEN_DAYS, issue_token
from swarm.authority import Authority, Memory
from swarm.bans import extend_bans, spread_bans
from swarm.chain import Head, genesis
from swarm.charter import load_charter, save_charter, serve_charter, write_atomically
from swarm.gate import Gate
from swarm.home import Home
from swarm.invite import ADDRESSES_MAX, Invite
from swarm.manifest import PROTOCOL_VERSION, Manifest, check_fit, open_manifest, sign_manifest
from swarm.membership import MEMBERS, MemberRecord, Membership, Own, describe
from swarm.reach import serve_reach
from swarm.run_config import RunConfig
from swarm.snapshots import SnapshotShelf
from swarm.tokenizer_file import read_tokenizer

Kept = TypeVar("Kept", Signed, Head)


@dataclass(frozen=True)
class CoordinatorConfig:
    """`run` founds a new run in `home`; None goes on with the one that is there. `bootstrap`: further meeting points to
    name in the invite, full multiaddrs. `banned`: peers to ban from now on, besides those banned before."""

    home: Path
    run: RunConfig | None
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    banned: tuple[str, ...] = ()


async def run_coordinator(config: CoordinatorConfig, ready: Callable[[Invite], None]) -> None:
    """Coordinate until cancelled; `ready` gets the invite once others can join. Raises ConfigError, ResourceError,
    CheckpointError, IdentityError."""
    home = Home(config.home)
    with home.locked():
        events = EventLog(home.events)
        identity = Identity.load_or_create(home.identity)
        charter, tokenizer, state = await trio.to_thread.run_sync(_found_or_reopen, config, identity, events)
        manifest = open_manifest(charter)
        host_config = HostConfig(
            identity=identity, events=events, listen=config.listen, announce=config.announce, relays=config.relays
        )
        async with open_host(host_config) as host:
            token = None
            if not manifest.run.open:
                token = issue_token(identity, manifest.run_id, time.time(), TOKEN_DAYS * 86400.0)
            gate = Gate(host.rpc, manifest, token)
            bans = extend_bans(home.bans, identity, manifest, config.banned)
            if bans is not None:
                gate.learn_bans(bans)
            serve_charter(host.rpc, charter, tokenizer)
            serve_reach(host)
            shelf = SnapshotShelf(state.tree.size_bytes, 1 << 16)
            shelf.publish(state.tree, list(state.tensors.values()))
            shelf.serve(host.rpc)
            async with open_node(host, config.bootstrap, [MEMBERS], home.addresses, manifest.run_id) as node:
                addresses = (*host.addresses, *config.bootstrap)[:ADDRESSES_MAX]
                coordinator = _Coordinator(config, manifest, host, home)
                membership = Membership(node, host, manifest.run_id, coordinator.describe, events)
                coordinator.membership = membership
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(membership.run)
                    if bans is not None:
                        nursery.start_soon(spread_bans, gate, lambda: membership.view, identity.peer_id, events)
                    nursery.start_soon(coordinator.authority.run)
                    ready(Invite(manifest.run_id, identity.peer_id, addresses, token))


class _Coordinator:
    def __init__(self, config: CoordinatorConfig, manifest: Manifest, host: Host, home: Home) -> None:
        self.membership: Membership | None = None
        self._host = host
        self._began = time.time()
        self.authority = Authority(
            host,
            genesis(manifest.run_id, manifest.genesis),
            manifest.run.min_peers,
            lambda: list(self.membership.view) if self.membership else [],
            _HomeMemory(home),
        )

    def describe(self) -> MemberRecord:
        own = Own(
            session=self.authority.me.session,
            name="coordinator",
            role="coordinator",
            phase=self.authority.standing().phase,
            joined_at=self._began,
        )
        return describe(self._host, self.authority.head, own)


@dataclass(frozen=True)
class _State:
    """The run's initial outer state: "theta" and what else the method shares, flat fp32, shape (P,)."""

    tensors: dict[str, torch.Tensor]
    tree: StateTree


def _found_or_reopen(config: CoordinatorConfig, identity: Identity, events: EventLog) -> tuple[Signed, bytes, _State]:
    kept = load_charter(config.home)
    if kept is None:
        if config.run is None:
            raise ConfigError(f"{config.home} holds no run yet: give a RUN.toml (`peer coordinate --init` writes one).")
        return _found(config.home, config.run, identity, events)
    charter, tokenizer = kept
    manifest = open_manifest(charter)
    if manifest.authority != identity.peer_id:
        raise ConfigError(f"{config.home} belongs to a run of another authority: choose another folder with --home.")
    if config.run is not None and config.run.run.name != manifest.run.name:
        raise ConfigError(
            f"{config.home} holds the run {manifest.run.name!r}: choose another folder with --home for a new one."
        )
    return charter, tokenizer, _reload(config.home, manifest, identity, events)


def _found(path: Path, run: RunConfig, identity: Identity, events: EventLog) -> tuple[Signed, bytes, _State]:
    """Make the initial state, sign the manifest, keep both."""
    tokenizer, tokenizer_name, vocabulary = read_tokenizer(run)
    if run.pretrained is not None:
        model, tensors = load_pretrained(Path(run.pretrained.init))
        layout = FlatLayout.of(model)
        theta = torch.empty(layout.numel)
        for name, view in layout.views(theta).items():
            view.copy_(tensors[name])
    else:
        assert run.model is not None
        model, theta = run.model, init_flat(run.model, run.run.seed)
        layout = FlatLayout.of(model)
    shared = shared_vectors(run.outer, run.codec, layout, run.inner)
    tensors_now = {"theta": theta, **{name: torch.zeros_like(theta) for name in shared}}
    state = _State(tensors_now, hash_state(list(tensors_now.values())))
    if vocabulary > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocabulary} ids and the model only {model.vocab_size}: raise [model] vocab_size,"
            " or name the tokenizer that belongs to the checkpoint."
        )
    try:
        check_fit(model, run.data, tokenizer_name)
    except ValueError as error:
        raise ConfigError(f"RUN.toml does not fit the model: {error}; mend that field.") from error
    manifest = Manifest(
        protocol=PROTOCOL_VERSION,
        authority=identity.peer_id,
        created_at=int(time.time()),
        run=run.run,
        model=model,
        tokenizer=tokenizer_name,
        data=run.data,
        inner=run.inner,
        outer=run.outer,
        codec=run.codec,
        genesis=state.tree.root,
    )
    first = genesis(manifest.run_id, manifest.genesis)
    store = CheckpointStore(Home(path).checkpoints, identity, manifest.run_id, events)
    store.prepare()
    if not trio.from_thread.run(store.save, 0, msgspec.msgpack.encode(first), tensors_now, layout):
        raise CheckpointError(f"the run's initial state cannot be written under {path}: free some space and try again.")
    charter = sign_manifest(identity, manifest)
    save_charter(path, charter, tokenizer)
    return charter, tokenizer, state


def _reload(path: Path, manifest: Manifest, identity: Identity, events: EventLog) -> _State:
    """The initial state, from disk."""
    store = CheckpointStore(Home(path).checkpoints, identity, manifest.run_id, events)
    store.prepare()
    loaded = store.load_latest()
    if loaded is None:
        raise CheckpointError(f"the run's initial state under {path} is gone or damaged: restore it from a backup.")
    return _State(loaded.tensors, loaded.tree)


class _HomeMemory(Memory):
    """What the authority must not forget, in its home. CheckpointError if it cannot be read: guessing could fork the
    run."""

    def __init__(self, home: Home) -> None:
        super().__init__(_read(home.regroup, Signed), _read(home.seen, Head))
        self._home = home

    def keep(self, signed: Signed) -> None:
        super().keep(signed)
        write_atomically(self._home.regroup, msgspec.msgpack.encode(signed))

    def see(self, head: Head) -> None:
        super().see(head)
        write_atomically(self._home.seen, msgspec.msgpack.encode(head))


def _read(path: Path, kind: type[Kept]) -> Kept | None:
    if not path.exists():
        return None
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): restore it from a backup.") from error
