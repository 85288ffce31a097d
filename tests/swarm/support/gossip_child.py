"""Child of test_gossip_processes: one gossiping peer with an invented worker, in a process of its own.

    gossip_child.py NUMBER NUMEL CODEC FOLDER

Prints where it is, reads the group's addresses from stdin, takes part until a further line comes, printing each of its
rounds, writes its weights to FOLDER and says so. Its deltas are STEP times as long as its weights, and then die away as
under a falling learning rate.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import trio
from safetensors.torch import save_file

from dht.node import Node, NodeConfig, open_node
from optim.codecs import get_codec
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.limits import NetLimits
from swarm.gossip.coding import PairCoding
from swarm.gossip.context import GossipContext, GossipRules
from swarm.gossip.engine import GossipEngine
from swarm.gossip.pairing import PeerView
from swarm.gossip.replica import Replica
from swarm.membership.member_record import MEMBERS, MemberRecord, member_record
from swarm.membership.membership import Membership
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Range
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.trainers.trainer import TrainResult
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from tests.support.newer_trio import run_abandonable

RUN, BATCH, STEPS, SEQ, PEERS = "gossip test", 1, 2, 8, 4
COMPUTE_S = 0.1
TIMEOUT_S = 60.0  # a killed peer is noticed at once, a slow one is waited for
STEP, CONSTANT_ROUNDS, DECAY = 0.01, 10, 0.7
CONSTANTS = (0.5, 0.7, 0.6)


def initial_theta(number: int, numel: int) -> torch.Tensor:
    """Alike, but for a tenth of their length."""
    common = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    return common + 0.1 * torch.randn(numel, generator=torch.Generator().manual_seed(100 + number))


class Invented:
    speed = 0.0

    def __init__(self, number: int, numel: int) -> None:
        self._generator = torch.Generator().manual_seed(number)
        self._numel = numel
        self.samples: list[Range] = []

    async def train(self, samples: tuple[Range, ...], first_step: int, steps: int, deadline_s: float) -> TrainResult:
        self.samples += samples
        await trio.sleep(COMPUTE_S)  # what it stands for takes time, too
        rate = STEP * DECAY ** max(0, first_step // STEPS - CONSTANT_ROUNDS)
        delta = torch.randn(self._numel, generator=self._generator) * rate
        return TrainResult(steps, steps * BATCH, 1.0, delta)

    def adopt(self, theta: torch.Tensor) -> None:
        """No worker uses these weights."""


class Neighbourhood:
    """A GossipListener with real membership records."""

    def __init__(self, host: Host, node: Node) -> None:
        self._host = host
        self._began = time.time()
        self.engine: GossipEngine | None = None
        self.membership = Membership(node, host, MEMBERS, RUN, self._describe)

    def others(self) -> Mapping[str, PeerView]:
        view = self.membership.view
        return {peer: PeerView(r.round, r.speed) for peer, r in view.items() if peer != self._host.peer_id}

    async def working(self) -> None:
        await trio.lowlevel.checkpoint()

    def banned(self) -> Iterable[str]:
        return ()

    async def stepped(self, head: Head) -> None:
        """There are no checkpoints here."""

    def _describe(self) -> MemberRecord:
        assert self.engine is not None
        head, phase = self.engine.head, self.engine.phase
        return member_record(self._host, head, session="", name="", role="full", phase=phase, joined_at=self._began)


def say(message: object) -> None:
    print(json.dumps(message), flush=True)  # noqa: T201


async def hear() -> str:
    return await run_abandonable(sys.stdin.readline)


async def main(number: int, numel: int, codec_name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    log, codec = EventLog(), get_codec(codec_name)
    replica = Replica(initial_theta(number, numel), torch.zeros(numel))
    coding = PairCoding(numel, codec, codec)
    async with open_host(identity=Identity.generate(), events=log, limits=NetLimits(suspect_after_s=120.0)) as host:
        say({"peer": host.peer_id, "addresses": host.addresses})
        group = json.loads(await hear())
        addresses = [hello["addresses"][0] for hello in group if hello["peer"] != host.peer_id]
        me = Member(host.peer_id, secrets.token_hex(4))
        rules = GossipRules(RUN, b"", "", STEPS, BATCH, SEQ, 0, PEERS, 60.0, TIMEOUT_S, CONSTANTS)
        snapshots = SnapshotStore(replica.size_bytes, 1 << 16)
        serve_snapshots(host.rpc, [snapshots])
        trainer = Invented(number, numel)

        def tell(event: Event) -> None:
            if event.name in ("gossip_met", "gossip_alone", "exchange_failed", "peer_penalized", "bug"):
                say({"event": event.name, "at": event.at, **event.fields})

        async with open_node(host, NodeConfig(RUN, addresses, folder / f"{number}.json"), [MEMBERS]) as node:
            listener = Neighbourhood(host, node)
            context = GossipContext(
                me, host, trainer, listener, AdaptiveTimeouts(TIMEOUT_S), snapshots, folder / f"{number}.part"
            )
            listener.engine = engine = GossipEngine(context, rules, replica, coding)
            with log.subscribed(tell):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(listener.membership.run)
                    nursery.start_soon(engine.run)
                    await hear()
                    nursery.cancel_scope.cancel()
        save_file({"theta": replica.theta}, folder / f"{number}.safetensors")
        message_bytes = coding.total("phi") + coding.total("delta")
        say({"event": "end", "peer": host.peer_id, "message_bytes": message_bytes, "samples": trainer.samples})


if __name__ == "__main__":
    _, number, numel, codec, folder = sys.argv
    trio.run(main, int(number), int(numel), codec, Path(folder))
