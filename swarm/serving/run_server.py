"""A server of a training run: it serves the last commit, and goes on to the next one between answers.

members --proved heads--> follow --weights--> a worker and a block server a commit --> flows
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import trio

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

from peer.config import ModelConfig
from peer.errors import BarnraiseError, ConfigError, ResourceError
from peer.ipc.block_messages import CHUNK_TOKENS, HiddenType, row_bytes_max
from peer.ipc.span import Span
from peer.worker.block_client import BlockConfig, BlockWorkerGroup
from swarm.client.session import RunClient
from swarm.inference.record import COMMITS_MAX, SERVERS, ServerRecord, check_commits, servers_key
from swarm.membership.membership import Membership
from swarm.membership.open_peer import OpenPeer
from swarm.run.home import Home
from swarm.run.manifest import AnyManifest, BlockRange, Manifest
from swarm.serving.commit_servers import CommitServers
from swarm.serving.config import ServeConfig
from swarm.serving.description import ServerDescription
from swarm.serving.memory import blocks_that_fit, memory_for, pages_that_fit
from swarm.serving.run_commits import CommitFiles, RunCommit, last_commit, served_type
from swarm.serving.server import BlockServer, ServedSpan

LOOK_S: Final = 2.0
IDLE_S: Final = 5.0
"""Sessions of an older commit that have computed nothing for so long are between two answers: they are ended, and their
clients go on with the newest."""
_AHEAD_S: Final = 3600.0


@dataclass(frozen=True)
class RunWeights:
    """The weights of any commit of a run, a part a block (`swarm.serving.parts.Weights`)."""

    model: ModelConfig
    dtype: HiddenType
    cuts: tuple[BlockRange, ...]

    @classmethod
    def of(cls, manifest: Manifest) -> RunWeights:
        """Return those of a run."""
        step = manifest.model.shared_blocks
        cuts = tuple((first, first + step) for first in range(0, manifest.model.layers, step))
        return cls(manifest.model, served_type(manifest), cuts)


class RunServer:
    """What is open while a peer serves a run."""

    def __init__(self, config: ServeConfig, home: Home, peer: OpenPeer[AnyManifest], manifest: Manifest) -> None:
        """Raises ConfigError or ResourceError for blocks that cannot be served."""
        self._config, self._home, self._host = config, home, peer.host
        self._manifest = manifest
        check_commits(manifest)
        self._weights = RunWeights.of(self._manifest)
        self._memory = memory_for(config.memory_bytes) / COMMITS_MAX
        self._span = self._chosen_span()
        self._pages = pages_that_fit(self._weights, self._span, self._memory)
        self._client = RunClient(peer.host, peer.node, self._manifest, peer.run.tokenizer)
        self._files = CommitFiles(home.path / "commits", self._client, self._span)
        self._servers = CommitServers(row_bytes_max(self._manifest.model.hidden_size) * CHUNK_TOKENS)
        self._description = ServerDescription(peer.host, peer.run.gate, config)
        self._since = time.time()
        self._ended_tokens, self._count, self._failed = 0, 0, b""
        key = servers_key(self._manifest.run_id)
        self._membership = Membership(peer.node, peer.host, SERVERS, key, self._record)

    def _chosen_span(self) -> Span:
        layers = self._manifest.model.layers
        room = blocks_that_fit(self._weights, self._memory)
        first, end = self._config.blocks or (0, layers)
        if not 0 <= first < end <= layers:
            raise ConfigError(f"--blocks {first}:{end} is not inside the model's {layers} blocks: choose others")
        if end - first > room:
            raise ResourceError(
                f"{end - first} blocks of two commits need more memory than is free, which is enough for {room}:"
                " choose fewer with --blocks, or raise --memory"
            )
        return Span(first, end, layers)

    async def run(self, ready: Callable[[Span], None]) -> None:
        """Serve the last commit until cancelled; `ready` is called when the first one is served."""
        self._files.keep(())  # what an earlier process has left was checked when it was fetched, and not since
        self._host.flows.serve(self._servers)
        told = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._membership.run)
            while True:
                commit = await self._next_commit()
                if commit is not None:
                    tried = trio.Event()
                    nursery.start_soon(self._serve, commit, tried)
                    await tried.wait()
                if self._servers.commits and not told:
                    told = True
                    ready(self._span)
                await trio.sleep(LOOK_S)

    async def _next_commit(self) -> RunCommit | None:
        """Return the last commit, if it is a new one and there is room for it."""
        if len(self._servers.commits) >= COMMITS_MAX:
            return None
        commit = await last_commit(self._client)
        known = {served.name for served in self._servers.commits}
        if commit is None or commit.served.name in known | {self._failed}:
            return None
        newest = max((served.round for served in self._servers.commits), default=-1)
        return commit if commit.served.round >= newest else None

    async def _serve(self, commit: RunCommit, tried: trio.Event) -> None:
        """Serve a commit until a newer one does and its own answers have ended. `tried` is set once it is served, or
        cannot be: the peers have gone on, or its weights are NaN. The next one may do."""
        served = commit.served
        failure: BarnraiseError | None = None
        try:
            folder = await self._files.fetch(commit)
            async with AsyncExitStack() as stack:
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
            self._host.events.emit("commit_unserved", round=served.round, reason=str(failure))
        self._files.keep(self._servers.commits)

    async def _take_sessions(
        self, commit: RunCommit, worker: BlockWorkerGroup, nursery: trio.Nursery, tried: trio.Event
    ) -> None:
        served, self._count = commit.served, self._count + 1
        model = self._manifest.model
        span = ServedSpan(self._span, model.hidden_size, self._weights.dtype, CHUNK_TOKENS, model.max_seq_len)
        server = BlockServer(span, worker, self._host, nursery)
        nursery.start_soon(server.run)
        self._servers.add(served, server)
        await self._membership.announce()
        self._host.events.emit("commit_served", round=served.round, commit=served.name.hex())
        tried.set()
        while True:
            await trio.sleep(LOOK_S / 4)
            if self._servers.commits[0] != served and self._is_idle(server):
                break
        self._servers.remove(served)
        server.end_all("commit", "this server has gone on to another commit")
        self._ended_tokens += server.tokens
        nursery.cancel_scope.cancel()

    @staticmethod
    def _is_idle(server: BlockServer) -> bool:
        return server.sessions == 0 or trio.current_time() - server.worked_at > IDLE_S

    def _worker_config(self, folder: Path) -> BlockConfig:
        return BlockConfig(
            model=self._manifest.model,
            span=self._span,
            dtype=self._weights.dtype,
            window=None,
            folders=(folder,),
            directory=self._home.path / f"blocks-{self._count % COMMITS_MAX}",
            events=self._host.events,
            device=self._config.device,
            threads=self._config.threads,
            pages=self._pages,
        )

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
            commits=self._servers.commits,
        )


def _one_of_ours(group: BaseExceptionGroup[BaseException]) -> tuple[BarnraiseError | None, object]:
    """Return one error of ours in a group, and the group of all others, None if there are none."""
    ours, rest = group.split(BarnraiseError)
    found: BaseException | None = ours
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found if isinstance(found, BarnraiseError) else None, rest
