"""One of several processes that run rounds of any method with invented work; started by `test_methods.py` and
`test_four_processes.py`.

    python -m tests.swarm.support.method_child NUMBER ROUNDS FOLDER   < {"outer": ..., "codec": ...}

The child prints {"peer", "addresses"}, number 0 also those of the coordinator, which is in its process; it reads the
list of what all children printed, and prints that it is ready. After another line it takes part in the rounds. After
each one it prints {"round", "state_hash", "members", "bulk_bytes_up", "ideal_bytes"}: the bytes it has sent in total,
and the bytes that the round's coding needs for the exchange of all these members together. It writes the last state to
FOLDER and stays until a last line comes, because the others look for it at the end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio
from safetensors.torch import save_file

from optim.config import CodecConfig, OuterConfig
from optim.strategies.registry import build_strategy
from peer.config import InnerConfig, ModelConfig
from peer.events import EventLog
from peer.identity import Identity
from peer.model.layout import FlatLayout
from peer.net.host import Host, open_host
from peer.net.limits import NetLimits
from peer.net.method import Call
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.head import Head, genesis
from swarm.protocol.plan import Contribution
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.group_driver import GroupDriver
from swarm.rounds.handlers import serve_agreement
from swarm.rounds.records import RecordFiles
from swarm.rounds.replica_driver import restore_replica
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult
from swarm.rounds.work import work_of
from swarm.state.messages import AskChunk, AskResult
from swarm.state.outer_state import OuterState
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from tests.support.newer_trio import run_abandonable
from tests.swarm.support.driven_group import Weightless

MODEL = ModelConfig(
    hidden_size=96, layers=5, heads=4, kv_heads=4, intermediate_size=256, max_seq_len=128, vocab_size=512
)
PATIENT = NetLimits(suspect_after_s=120.0)  # a peer that stands still for some seconds must be in every round
INNER = InnerConfig(lr=1e-3, batch_size=1, total_steps=1000)
TIMEOUT_S = 60.0


class Setup(msgspec.Struct):
    outer: OuterConfig
    codec: CodecConfig


def initial_theta() -> torch.Tensor:
    return torch.randn(FlatLayout.of(MODEL).numel, generator=torch.Generator().manual_seed(1)) * 0.02


def delta_of(number: int, round_number: int, size: int) -> torch.Tensor:
    """The product of peer `number` in a round: of the size the method wants, different at every peer and in every
    round."""
    generator = torch.Generator().manual_seed(1000 * number + round_number)
    return torch.randn(size, generator=generator) * (1e-3 + 1e-4 * number)


def seed_of(number: int, round_number: int) -> int:
    """The seed of what peer `number` draws when it encodes a round's work (ternary codes)."""
    return 1000 * number + round_number


class Invented:
    """Work that takes no time."""

    speed = 1.0

    def __init__(self, number: int) -> None:
        self._number = number

    async def train(self, request: TrainRequest) -> TrainResult:
        await trio.lowlevel.checkpoint()
        steps, size = request.assignment.steps, sum(place.stop - place.start for place in request.places)
        delta = delta_of(self._number, request.round_info.round, size)
        torch.manual_seed(seed_of(self._number, request.round_info.round))
        return TrainResult(steps, steps, 1.0, delta)

    def finish_early(self) -> None:
        """Do nothing: training takes no time."""

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head) -> None:
        """Do nothing: the work does not depend on the weights."""

    def is_exhausted(self, round: int) -> bool:
        return False

    async def gather(self, members: Sequence[str]) -> None:
        await trio.sleep_forever()


class Snapshots(SnapshotStore):
    """Counts the bytes uploaded to peers that missed a commit, which are no part of the exchange."""

    uploaded_bytes = 0

    async def send_result(self, call: Call[AskResult]) -> Any:
        return self._noted(await super().send_result(call))

    async def send_chunk(self, call: Call[AskChunk]) -> Any:
        return self._noted(await super().send_chunk(call))

    def _noted(self, answer: Any) -> Any:
        self.uploaded_bytes += memoryview(answer[1]).nbytes if isinstance(answer, tuple) else 0
        return answer


