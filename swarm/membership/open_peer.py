"""What every peer of a run opens: its home, then a host, the run's gate, and a DHT node for the run's records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from dht.node import Node, NodeConfig, Schema, open_node
from peer.events import EventLog, Watcher
from peer.identity import Identity
from peer.net.host import Host, HostConfig, open_host
from peer.net.lan.discovery import Lan, on_lan
from swarm.membership.reachability import serve_dial_back
from swarm.membership.told_events import serve_events
from swarm.run.bootstrap import EnteredRun, ManifestT
from swarm.run.gate import Gate
from swarm.run.home import Home
from swarm.run.manifest_transfer import serve_run_files

Schemas = Callable[[Gate], Sequence[Schema[Any]]]
"""Returns the kinds of records that the peers of a run publish."""


@dataclass(frozen=True)
class OpenHome:
    """A home that is locked for this process, with the key and the event log in it."""

    home: Home
    identity: Identity
    events: EventLog


@contextmanager
def open_home(path: Path, watch: Watcher | None = None) -> Iterator[OpenHome]:
    """Lock a home inside the block; `watch` gets every event. Raises ResourceError, IdentityError."""
    home = Home(path)
    with home.locked():
        events = EventLog(home.events, watch=watch)
        yield OpenHome(home, Identity.load_or_create(home.identity), events)


@dataclass(frozen=True)
class PeerConfig:
    """What a peer is opened with."""

    host: HostConfig
    home: Home
    bootstrap: tuple[str, ...] = ()
    """Addresses of peers of the run."""
    lan: Lan | None = None
    """Finds peers of the run on the local network; None: no peer looks, and none is told."""
    is_client: bool = False
    """A client serves nothing, and has no use for a node that reaches no peer."""


@dataclass(frozen=True)
class OpenPeer(Generic[ManifestT]):
    """What is open for as long as a peer is in a run."""

    host: Host
    run: EnteredRun[ManifestT]
    node: Node


@asynccontextmanager
async def open_peer(
    config: PeerConfig, enter: Callable[[Host], Awaitable[EnteredRun[ManifestT]]], schemas: Schemas
) -> AsyncIterator[OpenPeer[ManifestT]]:
    """Be a peer of a run inside the block. `enter` finds the run's rules and guards the host by its gate: by an invite
    (`enter_run`) or, at the peer that creates the run, from its home. `schemas`: of the records to keep and read.

    Raises what `open_host` and `enter` raise; DialError if a client reaches no peer.
    """
    async with open_host(config.host) as host, on_lan(config.lan, host):
        run = await enter(host)
        if not config.is_client:
            serve_run_files(host.rpc, run.signed, run.tokenizer)
            serve_dial_back(host)
            serve_events(host)
        cache, met = config.home.addresses, None if config.lan is None else config.lan.met
        node_config = NodeConfig(run.manifest.run_id, config.bootstrap, cache, config.is_client, met=met)
        async with open_node(host, node_config, schemas(run.gate)) as node:
            yield OpenPeer(host, run, node)
