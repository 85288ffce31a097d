"""A server of a training run: it serves the last commit, and moves to the next one between answers.

members --proved heads--> follow --weights--> a worker and a block server a commit --> flows
"""

from __future__ import annotations

import random
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec
import trio

from peer.catalogue import serving
from peer.catalogue.groups import MemberJoined, MemberLeft, MembershipStale

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

from peer.errors import BarnraiseError, ConfigError, NetworkError, ResourceError
from peer.events import Event, EventLog
from peer.ipc.block_messages import CHUNK_TOKENS, LoadAdapter, row_bytes_max
from peer.ipc.span import Span
from peer.loading import loading
from peer.worker.block_client import BlockConfig, BlockWorkerGroup
from swarm.client.session import RunClient
from swarm.inference.record import COMMITS_MAX, SERVERS, ServerRecord, check_commits, servers_key
from swarm.membership.membership import Membership
from swarm.membership.open_peer import OpenPeer
from swarm.parts.base import bring_base
from swarm.parts.weights import BaseWeights, EvenWeights, Weights, part_bytes, parts_of
from swarm.run.bootstrap import ManifestT
from swarm.run.home import Home
from swarm.run.manifest import Manifest
from swarm.serving.commit_servers import CommitServers
from swarm.serving.config import ServeConfig
from swarm.serving.description import ServerDescription
from swarm.serving.memory import blocks_that_fit, memory_for, pages_that_fit
from swarm.serving.model_server import LEAVE_S
from swarm.serving.placement import LOOK_S as PLACEMENT_LOOK_S
from swarm.serving.placement import PlacementView, better_blocks, choose_blocks
from swarm.serving.run_commits import CommitFiles, RunCommit, last_commit, served_type
from swarm.serving.server import BlockServer
from swarm.serving.server_events import tell_load

LOOK_S: Final = 2.0
IDLE_S: Final = 5.0
"""Sessions of an older commit that have computed nothing for this long are between two answers: they are ended, and
their clients continue with the newest."""
_AHEAD_S: Final = 3600.0
_OF_SERVING: Final = frozenset(
    kind.event_name()
    for kind in (
        MemberJoined,
        MemberLeft,
        serving.LoadingBegun,
        serving.LoadingProgress,
        serving.LoadingEnded,
        serving.LoadChanged,
    )
)
"""Events that a training peer does not report of its server: its own have these names, or say more."""