class Reporter:
    """The driver's `CommitListener`: prints each commit."""

    def __init__(self, parts: RoundContext, snapshots: Snapshots, others: list[str]) -> None:
        self._parts, self._snapshots, self._others = parts, snapshots, others
        self._before: Head | None = None

    async def committed(self, head: Head, merged: Sequence[Contribution] | None) -> None:
        parts, state, members = self._parts, self._parts.state, len(head.members)
        coding = state.strategy.coding(parts.schedule.round_info(self._before or head), state.tensors)
        self._before = head
        slices = range(coding.count)
        messages = sum(coding.message_bytes(i) for i in slices)
        down = sum(coding.result_bytes(i, members) for i in slices)
        say(
            {
                "round": head.round,
                "state_hash": head.state_hash.hex(),
                "members": members,
                "merged": len(merged or ()),
                "bulk_bytes_up": parts.host.bulk_bytes_up - self._snapshots.uploaded_bytes,
                "ideal_bytes": (members - 1) * (messages + down),
            }
        )

    def donors(self, head: Head) -> Iterable[str]:
        return self._others


def say(message: object) -> None:
    print(json.dumps(message), flush=True)  # noqa: T201


async def hear() -> str:
    return await run_abandonable(sys.stdin.readline)


async def main(number: int, rounds: int, folder: Path) -> None:
    torch.set_num_threads(1)
    setup = msgspec.json.decode(await hear(), type=Setup)
    strategy = build_strategy(setup.outer, setup.codec, FlatLayout.of(MODEL), INNER)
    theta = initial_theta()
    state = OuterState.in_memory([theta, *(torch.zeros_like(theta) for _ in strategy.shared)], strategy)
    authority = Identity.load_or_create(folder / "authority.key")
    schedule, timeouts = RoundSchedule(setup.outer, INNER, 8, 60.0), AdaptiveTimeouts(timeout_floor_s=TIMEOUT_S)
    work = work_of(strategy, schedule, lambda head: TIMEOUT_S)

    async with AsyncExitStack() as stack:

        async def host_of(identity: Identity) -> Host:
            config = open_host(identity=identity, events=EventLog(), limits=PATIENT)
            return await stack.enter_async_context(config)

        host = await host_of(Identity.generate())
        hosts = [host, await host_of(authority)] if number == 0 else [host]
        say([{"peer": each.peer_id, "addresses": each.addresses} for each in hosts])
        group = [hello for said in json.loads(await hear()) for hello in said]
        for each in hosts:
            for hello in group:
                each.book.add(hello["peer"], hello["addresses"])
        others = [hello["peer"] for hello in group if hello["peer"] != host.peer_id]

        def config_of(peer: str) -> AgreementConfig:
            first = genesis("methods", state.tree.root)
            members = len(group) - 1
            return AgreementConfig(
                genesis=first, peer=peer, coordinator=authority.peer_id, rounds=rounds, min_peers=members
            )

        snapshots = Snapshots(state.size_bytes, 9 << 20)
        serve_snapshots(host.rpc, [snapshots])
        parts = RoundContext(host, state, snapshots, Invented(number), schedule, timeouts, folder / str(number))
        nursery = await stack.enter_async_context(trio.open_nursery())
        say("ready")
        await hear()
        if number == 0:
            records, peers = RecordFiles(folder / "coordinator"), [host.peer_id, *others]
            coordinator = GroupDriver(hosts[1], config_of(authority.peer_id), work, records, timeouts, lambda: peers)
            serve_agreement(hosts[1].rpc, lambda: {coordinator.group: coordinator})
            nursery.start_soon(coordinator.run, Weightless())
        driver = await restore_replica(parts, config_of(host.peer_id), work, lambda: others)
        driver.actor.listener = Reporter(parts, snapshots, others)
        nursery.start_soon(driver.run)
        await driver.until_round(rounds)
        save_file(state.current.tensors, folder / f"{number}.safetensors")
        say("saved")
        await hear()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
