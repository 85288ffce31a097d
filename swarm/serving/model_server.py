"""A server of a served model: it chooses blocks, fetches and serves them, and moves where it is needed more."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec
import trio

from peer.catalogue.serving import BlocksServed, ServerMoves
from peer.checkpoint.hash_tree import StateTree
from peer.errors import CheckpointError
from peer.ipc.span import Span
from peer.loading import loading
from peer.model.parameter_files import ParameterFiles
from peer.worker.block_client import BlockConfig, BlockWorkerGroup
from swarm.inference.record import SERVERS, ServerRecord, servers_key
from swarm.membership.living import note_living
from swarm.membership.membership import Membership
from swarm.membership.open_peer import OpenPeer
from swarm.parts.part_files import PartStore, fetch_part, missing_parts, part_path, quantize_part
from swarm.parts.weights import part_bytes, part_spans, parts_of
from swarm.run.home import Home
from swarm.run.manifest import AnyManifest, ServedModelManifest
from swarm.serving.config import ServeConfig
from swarm.serving.description import ServerDescription
from swarm.serving.memory import blocks_that_fit, check_room, pages_that_fit
from swarm.serving.placement import LOOK_S, PlacementView, better_blocks, choose_blocks
from swarm.serving.server import BlockServer
from swarm.serving.server_events import arriving, tell_load

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
        self._parts = PartStore(self._manifest)
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
        self._parts.serve(self._host.rpc)
        await self._membership.read()
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
        room = check_room(self._manifest, blocks, self._config.compute.memory_bytes)
        return Span(*blocks, layers) if blocks else choose_blocks(self._placement(), room, self._random.random)

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
            room = blocks_that_fit(self._manifest, self._config.compute.memory_bytes)
            better = better_blocks(self._placement(), self._record(), room, time.time(), self._random.random)
            if better is not None:
                moved.append(better)
                self._host.events.emit(ServerMoves(first=better.first, end=better.end))
                scope.cancel()
                return

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def _checkpoint(self) -> Path | None:
        """The folder that has the parts as they are. Those of a quantized model are never in one, but made of it."""
        return self._config.folder if self._manifest.quantization is None else None

    @property
    def _folders(self) -> list[Path]:
        own = [] if self._checkpoint is None else [self._checkpoint]
        return [*own, self._home.path / "weights"]

    async def _fetch(self, span: Span) -> None:
        """Have the weights of a span on disk, checked. Raises NetworkError, ResourceError, CheckpointError."""
        weights = self._home.path / "weights"
        weights.mkdir(exist_ok=True)
        await self._take_from_disk(parts_of(self._manifest, span))
        missing = missing_parts(self._parts, self._manifest, parts_of(self._manifest, span))
        if not missing:
            return
        if not self._membership.others() and self._host.peer_id == self._manifest.authority:
            raise CheckpointError(
                f"part {missing[0]} of the model is not in {self._folders[0]}, or has changed since it was first"
                " served: put the checkpoint back, name its folder with --model, or choose another --home"
            )
        events = self._host.events
        with loading(events.emit, "fetch", self._size_bytes(missing)) as fetched:
            for place, number in enumerate(missing):
                before = self._size_bytes(missing[:place])
                log = arriving(events, lambda done, before=before: fetched.reach(before + done))  # type: ignore[misc]
                await fetch_part(self._host, self._donors, self._manifest, number, weights, log)
                await self._take(await trio.to_thread.run_sync(ParameterFiles, self._folders), number)
                fetched.reach(self._size_bytes(missing[: place + 1]))

    def _donors(self) -> list[str]:
        """Return the peers to ask for parts."""
        others = [*self._membership.others(), self._manifest.authority]
        return [peer for peer in dict.fromkeys(others) if peer != self._host.peer_id]

    async def _take_from_disk(self, wanted: list[int]) -> None:
        """Serve what the files have: all parts of a checkpoint, and those that were fetched or made of one."""
        manifest, folder = self._manifest, self._config.folder
        if folder is not None and manifest.quantization is not None:
            checkpoint = await trio.to_thread.run_sync(ParameterFiles, [folder])
            for number in (number for number in wanted if not self._path(number).exists()):
                await trio.to_thread.run_sync(quantize_part, checkpoint, manifest, number, self._home.path / "weights")
        plain = self._checkpoint is not None
        numbers = [
            number
            for number in (wanted if folder is None else range(len(manifest.cuts)))
            if manifest.checkpoint[number] not in self._parts.roots and (plain or self._path(number).exists())
        ]
        files = await trio.to_thread.run_sync(ParameterFiles, self._folders)
        if self._trees or not numbers:
            for number in numbers:
                await self._take(files, number, tree=self._trees[number])
            return
        with loading(self._host.events.emit, "check", self._size_bytes(numbers)) as checked:
            for number in numbers:
                await self._take(files, number, checked.add)

    async def _take(
        self,
        files: ParameterFiles,
        number: int,
        hashed: Callable[[int], None] | None = None,
        tree: StateTree | None = None,
    ) -> None:
        """Serve a part from now on, if the files have it; see `PartStore.add`."""
        added = await trio.to_thread.run_sync(self._parts.add, files, number, hashed, tree)
        if not added:  # where it was fetched it is damaged, and fetched again
            self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return part_path(self._home.path / "weights", number)

    def _size_bytes(self, numbers: Sequence[int]) -> int:
        manifest, spans = self._manifest, part_spans(self._manifest)
        return sum(part_bytes(manifest, spans[number]) for number in numbers)

    # -- serving -------------------------------------------------------------------------------------------------------

    async def _serve(self, span: Span, ready: Callable[[Span], None]) -> Span:
        """Serve a span until another one is better, and return that."""
        manifest, config = self._manifest, self._config
        self._pages = pages_that_fit(manifest, span, config.compute.memory_bytes)
        worker_config = BlockConfig(
            model=manifest.model,
            span=span,
            dtype=manifest.dtype,
            window=manifest.window,
            quantization=manifest.quantization,
            folders=tuple(self._folders),
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
            server = BlockServer(worker, self._host, nursery, self._membership.knows)
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
