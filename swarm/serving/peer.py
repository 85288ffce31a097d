"""One block server's life: from a checkpoint or an invite to blocks that others can use, and back.

home lock -> identity -> host -> manifest -> gate -> DHT node -> blocks -> parts -> worker -> flows
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import trio

from peer.errors import CheckpointError, ConfigError, ResourceError
from peer.events import Watcher
from peer.files import write_atomically
from peer.identity import Identity
from peer.ipc.block_messages import CHUNK_TOKENS, WIRE_TYPES
from peer.ipc.span import Span
from peer.model.parameter_files import ParameterFiles
from peer.net.host import Host, HostConfig
from peer.worker.block_client import BlockConfig, BlockWorkerGroup
from swarm.inference.record import SERVERS, ServerRecord, server_schema, servers_key
from swarm.membership.member_record import NAME_CHARS_MAX, installed_version, short_addresses
from swarm.membership.membership import Membership
from swarm.membership.open_peer import OpenPeer, PeerConfig, open_home, open_peer
from swarm.run.bootstrap import EnteredRun, enter_run
from swarm.run.gate import Gate
from swarm.run.guests import GuestBook
from swarm.run.home import Home
from swarm.run.invite import ADDRESSES_MAX, Invite
from swarm.run.inviting import printed_invite
from swarm.run.manifest import ServedModelManifest, open_served_manifest
from swarm.run.manifest_transfer import load_run_files
from swarm.serving.create_model import CreatedModel, create_model
from swarm.serving.memory import blocks_that_fit, pages_that_fit
from swarm.serving.parts import PartStore, fetch_part, missing_parts, part_path, parts_of
from swarm.serving.placement import LOOK_S, PlacementView, better_blocks, choose_blocks
from swarm.serving.server import BlockServer, ServedSpan

LEAVE_S: Final = 5.0
"""What clients get to replace a server that leaves."""


@dataclass(frozen=True)
class ServeConfig:
    """The user's choices for one block server."""

    home: Path
    invite: Invite | None = None
    """Joins the served model of this invite; else `folder` founds one."""
    folder: Path | None = None
    """A checkpoint in the Hugging Face layout; with an invite: a copy to read parts from."""
    name: str = ""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    device: str = "auto"
    threads: int | None = None
    blocks: tuple[int, int] | None = None
    """The blocks to serve; None: where they are needed most."""
    memory_bytes: float | None = None
    """For weights and caches; None: six tenths of what is free."""
    is_open: bool = False
    """Whether any peer may serve and use a model that is founded; else only with its invite."""


async def run_server(config: ServeConfig, ready: Callable[[Invite, Span], None], watch: Watcher | None = None) -> None:
    """Serve blocks until cancelled. `ready` gets an invite to the model and the blocks, each time it begins to serve,
    `watch` every event.

    Raises ConfigError, NetworkError, NotAdmitted, ResourceError, CheckpointError.
    """
    with open_home(config.home, watch) as opened:
        home, identity = opened.home, opened.identity
        founded = await trio.to_thread.run_sync(_create_or_reopen, config, identity)
        host_config = HostConfig(
            identity=identity,
            events=opened.events,
            listen=config.listen,
            announce=config.announce,
            relays=config.relays,
        )

        async def enter(host: Host) -> EnteredRun[ServedModelManifest]:
            entered = await _enter(config, home, host, founded)
            host.events.emit("model_entered", name=entered.manifest.name, blocks=entered.manifest.model.layers)
            return entered

        known = config.invite.addresses if config.invite is not None else ()
        peer_config = PeerConfig(host_config, home, known)
        async with open_peer(peer_config, enter, lambda gate: [server_schema(gate)]) as peer:
            serving = _ServingPeer(config, home, peer)
            invite = serving.invite(identity)
            write_atomically(home.invite, f"{invite}\n".encode())
            home.note_listening(peer.host.addresses)
            await serving.run(lambda span: ready(invite, span))


def _create_or_reopen(config: ServeConfig, identity: Identity) -> CreatedModel | None:
    """Return the model that this peer founds or has founded; None if it joins one."""
    if config.invite is not None:
        return None
    kept = load_run_files(config.home)
    if kept is not None:
        manifest = open_served_manifest(kept[0])
        if manifest.authority != identity.peer_id:
            raise ConfigError(f"{config.home} serves a model of another founder: give its INVITE, or another --home")
        return CreatedModel(kept[0], manifest, kept[1])
    if config.folder is None:
        raise ConfigError(f"{config.home} holds no served model yet: name a checkpoint with --model")
    return create_model(config.home, config.folder, identity, name=_model_name(config.folder), is_open=config.is_open)


