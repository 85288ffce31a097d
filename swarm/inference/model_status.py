"""The status of a served model, or of a run and those that serve it: one reading of the servers' records."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from pathlib import Path

import msgspec

from swarm.client.session import RunClient, open_client
from swarm.client.status import SwarmStatus, look
from swarm.inference.coverage import block_states, server_state, stretches, troubles
from swarm.inference.record import SERVERS, ServedCommit, ServerRecord, run_schemas, servers_key
from swarm.inference.route import RouteView
from swarm.membership.membership import read_records
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest, ServedModelManifest


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One block server as it described itself."""

    peer: str
    name: str
    version: str
    first: int
    end: int
    state: str
    """held: it takes sessions; full, arriving or leaving: it takes none now."""
    ready_in_s: float
    """Seconds until it expects to serve its blocks."""
    sessions: int
    pages: int
    pages_free: int
    waiting_tokens: int
    step_ms: float
    uplink_bytes_s: float
    tokens: int
    """Served since it started, as `bytes_up` and `bytes_down`."""
    bytes_up: int
    bytes_down: int
    wire: list[str]
    pinned: bool
    rounds: list[int]
    """Of a training run: those of the commits that it serves, newest first."""
    age_s: float
    """Seconds since it wrote its record."""


class BlockStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks `first` to before `end`, which have the same servers."""

    first: int
    end: int
    state: str
    """The best that any of their servers is; "unserved" without one."""
    servers: list[str]
    """The names of those that serve them."""


class ServedModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A served model at one time."""

    run_id: str
    name: str
    open: bool
    dtype: str
    blocks: int
    parts: int
    """Parts of the checkpoint."""
    servers: list[ServerStatus]
    coverage: list[BlockStatus]
    troubles: list[str]
    """Why a new session cannot begin; empty if it can."""


class ServedRunStatus(SwarmStatus, frozen=True, kw_only=True):
    """A training run at one time, with the servers of its commits."""

    servers: list[ServerStatus]
    served_round: int | None
    """That of the commit that new answers get: the newest all of whose blocks are served. None: there is none."""
    troubles: list[str]
    """Why the newest commit takes no new session, where there are servers and none takes one."""


async def read_any_status(invite: Invite, home: Path | None = None) -> ServedRunStatus | ServedModelStatus:
    """Connect to a run or a served model and read its status. Raises NotAdmitted, or DialError if no peer answers."""
    async with open_any(invite, home) as client:
        return await any_status(client)


def open_any(invite: Invite, home: Path | None = None) -> AbstractAsyncContextManager[RunClient]:
    """Connect to a run or a served model inside the block, for `any_status`. Raises as `read_any_status`."""
    return open_client(invite, home, schemas=run_schemas)


async def any_status(client: RunClient) -> ServedRunStatus | ServedModelStatus:
    """Read the status by a connection that is open."""
    manifest = client.manifest
    seen = await look(client) if isinstance(manifest, Manifest) else None
    records = await read_records(client.node, client.host, SERVERS, servers_key(manifest.run_id))
    if isinstance(manifest, Manifest):
        assert seen is not None
        return run_status(seen, manifest.model.layers, records, time.time())
    return model_status(manifest, records, time.time())


def run_status(seen: SwarmStatus, blocks: int, records: Mapping[str, ServerRecord], now: float) -> ServedRunStatus:
    """Return the status of a run with the servers that `records` show at `now`, Unix time. All servers of an answer
    have one commit."""
    served_round, wrong = None, list[str]()
    commits: Sequence[ServedCommit | None] = sorted({c for r in records.values() for c in r.commits}, reverse=True)
    for commit in commits or [None] * bool(records):
        having = {peer: record for peer, record in records.items() if record.has(commit)}
        lacking = troubles(block_states(RouteView(blocks, having, now, lambda peer: None)))
        if commit is not None and not lacking:
            served_round, wrong = commit.round, []
            break
        wrong = wrong or lacking
    return ServedRunStatus(
        **msgspec.structs.asdict(seen), servers=_servers(records, now), served_round=served_round, troubles=wrong
    )


def model_status(manifest: ServedModelManifest, records: Mapping[str, ServerRecord], now: float) -> ServedModelStatus:
    """Return the status that `records` show at `now`, Unix time."""
    layers = manifest.model.layers
    states = block_states(RouteView(layers, records, now, lambda peer: None))
    servers = _servers(records, now)
    borders = {border for record in records.values() for border in (record.first, record.end)}
    coverage = list[BlockStatus]()
    for first, end, state in stretches(states):
        cuts = [first, *sorted(border for border in borders if first < border < end), end]
        for begin, stop in pairwise(cuts):
            holders = [server.name for server in servers if server.first <= begin < server.end]
            coverage.append(BlockStatus(first=begin, end=stop, state=state, servers=holders))
    return ServedModelStatus(
        run_id=manifest.run_id,
        name=manifest.name,
        open=manifest.open,
        dtype=manifest.dtype,
        blocks=layers,
        parts=len(manifest.cuts),
        servers=servers,
        coverage=coverage,
        troubles=troubles(states),
    )


def _servers(records: Mapping[str, ServerRecord], now: float) -> list[ServerStatus]:
    servers = [_server(peer, record, now) for peer, record in records.items()]
    return sorted(servers, key=lambda server: (server.first, server.end, server.name, server.peer))


def _server(peer: str, record: ServerRecord, now: float) -> ServerStatus:
    return ServerStatus(
        peer=peer,
        name=record.name,
        version=record.version,
        first=record.first,
        end=record.end,
        state=server_state(record, now),
        ready_in_s=max(0.0, round(record.ready_at - now, 1)),
        sessions=record.sessions,
        pages=record.pages,
        pages_free=record.pages_free,
        waiting_tokens=record.waiting_tokens,
        step_ms=record.step_ms,
        uplink_bytes_s=record.uplink_bytes_s,
        tokens=record.tokens,
        bytes_up=record.bytes_up,
        bytes_down=record.bytes_down,
        wire=list(record.wire),
        pinned=record.pinned,
        rounds=[commit.round for commit in record.commits],
        age_s=max(0.0, round(now - record.at, 1)),
    )
