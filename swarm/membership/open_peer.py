"""Opening a peer of a run: its home, then a host, the run's gate, and a DHT node for the run's records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from dht.node import Node, NodeConfig, Schema, open_node
from peer.events import EventLog, Watcher
from peer.identity import Identity
from peer.net.host import Host
from peer.net.lan.discovery import Lan, on_lan
from swarm.membership.reachability import serve_dial_back
from swarm.membership.told_events import serve_events
from swarm.run.bootstrap import EnteredRun, ManifestT
from swarm.run.gate import Gate
from swarm.run.home import Home
from swarm.run.manifest_transfer import serve_run_files

Schemas = Callable[[Gate], Sequence[Schema[Any]]]
"""Returns the kinds of records that the peers of a run publish."""


@contextmanager
def open_home(path: Path, watch: Watcher | None = None) -> Iterator[tuple[Home, Identity, EventLog]]:
    """Lock a home for this process inside the block; yields it, and the key and the event log in it. `watch` gets every
    event. Raises ResourceError, IdentityError."""
    home = Home(path)
    with home.locked():
        events = EventLog(home.events, watch=watch)
        yield home, Identity.load_or_create(home.identity), events


@dataclass(frozen=True)
class OpenPeer(Generic[ManifestT]):
    """Resources open for as long as a peer is in a run."""

    host: Host
    run: EnteredRun[ManifestT]
    node: Node


@asynccontextmanager
async def open_peer(
    opening: AbstractAsyncContextManager[Host],
    home: Home,
    enter: Callable[[Host], Awaitable[EnteredRun[ManifestT]]],
    schemas: Schemas,
    lan: Lan | None = None,
    is_client: bool = False,
) -> AsyncIterator[OpenPeer[ManifestT]]:
    """Be a peer of a run inside the block. `opening`: by `open_host`. `enter` finds the run's rules and guards the host
    by its gate: by an invite (`enter_run`) or, at the peer that creates the run, from its home. `schemas`: of the
    records to keep and read. `lan` finds peers on the local network. A client serves nothing, and has no use for a node
    that reaches no peer.

    Raises what `open_host` and `enter` raise; DialError if a client reaches no peer.
    """
    async with opening as host, on_lan(lan, host):
        run = await enter(host)
        if not is_client:
            serve_run_files(host.rpc, run.signed, run.tokenizer)
            serve_dial_back(host)
            serve_events(host)
        met, known, run_id = None if lan is None else lan.met, host.reach.bootstrap, run.manifest.run_id
        async with open_node(
            host, NodeConfig(run_id, known, home.addresses, is_client, met=met), schemas(run.gate)
        ) as node:
            yield OpenPeer(host, run, node)