def _model_name(folder: Path) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in folder.resolve().name)[:64] or "model"


async def _enter(
    config: ServeConfig, home: Home, host: Host, founded: CreatedModel | None
) -> EnteredRun[ServedModelManifest]:
    if founded is not None:
        gate = Gate(host.rpc, founded.manifest, host.identity, guests=GuestBook(home.guests))
        return EnteredRun(founded.signed, founded.manifest, founded.tokenizer, gate)
    assert config.invite is not None
    chain = config.invite.membership(host.identity)
    return await enter_run(host, config.invite, home, chain, open_served_manifest)


class _ServingPeer:
    """What is open while a peer serves."""

    def __init__(self, config: ServeConfig, home: Home, peer: OpenPeer[ServedModelManifest]) -> None:
        self._config, self._home, self._host = config, home, peer.host
        self._manifest, self._gate = peer.run.manifest, peer.run.gate
        self._parts = PartStore(self._manifest)
        self._session, self._began = secrets.token_hex(8), time.time()
        self._random = random.Random(self._session)
        self._span = Span.whole(self._manifest.model.layers)
        self._since = self._ready_at = time.time()
        self._server: BlockServer | None = None
        self._served_tokens = 0
        self._load = (0, 0, 0.0)
        self._pages = 0
        key = servers_key(self._manifest.run_id)
        self._membership = Membership(peer.node, peer.host, SERVERS, key, self._record)

    def invite(self, identity: Identity) -> Invite:
        """Return an invite to the model, which also works through this peer: a new one of its founder's, else the one
        that this peer came by."""
        addresses = self._host.addresses[:ADDRESSES_MAX]
        came_by = self._config.invite
        if came_by is not None:
            both = dict.fromkeys((*addresses[: ADDRESSES_MAX // 2], *came_by.addresses))
            return msgspec.structs.replace(came_by, addresses=tuple(both)[:ADDRESSES_MAX])
        return printed_invite(self._home, identity, self._manifest, addresses, self._gate.bans)

    async def run(self, ready: Callable[[Span], None]) -> None:
        """Serve spans one after the other until cancelled."""
        self._parts.serve(self._host.rpc)
        await self._membership.read()
        span = self._first_span()
        self._plan(span)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._membership.run)
            while True:
                await self._fetch(span)
                span = await self._serve(span, ready)
                self._plan(span)

    # -- which blocks --------------------------------------------------------------------------------------------------

    def _first_span(self) -> Span:
        blocks, room = self._config.blocks, blocks_that_fit(self._manifest, self._config.memory_bytes)
        layers = self._manifest.model.layers
        if blocks is not None:
            first, end = blocks
            if not 0 <= first < end <= layers:
                raise ConfigError(f"--blocks {first}:{end} is not inside the model's {layers} blocks: choose others")
            if end - first > room:
                raise ResourceError(
                    f"{end - first} blocks need more memory than is free, which is enough for {room}: choose fewer, or"
                    " raise --memory"
                )
            return Span(first, end, layers)
        if room < 1:
            raise ResourceError("there is no memory for a single block: free some, or raise --memory")
        return choose_blocks(self._placement(), room, self._random.random)

    def _placement(self) -> PlacementView:
        return PlacementView(self._manifest.model.layers, self._membership.others(), self._manifest.model.shared_blocks)

    def _plan(self, span: Span) -> None:
        """Say which blocks this peer is going to serve, before it has them."""
        absent = missing_parts(self._parts, self._manifest, parts_of(self._manifest, span))
        wait_s = 5.0 + 60.0 * bool(absent)
        self._span, self._since, self._ready_at = span, time.time(), time.time() + wait_s

    async def _move(self, scope: trio.CancelScope, moved: list[Span]) -> None:
        """Wait until other blocks need this peer more."""
        while True:
            await trio.sleep(LOOK_S * (0.5 + self._random.random()))
            room = blocks_that_fit(self._manifest, self._config.memory_bytes)
            better = better_blocks(self._placement(), self._record(), room, time.time(), self._random.random)
            if better is not None:
                moved.append(better)
                self._host.events.emit("server_moves", first=better.first, end=better.end)
                scope.cancel()
                return

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def _folders(self) -> list[Path]:
        own = [] if self._config.folder is None else [self._config.folder]
        return [*own, self._home.path / "weights"]

    async def _fetch(self, span: Span) -> None:
        """Have the weights of a span on disk, checked. Raises NetworkError, ResourceError, CheckpointError."""
        weights = self._home.path / "weights"
        weights.mkdir(exist_ok=True)
        await trio.to_thread.run_sync(self._take_from_disk, parts_of(self._manifest, span))
        for number in missing_parts(self._parts, self._manifest, parts_of(self._manifest, span)):
            if not self._membership.others() and self._host.peer_id == self._manifest.authority:
                raise CheckpointError(
                    f"part {number} of the model is not in {self._folders[0]}, or has changed since it was first"
                    " served: put the checkpoint back, or choose another --home"
                )
            await fetch_part(self._host, self._donors, self._manifest, number, weights)
            await trio.to_thread.run_sync(self._take_from_disk, [number])

    def _donors(self) -> list[str]:
        """Return the peers to ask for parts."""
        others = [*self._membership.others(), self._manifest.authority]
        return [peer for peer in dict.fromkeys(others) if peer != self._host.peer_id]

    def _take_from_disk(self, wanted: list[int]) -> None:
        """Serve what the files have: all parts of a checkpoint, and those that were fetched."""
        files = ParameterFiles(self._folders)
        whole = self._config.folder is not None
        for number in range(len(self._manifest.cuts)) if whole else wanted:
            here = part_path(self._home.path / "weights", number).exists()
            if self._manifest.checkpoint[number] in self._parts.roots or not (whole or here):
                continue
            if not self._parts.add(files, number) and here:
                part_path(self._home.path / "weights", number).unlink()  # damaged: fetched again

    # -- serving -------------------------------------------------------------------------------------------------------

    async def _serve(self, span: Span, ready: Callable[[Span], None]) -> Span:
        """Serve a span until another one is better, and return that."""
        manifest, config = self._manifest, self._config
        self._pages = pages_that_fit(manifest, span, config.memory_bytes)
        worker_config = BlockConfig(
            model=manifest.model,
            span=span,
            dtype=manifest.dtype,
            window=manifest.window,
            folders=tuple(self._folders),
            directory=config.home,
            events=self._host.events,
            device=config.device,
            threads=config.threads,
            pages=self._pages,
        )
        served = ServedSpan(span, manifest.model.hidden_size, manifest.dtype, CHUNK_TOKENS, manifest.model.max_seq_len)
        moved = list[Span]()
        async with AsyncExitStack() as stack:
            worker = await stack.enter_async_context(BlockWorkerGroup.open(worker_config))
            nursery = await stack.enter_async_context(trio.open_nursery())
            server = BlockServer(served, worker, self._host, nursery)
            self._server = server
            self._host.flows.serve(server)
            nursery.start_soon(server.run)
            self._ready_at = time.time()
            await self._membership.announce()
            self._host.events.emit("blocks_served", first=span.first, end=span.end, pages=self._pages)
            ready(span)
            with trio.CancelScope() as scope:
                try:
                    if config.blocks is None:
                        await self._move(scope, moved)
                    else:
                        await trio.sleep_forever()
                finally:
                    with trio.CancelScope(shield=True):
                        await self._leave(server)
            nursery.cancel_scope.cancel()
        self._served_tokens += server.tokens
        self._server = None
        return moved[0]

    async def _leave(self, server: BlockServer) -> None:
        server.leaving = True
        if server.sessions:
            with trio.move_on_after(1.0):
                await self._membership.announce()
            await server.leave(LEAVE_S)
        self._host.flows.serve(None)

    def _record(self) -> ServerRecord:
        host, server, span = self._host, self._server, self._span
        load = None if server is None else server.worker_load
        return ServerRecord(
            session=self._session,
            name="".join(c if c.isprintable() else "?" for c in self._config.name[:NAME_CHARS_MAX]),
            version=installed_version(),
            addresses=short_addresses(host.addresses, host.peer_id),
            joined_at=self._began,
            at=time.time(),
            first=span.first,
            end=span.end,
            since=self._since,
            ready_at=self._ready_at,
            dtype=self._manifest.dtype,
            wire=WIRE_TYPES,
            pages=self._pages,
            pages_free=self._pages if load is None else load.pages_free,
            sessions=0 if server is None else server.sessions,
            waiting_tokens=0 if load is None else load.waiting_tokens,
            step_ms=0.0 if load is None else load.step_ms,
            uplink_bytes_s=0.0 if server is None else server.uplink.bytes_s,
            tokens=self._served_tokens + (0 if server is None else server.tokens),
            bytes_up=host.bytes_up,
            bytes_down=host.bytes_down,
            pinned=self._config.blocks is not None,
            leaving=server is not None and server.leaving,
            credential=self._gate.chain,
        )
