"""One of our peers for averaging.py: a host, a replica's driver and random gradients in a process.

    python -m benchmarks.rounds.averaging_peer NUMBER PARAMS CODEC ROUNDS STATE FOLDER

STATE is where the outer state lies, as `peer join --state` has it. Prints its address, reads the whole group, takes
part in ROUNDS rounds and prints its figures. All peers hold the key of a temporary coordinator (in FOLDER) and sign the
start of the first term with it. Ed25519 is deterministic, so they sign the same bytes: no further process is needed.
CODEC is one name, or two, "up/down". `BENCHMARK_LISTEN` names the IP address to listen at, `BENCHMARK_TRAIN_S` the
seconds of training; with `BENCHMARK_BY_LINK` members merge by their links. `BENCHMARK_PACE`, a `Pace` as JSON, has the
product's trainers train with a stand-in for a worker. With `BENCHMARK_PARTS` the seconds of each part of a round are
measured, and memory; the update is then not kept for the parent.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import trio

from benchmarks.common.children import START_S
from benchmarks.common.paced_worker import Pace, PacedWorker, PlannedSchedule
from benchmarks.common.round_parts import PeakMemory, Stopwatch
from benchmarks.common.tcp_bytes import sent_bytes
from benchmarks.rounds.averaging_data import delta_of, save
from optim.algorithms.outer_step import DilocoOuter
from optim.codecs import get_codec
from optim.config import DilocoConfig, StreamingConfig
from optim.strategies.dense import DenseFormat
from optim.strategies.diloco import DilocoStrategy
from peer.checkpoint.generation import FileRoom, MemoryRoom, StateRoom
from peer.config import InnerConfig
from peer.events import Event, EventLog
from peer.identity import Identity, sign_body
from peer.model.layout import FlatLayout, TensorSlot
from peer.net.host import open_host
from peer.net.reach import Reach
from peer.worker.client import WorkerGroup
from swarm.protocol.agreement import events
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.messages import ChainLink, ChainMessage, StartBody
from swarm.protocol.agreement.rules.evidence import START
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.plan import Contribution
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.replica_driver import ReplicaDriver, restore_replica
from swarm.rounds.trainers.overlapped_trainer import trainer_of
from swarm.rounds.trainers.trainer import Trainer, TrainRequest, TrainResult
from swarm.rounds.work import work_of
from swarm.state.outer_state import OuterState
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from tests.support.newer_trio import run_abandonable

SCHEDULE = RoundSchedule(DilocoConfig(steps=1), InnerConfig(lr=1e-3, batch_size=1, total_steps=1), 8, 60.0)
TRAIN_S = float(os.environ.get("BENCHMARK_TRAIN_S", "0"))
TIMEOUT_S = 60.0  # without a fault an exchange waits for all peers, however slow the machine


class NoTraining:
    """A trainer with a ready pseudo-gradient."""

    speed = 1.0

    def __init__(self, delta: torch.Tensor) -> None:
        self._delta = delta

    async def train(self, order: TrainRequest) -> TrainResult:
        await trio.sleep(TRAIN_S)
        return TrainResult(order.assignment.steps, order.assignment.steps, 1.0, self._delta)

    def finish_early(self) -> None:
        """Do nothing: no training is running."""

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head) -> None:
        """Do nothing: no training uses the weights."""

    def is_exhausted(self, round: int) -> bool:
        return False

    async def gather(self, members: Sequence[str]) -> None:
        await trio.sleep_forever()


def diloco_state(
    numel: int, codec: str, outer: DilocoOuter, folder: Path | None = None, fragments: int = 1
) -> OuterState:
    """Return a state of zeros with a DiLoCo strategy of its own: in memory, or in files of `folder`. `codec` as on the
    command line; each of the fragments is a contiguous part."""
    up, _, down = codec.partition("/")
    places = [[slice(numel * i // fragments, numel * (i + 1) // fragments)] for i in range(fragments)]
    strategy = DilocoStrategy(DenseFormat(places, get_codec(up), get_codec(down or up)), outer)
    vectors, slot = ("theta", *strategy.shared), TensorSlot(0, (numel,), numel)
    room: StateRoom = MemoryRoom(vectors, numel)
    if folder is not None:
        room = FileRoom(vectors, FlatLayout({"values": slot}, numel), folder)
    zeros = room.new()
    for tensor in zeros.tensors.values():
        tensor.zero_()
    return OuterState(zeros, strategy, room)


class Observer:
    """Hears of commits. Notes the time of each, who was merged, and theta before the last one."""

    def __init__(self, parts: RoundContext, rounds: int, stopwatch: Stopwatch | None = None) -> None:
        self.seconds: dict[int, float] = {}  # by round; time.monotonic, the same clock in all processes
        self.merged: dict[int, list[str]] = {}  # by round, but for those whose state was fetched
        self.cpu_s: dict[int, float] = {}  # by round: of this process since its start
        self.faults: dict[int, int] = {}  # by round: pages that it has had mapped since its start
        self.phases: dict[str, dict[int, float]] = {}  # by name and round: when it began
        self.trained: dict[int, tuple[float, int, float]] = {}  # by round: when its steps ended, how many, their s
        self.parts_s: dict[int, dict[str, float]] = {}  # by round: since the start, as `stopwatch` has it
        self.before_last: torch.Tensor | None = None
        self._parts, self._rounds, self._stopwatch = parts, rounds, stopwatch

    def note(self, event: Event) -> None:
        """Note when a phase begins, and what was trained."""
        fields: dict[str, Any] = dict(event.fields)
        if event.name == "phase_entered":
            self.phases.setdefault(fields["phase"], {})[fields["round"]] = time.monotonic()
        elif event.name == "round_trained":
            self.trained[fields["round"]] = time.monotonic(), fields["steps"], fields["busy_s"]

    async def committed(self, head: Head, merged: Sequence[Contribution] | None) -> None:
        await trio.lowlevel.checkpoint()
        if not head.round:
            return  # the start of the term
        self.seconds[head.round] = time.monotonic()
        if merged is not None:
            self.merged[head.round] = [body.member.peer for body in merged]
        self.cpu_s[head.round] = time.process_time()
        self.faults[head.round] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        if self._stopwatch is not None:
            self.parts_s[head.round] = dict(self._stopwatch.seconds)
        elif head.round == self._rounds - 1:
            self.before_last = self._parts.state.theta.clone()

    def donors(self, head: Head) -> Iterable[str]:
        return [member.peer for member in head.members]


async def take_part(
    driver: ReplicaDriver, parts: RoundContext, authority: Identity, rounds: int, nursery: trio.Nursery
) -> None:
    """Read the group, then take part in all rounds."""
    with trio.fail_after(START_S):
        line = await run_abandonable(sys.stdin.readline)
    group: list[dict[str, Any]] = json.loads(line)["group"]
    for hello in group:
        parts.host.book.add(hello["peer"], hello["addresses"])
    members = tuple(sorted(Member(hello["peer"], hello["session"]) for hello in group))
    first = driver.group.config.genesis
    head = msgspec.structs.replace(first, term=1, boot=1, previous=first.hash, members=members, attempt=-1)
    signed = sign_body(authority, START, StartBody(head))
    nursery.start_soon(driver.run)
    print(json.dumps({"ready": True}), flush=True)
    await run_abandonable(sys.stdin.readline)  # until all can be called
    nursery.start_soon(end_with_parent, nursery.cancel_scope)
    driver.group.feed(events.Received(authority.peer_id, ChainMessage((ChainLink(head, start=signed),))))
    await driver.until_round(rounds)


async def end_with_parent(everything: trio.CancelScope) -> None:
    await run_abandonable(sys.stdin.readline)
    everything.cancel()


def pace_of_environment() -> Pace | None:
    """Return how the stand-in for a worker works; None without one."""
    text = os.environ.get("BENCHMARK_PACE")
    return msgspec.json.decode(text, type=Pace) if text else None


def schedule_of(pace: Pace | None) -> RoundSchedule:
    """Return the work of the rounds."""
    if pace is None:
        return replace(SCHEDULE, by_link="BENCHMARK_BY_LINK" in os.environ)
    if pace.fragments > 1:
        outer = StreamingConfig(steps=pace.steps[0], fragments=pace.fragments, tau=pace.tau)
        return replace(SCHEDULE, outer=outer)
    return PlannedSchedule(SCHEDULE.outer, SCHEDULE.inner, SCHEDULE.seq_len, SCHEDULE.compute_s_max, planned=pace.steps)


async def main(number: int, numel: int, codec: str, rounds: int, state_place: str, folder: Path) -> None:
    torch.set_num_threads(1)
    authority = Identity.load_or_create(folder / "authority.key")
    identity = Identity.generate()
    states = folder / f"states-{number}" if state_place == "disk" else None
    pace = pace_of_environment()
    outer, fragments = DilocoOuter(lr=1.0, momentum=0.0), pace.fragments if pace is not None else 1
    state = diloco_state(numel, codec, outer, states, fragments)
    stopwatch = Stopwatch(state) if "BENCHMARK_PARTS" in os.environ else None
    log = EventLog()
    listen = (f"/ip4/{os.environ.get('BENCHMARK_LISTEN', '127.0.0.1')}/tcp/0",)
    schedule, memory = schedule_of(pace), PeakMemory()
    config = open_host(identity=identity, events=log, reach=Reach(listen))
    async with config as host, trio.open_nursery() as nursery:
        snapshots = SnapshotStore(state.size_bytes, 8 << 20)
        serve_snapshots(host.rpc, [snapshots])
        fault = "BARNRAISE_FAULT" in os.environ or "BENCHMARK_FAULT" in os.environ
        trainer: Trainer
        if pace is None:
            trainer = NoTraining(delta_of(number, numel))
        else:
            worker = cast(WorkerGroup, PacedWorker(delta_of(number, numel), pace.step_s))
            trainer = trainer_of(worker, schedule.outer, state.strategy, log)
            nursery.start_soon(trainer.run)
        if stopwatch is not None:
            nursery.start_soon(memory.watch)
        timeouts = AdaptiveTimeouts(0.0 if fault else TIMEOUT_S)
        parts = RoundContext(host, state, snapshots, trainer, schedule, timeouts, folder / host.peer_id)
        agreement = AgreementConfig(
            genesis=genesis("benchmark", state.tree.root),
            peer=host.peer_id,
            coordinator=authority.peer_id,
            rounds=rounds,
        )
        exchange_s = lambda head: timeouts.exchange_s(timeouts.exchange_bytes)  # noqa: E731
        work = work_of(state.strategy, schedule, exchange_s, bytes_of=lambda head: timeouts.update_bytes)
        driver = await restore_replica(parts, agreement, work, lambda: ())
        observer = Observer(parts, rounds, stopwatch)
        log.subscribe(observer.note)
        driver.actor.listener = observer
        me = driver.me
        print(json.dumps({"peer": me.peer, "session": me.session, "addresses": host.addresses}), flush=True)
        await take_part(driver, parts, authority, rounds, nursery)
        report = {
            "peer": me.peer,
            "seconds": observer.seconds,
            "merged": observer.merged,
            "phases": observer.phases,
            "trained": observer.trained,
            "parts_s": observer.parts_s,
            "cpu_by_round": observer.cpu_s,
            **memory.report(),
            "owned": list(driver.actor.exchanges.values())[-1].order.owners.count(me.peer),
            "cpu_s": (max(observer.cpu_s.values()) - min(observer.cpu_s.values())) / (rounds - min(observer.cpu_s)),
            "faults": [later - before for before, later in pairwise(observer.faults.values())],
            "wire_bytes": sent_bytes([os.getpid()]),
            "payload_bytes": host.bytes_up,
            "state_hash": state.tree.root.hex(),
            "hash": None,  # of a peer that has missed the last round but one
        }
        if observer.before_last is not None:
            report["hash"] = save(observer.before_last - state.theta, folder / f"ours-{number}")
        print(json.dumps(report), flush=True)
        await trio.sleep_forever()  # others may still fetch from this peer


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), *sys.argv[5:6], Path(sys.argv[6]))
