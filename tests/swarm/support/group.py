"""A training group with real sockets and made-up gradients: what round tests and benchmarks plug into."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import torch
import trio

from optim.algorithms.outer_step import DilocoOuter
from optim.codecs import get_codec
from optim.config import Diloco
from optim.strategies.dense import DenseWire
from optim.strategies.diloco import DilocoRecipe
from optim.strategies.interface import OuterStrategy
from peer.config import InnerConfig
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import Host, HostConfig, open_host
from swarm.coordinator.authority import Authority
from swarm.coordinator.durable_state import Memory
from swarm.coordinator.handlers import CoordinatorHandlers
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.ledger import count
from swarm.protocol.plan import Assignment
from swarm.protocol.quorum import HeadCandidate
from swarm.protocol.round_schedule import Pace
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.engine import Engine
from swarm.rounds.handlers import RunLimits
from swarm.rounds.replay import replay
from swarm.rounds.trainer import Order, Work
from swarm.state.fetch import fetch_state
from swarm.state.outer_state import OuterState
from swarm.state.snapshots import SnapshotStore

Deltas = Callable[[str, int, Assignment], torch.Tensor]
BATCH, SEQ = 2, 8
NESTEROV = DilocoOuter(0.7, 0.9, True)


class Patient(AdaptiveTimeouts):
    """Nobody is left out of a round because this machine stood still for some seconds."""

    def __init__(self) -> None:
        super().__init__(patience_s=60.0)


def diloco(numel: int, codec: str, outer: DilocoOuter = NESTEROV) -> OuterStrategy:
    return DilocoRecipe(DenseWire([[slice(0, numel)]], get_codec(codec), get_codec(codec)), outer)


def pace_of(steps: int, batch_size: int = BATCH, seq_len: int = SEQ, compute_s_max: float = 60.0) -> Pace:
    """The pace of a run of invented gradients: H inner steps, no schedule to speak of."""
    return Pace(Diloco(steps=steps), InnerConfig(lr=1e-3, batch_size=batch_size, total_steps=1), seq_len, compute_s_max)


@dataclass
class InventedTrainer:
    """Returns `deltas(peer, first_step, assignment)` as the pseudo-gradient; `gate` (if set) holds it up, from the
    round `gated_from` on."""

    peer: str
    deltas: Deltas
    speed: float = 10.0
    gate: trio.Event | None = None
    gated_from: int = 0
    waiting: bool = False  # at the gate
    dry: bool = False  # nothing will ever come
    theta: torch.Tensor | None = None

    async def train(self, order: Order) -> Work:
        assignment = order.assignment
        if self.gate is not None and order.turn.round >= self.gated_from:
            self.waiting = True
            try:
                await self.gate.wait()
            finally:
                self.waiting = False
        await trio.lowlevel.checkpoint()
        assert count(assignment.ranges) == assignment.steps * BATCH
        delta = self.deltas(self.peer, order.turn.step, assignment)
        return Work(assignment.steps, assignment.steps * BATCH, 1.0, delta)

    def wrap_up(self) -> None:
        if self.gate is not None and self.waiting:
            self.gate.set()

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head) -> None:
        self.theta = theta.clone()

    def has_run_dry(self, round: int) -> bool:
        return self.dry

    async def gather(self, members: Sequence[str]) -> None:
        await trio.sleep_forever()


@dataclass
class StageReplica:
    """One member: its host, engine, state and events. Implements the engine's Keeper."""

    host: Host
    post: RoundContext
    part_file: object
    shelf: SnapshotStore
    others: Callable[[], list[str]]
    heads: list[Head] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    engine: Engine = field(init=False)

    async def committed(self, head: Head, results: list[memoryview]) -> None:
        state = self.post.state
        assert state.tree.root == head.state_hash
        self.heads.append(head)
        self.shelf.publish(state.tree, state.tensors, msgspec.msgpack.encode(head), results)
        self.post.trainer.adopt(state.theta, None, head)

    async def fetch(self, sighting: HeadCandidate, mine: Head) -> None:
        donors = list(sighting.holders)  # those that answered until there were enough
        if not await replay(self.post, mine, sighting.head.state_hash, donors):
            told = [peer for peer in self.others() if peer != self.host.peer_id]  # as records in the DHT would
            fetched = await fetch_state(
                self.host.rpc,
                lambda: list(dict.fromkeys([*donors, *told])),
                sighting.head.state_hash,
                self.post.state.size_bytes,
                self.part_file,
                self.post.events,  # type: ignore[arg-type]
            )
            self.post.state.replace(fetched.tensors, fetched.tree)

    def known_peers(self) -> Iterable[str]:
        return self.others()

    def seen(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]


@dataclass
class Group:
    """`seats` run until the block ends; `theta` is the initial state."""

    theta: torch.Tensor
    authority_host: Host
    authority: Authority
    pace: Pace
    recipe: Callable[[], OuterStrategy]
    rounds: int
    folder: object
    seats: list[StageReplica] = field(default_factory=list)
    tempo: type[AdaptiveTimeouts] = AdaptiveTimeouts

    def genesis(self) -> Head:
        return self.authority._genesis

    @asynccontextmanager
    async def join(self, deltas: Deltas, rounds: int | None = None) -> AsyncIterator[StageReplica]:
        """One more peer: its engine is ready to `run()`."""
        identity = Identity.generate()
        log = EventLog()
        async with open_host(HostConfig(identity=identity, events=log)) as host:
            await host.connect_address(self.authority_host.addresses[0], timeout_s=30)
            state = OuterState([self.theta.clone(), torch.zeros_like(self.theta)], self.recipe())
            trainer = InventedTrainer(host.peer_id, deltas)
            shelf = SnapshotStore(state.size_bytes, 8 << 20)
            me = Member(host.peer_id, secrets.token_hex(4))
            post = RoundContext(me, identity, host, state, shelf, trainer, self.pace, self.tempo(), log)
            shelf.publish(state.tree, state.tensors)
            shelf.serve(host.rpc)
            seat = StageReplica(host, post, self.folder / f"{host.peer_id}.part", shelf, self._addresses)  # type: ignore[operator]
            facts = RunLimits(self.genesis(), self.authority.me.peer, self.rounds if rounds is None else rounds, 64)
            seat.engine = Engine(post, facts, self.genesis(), None, seat)
            for other in self.seats:  # as the DHT would
                host.book.add(other.host.peer_id, other.host.addresses)
                other.host.book.add(host.peer_id, host.addresses)
            self.seats.append(seat)
            with log.subscribed(seat.events.append):
                yield seat

    def _addresses(self) -> list[str]:
        return [seat.host.peer_id for seat in self.seats]


@asynccontextmanager
async def open_group(
    folder: object,
    numel: int,
    codec: str = "int8",
    rounds: int = 3,
    min_peers: int = 3,
    steps: int = 4,
    outer: DilocoOuter = NESTEROV,
) -> AsyncIterator[Group]:
    """An authority that begins the run once `min_peers` knock."""
    theta = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    state = OuterState([theta.clone(), torch.zeros_like(theta)], diloco(numel, codec, outer))
    async with (
        open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as host,
        trio.open_nursery() as nursery,
    ):
        first = genesis("run", state.tree.root)
        authority = Authority(host, first, min_peers, list, Memory())
        CoordinatorHandlers(host, [authority])
        nursery.start_soon(authority.run)
        yield Group(theta, host, authority, pace_of(steps), lambda: diloco(numel, codec, outer), rounds, folder)
        nursery.cancel_scope.cancel()