class RunServer:
    """Resources open while a peer serves a run."""

    def __init__(self, config: ServeConfig, home: Home, peer: OpenPeer[ManifestT], manifest: Manifest) -> None:
        """Raises ConfigError for a run that has no commits, or blocks that it has not, and ResourceError."""
        check_commits(manifest)
        self._config, self._home, self._host, self._manifest = config, home, peer.host, manifest
        self._events = _without_namesakes(peer.host.events) if config.beside_training else peer.host.events
        base = BaseWeights.of(manifest)
        self._weights: Weights = base or EvenWeights(manifest.model, served_type(manifest))
        self._base_folders: tuple[Path, ...] = ()
        """Of a run that tunes an adapter: where the base is."""
        self._memory = memory_for(config.compute.memory_bytes) / COMMITS_MAX
        self._room = self._checked_room()
        self._random = random.Random(secrets.token_hex(8))
        self._client = RunClient(
            peer.host, peer.node, peer.run.signed, manifest, peer.run.tokenizer, trains=config.beside_training
        )
        self._files = CommitFiles(home.path / "commits", self._client, self._events)
        self._servers = CommitServers(row_bytes_max(manifest.model.hidden_size) * CHUNK_TOKENS)
        self._description = ServerDescription(peer.host, peer.run.gate, config)
        self._ended_tokens, self._count, self._failed = 0, 0, b""
        self._plan(Span.whole(manifest.model.layers))
        key = servers_key(manifest.run_id)
        self._membership = Membership(peer.node, peer.host, SERVERS, key, self._record, self._events)

    # -- which blocks --------------------------------------------------------------------------------------------------

    def _checked_room(self) -> int:
        """Return how many blocks of each commit there is room for."""
        layers = self._manifest.model.layers
        room = blocks_that_fit(self._weights, self._memory)
        first, end = self._config.blocks or (0, 1)
        if not 0 <= first < end <= layers:
            raise ConfigError(f"--blocks {first}:{end} is not inside the model's {layers} blocks: choose others")
        option = "--serve-memory" if self._config.beside_training else "--memory"
        if room < 1:
            raise ResourceError(f"there is no memory for one block of two commits: free some, or raise {option}")
        if end - first > room:
            raise ResourceError(
                f"{end - first} blocks of two commits need more memory than is free, which is enough for {room}:"
                f" choose fewer with --blocks, or raise {option}"
            )
        return room

    async def _first_span(self) -> Span:
        layers = self._manifest.model.layers
        if self._config.blocks is not None:
            return Span(*self._config.blocks, layers)
        try:
            await self._membership.read()
        except NetworkError as error:
            self._events.emit(MembershipStale(reason=str(error)))
        return choose_blocks(self._placement(), self._room, self._random.random)

    def _placement(self) -> PlacementView:
        model = self._manifest.model
        return PlacementView(model.layers, self._membership.others(), model.shared_blocks)

    def _plan(self, span: Span) -> None:
        self._span, self._since, self._leaving = span, time.time(), False
        self._pages = pages_that_fit(self._weights, span, self._memory)

    # -- serving -------------------------------------------------------------------------------------------------------

    async def run(self, ready: Callable[[Span], None]) -> None:
        """Serve the last commit until cancelled; `ready` is called when the first one is served, and after each move to
        other blocks. Then clients get time to continue with other servers."""
        self._plan(await self._first_span())
        self._host.flows.serve(self._servers)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._membership.run)
                nursery.start_soon(tell_load, self._events, self._load)
                while True:
                    self._plan(await self._serve_span(ready))
        finally:
            self._host.flows.serve(None)

    async def _serve_span(self, ready: Callable[[Span], None]) -> Span:
        """Serve commits until other blocks need this peer more, and return those."""
        self._files.keep(())  # other blocks; or of an earlier process, and not checked since
        await self._bring_base()
        better, left = list[Span](), trio.Event()

        async def follow() -> None:
            try:
                better.append(await self._follow(commits, ready))
            finally:
                with trio.CancelScope(shield=True):
                    await self._leave()
                left.set()

        async with trio.open_nursery() as nursery:
            with trio.CancelScope(shield=True):  # who leaves goes on serving for a while
                async with trio.open_nursery() as commits:
                    nursery.start_soon(follow)
                    await left.wait()
                    commits.cancel_scope.cancel()
        return better[0]

    async def _bring_base(self) -> None:
        """Have the parts of a base that the span needs on this disk. Raises ConfigError, NetworkError, ResourceError,
        CheckpointError."""
        if self._manifest.base is None:
            return
        members = await self._client.members()
        held = await bring_base(
            self._host,
            self._manifest,
            self._home.base,
            self._config.folder,
            lambda: (*members, self._manifest.authority),
            numbers=parts_of(self._weights, self._span),
        )
        self._base_folders = tuple(held.folders)

    async def _follow(self, commits: trio.Nursery, ready: Callable[[Span], None]) -> Span:
        told, look_at = False, 0.0
        while True:
            commit = await self._next_commit()
            if commit is not None:
                tried = trio.Event()
                commits.start_soon(self._serve, commit, tried)
                await tried.wait()
            if self._servers.commits and not told:
                told = True
                self._events.emit(serving.BlocksServed(first=self._span.first, end=self._span.end, pages=self._pages))
                ready(self._span)
            if self._servers.commits and trio.current_time() >= look_at:
                look_at = trio.current_time() + PLACEMENT_LOOK_S * (0.5 + self._random.random())
                better = self._better_blocks()
                if better is not None:
                    self._events.emit(serving.ServerMoves(first=better.first, end=better.end))
                    return better
            await trio.sleep(LOOK_S)

    def _better_blocks(self) -> Span | None:
        return better_blocks(self._placement(), self._record(), self._room, time.time(), self._random.random)

    async def _leave(self) -> None:
        """Take no new sessions, and end once clients have replaced this server, or had time to."""
        self._leaving = True
        if self._servers.stop_admitting():
            with trio.move_on_after(1.0):
                await self._membership.announce()
            await self._servers.leave(LEAVE_S)

    async def _next_commit(self) -> RunCommit | None:
        """Return the last commit, if it is a new one and there is room for it."""
        if len(self._servers.commits) >= COMMITS_MAX:
            return None
        try:
            commit = await last_commit(self._client)
        except BarnraiseError as error:
            self._events.emit(MembershipStale(reason=str(error)))
            return None
        known = {served.name for served in self._servers.commits}
        if commit is None or commit.served.name in known | {self._failed}:
            return None
        newest = max((served.round for served in self._servers.commits), default=-1)
        return commit if commit.served.round >= newest else None

    async def _serve(self, commit: RunCommit, tried: trio.Event) -> None:
        """Serve a commit until a newer one does and its own answers have ended. `tried` is set once it is served, or
        cannot be: the peers have moved on, or its weights are NaN. The next one may succeed."""
        served = commit.served
        failure: BarnraiseError | None = None
        try:
            folder = await self._files.fetch(commit, self._span)
            async with AsyncExitStack() as stack:
                size_bytes = part_bytes(self._weights, self._span)
                with loading(self._events.emit, "load", size_bytes):
                    worker = await stack.enter_async_context(BlockWorkerGroup.open(self._worker_config(folder)))
                nursery = await stack.enter_async_context(trio.open_nursery())
                await self._take_sessions(commit, worker, nursery, tried)
        except BarnraiseError as error:
            failure = error
        except BaseExceptionGroup as group:  # of the worker's own tasks
            failure, rest = _one_of_ours(group)
            if rest is not None:
                raise
        finally:
            tried.set()
            self._servers.remove(served)
        if failure is not None:
            self._failed = served.name
            self._events.emit(serving.CommitUnserved(round=served.round, reason=str(failure)))
        self._files.keep(self._servers.commits)

    async def _take_sessions(
        self, commit: RunCommit, worker: BlockWorkerGroup, nursery: trio.Nursery, tried: trio.Event
    ) -> None:
        served, self._count = commit.served, self._count + 1
        adapters = None if self._manifest.base is None else {served.name: 0}
        server = BlockServer(worker, self._host, nursery, self._membership.knows, adapters)
        server.leaving = self._leaving
        nursery.start_soon(server.run)
        self._servers.add(served, server)
        await self._membership.announce()
        self._events.emit(serving.CommitServed(round=served.round, commit=served.name.hex()))
        tried.set()
        try:
            while True:
                await trio.sleep(LOOK_S / 4)
                if self._servers.commits[0] != served and self._is_idle(server):
                    break
        finally:
            self._servers.remove(served)
            server.end_all("commit", "this server has moved to another commit")
            self._ended_tokens += server.tokens
        nursery.cancel_scope.cancel()

    @staticmethod
    def _is_idle(server: BlockServer) -> bool:
        return server.sessions == 0 or trio.current_time() - server.worked_at > IDLE_S

    def _worker_config(self, folder: Path) -> BlockConfig:
        adapter = self._manifest.model.adapter
        return BlockConfig(
            model=self._weights.model,
            span=self._span,
            dtype=self._weights.dtype,
            quantization=self._weights.quantization,
            window=None,
            folders=self._base_folders or (folder,),
            adapters=() if adapter is None else (LoadAdapter(str(folder.absolute()), adapter),),
            directory=self._home.path / f"blocks-{self._count % COMMITS_MAX}",
            gives_way=self._config.beside_training,
            events=self._events,
            device=self._config.compute.device,
            threads=self._config.compute.threads,
            pages=self._pages,
        )

    def _load(self) -> tuple[ServerRecord, int]:
        return self._record(), len({client for server in self._servers.servers for client in server.clients})

    def _record(self) -> ServerRecord:
        servers = self._servers.servers
        newest = servers[0] if servers else None
        record = self._description.record(self._span, self._weights.dtype, self._pages, newest)
        return msgspec.structs.replace(
            record,
            since=self._since,
            ready_at=self._since if servers else time.time() + _AHEAD_S,
            sessions=sum(server.sessions for server in servers),
            tokens=self._ended_tokens + sum(server.tokens for server in servers),
            leaving=self._leaving,
            commits=self._servers.commits,
        )


def _without_namesakes(events: EventLog) -> EventLog:
    """Return a log that passes on all events but those of `_OF_SERVING`."""

    def tell(event: Event) -> None:
        if event.name not in _OF_SERVING:
            events.emit(event.name, **event.fields)

    return EventLog(watch=tell)


def _one_of_ours(group: BaseExceptionGroup[BaseException]) -> tuple[BarnraiseError | None, object]:
    """Return one error of ours in a group, and the group of all others, None if there are none."""
    ours, rest = group.split(BarnraiseError)
    found: BaseException | None = ours
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found if isinstance(found, BarnraiseError) else None, rest
