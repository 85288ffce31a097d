"""A server of a served model: it chooses blocks, fetches and serves them, and moves where it is needed more."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final

import msgspec
import trio

from peer.catalogue.serving import BlocksServed, ServerMoves
from peer.checkpoint.hash_tree import StateTree
from peer.errors import CheckpointError
from peer.ipc.span import Span
from peer.loading import loading
from peer.worker.block_client import BlockConfig, BlockWorkerGroup
from swarm.inference.record import SERVERS, ServerRecord, servers_key
from swarm.membership.living import note_living
from swarm.membership.membership import Membership
from swarm.membership.open_peer import OpenPeer
from swarm.parts.held_parts import HeldParts
from swarm.parts.weights import part_bytes, parts_of
from swarm.run.home import Home
from swarm.run.manifest import AnyManifest, ServedModelManifest
from swarm.serving.adapters import HeldAdapters
from swarm.serving.config import ServeConfig
from swarm.serving.description import ServerDescription
from swarm.serving.memory import blocks_that_fit, check_room, memory_for, pages_that_fit
from swarm.serving.placement import LOOK_S, PlacementView, better_blocks, choose_blocks
from swarm.serving.server import BlockServer
from swarm.serving.server_events import tell_load
from swarm.state.server import serve_snapshots

LEAVE_S: Final = 5.0
"""The time that clients get to replace a server that leaves."""


class ModelServer:
    """Resources open while a peer serves a model."""

    def __init__(
        self,
        config: ServeConfig,
        home: Home,
        peer: OpenPeer[AnyManifest],
        manifest: ServedModelManifest,
        trees: Sequence[StateTree] = (),
    ) -> None:
        """`trees`: of each part, if the files of `config.folder` have just been hashed."""
        self._config, self._home, self._host = config, home, peer.host
        self._manifest, self._trees = manifest, trees
        self._parts = HeldParts(peer.host.events, manifest, home.path / "weights", config.folder)
        self._adapters = HeldAdapters(home, manifest, peer.host.events)
        self._description = ServerDescription(peer.host, peer.run.gate, config)
        self._random = random.Random(secrets.token_hex(8))
        self._span = Span.whole(self._manifest.model.layers)
        self._since = self._ready_at = time.time()
        self._server: BlockServer | None = None
        self._served_tokens = 0
        self._pages = 0
        key = servers_key(self._manifest.run_id)
        self._membership = Membership(peer.node, peer.host, SERVERS, key, self._record)

    async def run(self, ready: Callable[[Span], None]) -> None:
        """Serve spans one after the other until cancelled."""
        serve_snapshots(self._host.rpc, [self._parts.store, *self._adapters.stores])
        await self._membership.read()
        await self._adapters.bring(self._host, self._donors)
        span = self._first_span()
        self._plan(span)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._membership.run)
            nursery.start_soon(tell_load, self._host.events, self._load)
            nursery.start_soon(note_living, self._host, self._home, self._membership.others)
            while True:
                await self._fetch(span)
                span = await self._serve(span, ready)
                self._plan(span)

    # -- which blocks --------------------------------------------------------------------------------------------------

    def _first_span(self) -> Span:
        blocks, layers = self._config.blocks, self._manifest.model.layers
        room = check_room(self._manifest, blocks, self._memory_bytes)
        return Span(*blocks, layers) if blocks else choose_blocks(self._placement(), room, self._random.random)

    @property
    def _memory_bytes(self) -> float | None:
        """The bytes for blocks and caches: the adapters have theirs."""
        size_bytes, given = self._adapters.size_bytes, self._config.compute.memory_bytes
        return memory_for(given) - size_bytes if size_bytes else given

    def _placement(self) -> PlacementView:
        return PlacementView(self._manifest.model.layers, self._membership.others(), self._manifest.model.shared_blocks)

    def _plan(self, span: Span) -> None:
        """Say which blocks this peer is going to serve, before it has them."""
        absent = self._parts.missing(parts_of(self._manifest, span))
        wait_s = 5.0 + 60.0 * bool(absent)
        self._span, self._since, self._ready_at = span, time.time(), time.time() + wait_s

    async def _move(self, scope: trio.CancelScope, moved: list[Span]) -> None:
        """Wait until other blocks need this peer more."""
        while True:
            await trio.sleep(LOOK_S * (0.5 + self._random.random()))
            room = blocks_that_fit(self._manifest, self._memory_bytes)
            better = better_blocks(self._placement(), self._record(), room, time.time(), self._random.random)
            if better is not None:
                moved.append(better)
                self._host.events.emit(ServerMoves(first=better.first, end=better.end))
                scope.cancel()
                return

    # -- weights -------------------------------------------------------------------------------------------------------

    async def _fetch(self, span: Span) -> None:
        """Have the weights of a span on disk, checked. Raises NetworkError, ResourceError, CheckpointError."""
        wanted = parts_of(self._manifest, span)
        await self._parts.take_from_disk(wanted, self._trees)
        missing = self._parts.missing(wanted)
        if not missing:
            return
        if not self._membership.others() and self._host.peer_id == self._manifest.authority:
            raise CheckpointError(
                f"part {missing[0]} of the model is not in {self._parts.folders[0]}, or has changed since it was first"
                " served: put the checkpoint back, name its folder with --model, or choose another --home"
            )
        await self._parts.fetch(self._host, missing, self._donors)

    def _donors(self) -> list[str]:
        """Return the peers to ask for parts."""
        others = [*self._membership.others(), self._manifest.authority]
        return [peer for peer in dict.fromkeys(others) if peer != self._host.peer_id]

    # -- serving -------------------------------------------------------------------------------------------------------

    async def _serve(self, span: Span, ready: Callable[[Span], None]) -> Span:
        """Serve a span until another one is better, and return that."""
        manifest, config = self._manifest, self._config
        self._pages = pages_that_fit(manifest, span, self._memory_bytes)
        worker_config = BlockConfig(
            model=manifest.model,
            span=span,
            dtype=manifest.dtype,
            window=manifest.window,
            quantization=manifest.quantization,
            adapters=self._adapters.loads,
            folders=tuple(self._parts.folders),
            directory=config.home,
            events=self._host.events,
            device=config.compute.device,
            threads=config.compute.threads,
            pages=self._pages,
        )
        moved = list[Span]()
        async with AsyncExitStack() as stack:
            with loading(self._host.events.emit, "load", part_bytes(manifest, span)):
                worker = await stack.enter_async_context(BlockWorkerGroup.open(worker_config))
            nursery = await stack.enter_async_context(trio.open_nursery())
            server = BlockServer(worker, self._host, nursery, self._membership.knows, self._adapters.numbers)
            self._server = server
            self._host.flows.serve(server)
            nursery.start_soon(server.run)
            self._ready_at = time.time()
            await self._membership.announce()
            self._host.events.emit(BlocksServed(first=span.first, end=span.end, pages=self._pages))
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

    def _load(self) -> tuple[ServerRecord, int]:
        return self._record(), 0 if self._server is None else len(self._server.clients)

    def _record(self) -> ServerRecord:
        server = self._server
        record = self._description.record(self._span, self._manifest.dtype, self._pages, server)
        return msgspec.structs.replace(
            record,
            since=self._since,
            ready_at=self._ready_at,
            tokens=record.tokens + self._served_tokens,
            leaving=server is not None and server.leaving,
        )
