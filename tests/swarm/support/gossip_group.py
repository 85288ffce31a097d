"""Gossiping peers in one process, with real sockets and invented work: what the tests of `swarm.gossip` plug into."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import trio

from optim.codecs import get_codec
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from swarm.gossip.coding import PairCoding
from swarm.gossip.context import GossipContext, GossipRules
from swarm.gossip.engine import GossipEngine
from swarm.gossip.pairing import PeerView
from swarm.gossip.replica import Replica
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Range
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.trainers.trainer import TrainResult
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore

CONSTANTS = (0.5, 0.7, 0.6)
NUMEL, STEPS, BATCH, SEQ = 20_000, 2, 2, 8
Deltas = Callable[[int], torch.Tensor]


def noise(seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * scale


@dataclass
class Invented:
    """`deltas(n)` is the delta of the n-th call."""

    deltas: Deltas
    speed: float = 0.0
    calls: int = 0
    samples: list[Range] = field(default_factory=list)
    pause_s: float = 0.0

    async def train(self, samples: tuple[Range, ...], first_step: int, steps: int, deadline_s: float) -> TrainResult:
        self.samples += samples
        await trio.sleep(self.pause_s)
        self.calls += 1
        return TrainResult(steps, steps * BATCH, 1.0, self.deltas(self.calls - 1))

    def adopt(self, theta: torch.Tensor) -> None:
        """No worker uses these weights."""


@dataclass
class Peer:
    """One of them; implements GossipListener. `stands` are copies of (theta, move) after each of its rounds."""

    host: Host
    group: Group
    trainer: Invented
    log: EventLog
    events: list[Event] = field(default_factory=list)
    stands: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    engine: GossipEngine = field(init=False)
    stepping: Callable[[], None] = lambda: None

    def others(self) -> Mapping[str, PeerView]:
        seen = {p.host.peer_id: PeerView(p.engine.replica.round) for p in self.group.peers if p is not self}
        return {**seen, **self.group.strangers}

    async def working(self) -> None:
        await trio.lowlevel.checkpoint()

    def banned(self) -> Iterable[str]:
        return ()

    async def stepped(self, head: Head) -> None:
        replica = self.engine.replica
        self.stands.append((replica.theta.clone(), replica.move.clone()))
        assert head.state_hash == replica.tree.root
        self.stepping()

    def seen(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]


@dataclass
class Group:
    """`strangers`: peers that all others take for members, with their rounds. No peer gives another up before
    `timeout_floor_s`, however busy the machine is."""

    folder: Path
    codec: str
    rounds: int
    min_peers: int
    peers: list[Peer] = field(default_factory=list)
    strangers: dict[str, PeerView] = field(default_factory=dict)
    timeout_floor_s: float = 60.0

    @property
    def coding(self) -> PairCoding:
        return PairCoding(NUMEL, get_codec(self.codec), get_codec(self.codec))

    @asynccontextmanager
    async def join(self, theta: torch.Tensor, deltas: Deltas, pause_s: float = 0.0) -> AsyncIterator[Peer]:
        """One more peer: its engine is ready to `run()`."""
        log = EventLog()
        async with open_host(identity=Identity.generate(), events=log) as host:
            peer = Peer(host, self, Invented(deltas, pause_s=pause_s), log)
            replica = Replica(theta.clone(), torch.zeros_like(theta))
            snapshots = SnapshotStore(replica.size_bytes, 1 << 16)
            serve_snapshots(host.rpc, [snapshots])
            me = Member(host.peer_id, secrets.token_hex(4))
            sizes, waits = (STEPS, BATCH, SEQ, self.rounds, self.min_peers), (60.0, self.timeout_floor_s)
            rules = GossipRules("run", b"", "", *sizes, *waits, CONSTANTS)
            part = self.folder / f"{host.peer_id}.part"
            context = GossipContext(
                me, host, peer.trainer, peer, AdaptiveTimeouts(self.timeout_floor_s), snapshots, part
            )
            peer.engine = GossipEngine(context, rules, replica, self.coding)
            for other in self.peers:  # as the DHT would
                host.book.add(other.host.peer_id, other.host.addresses)
                other.host.book.add(host.peer_id, host.addresses)
            self.peers.append(peer)
            with log.subscribed(peer.events.append):
                yield peer
