"""A pipeline with every micro-batch in it, under virtual time, with the network's own `ReplicaRouter`, `decide` and
shares.

Calls nest as in the network: a forward pass of one stage calls the next, and the answer is the gradient. Good for a few
hundred peers; `benchmarks.simulation.fluid` is for more. Full queues decline; dead peers are noticed by a closed
connection, frozen ones by the caller's deadline; records are `refresh_s` old at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from random import Random
from typing import Literal

from benchmarks.simulation.clock import VirtualClock
from benchmarks.simulation.machine import DeviceCall, Machine
from benchmarks.simulation.rounds import merge_s
from benchmarks.simulation.trace import Life, Trace
from swarm.placement.load import LoadView, PeerLoad, StageCost, move_s
from swarm.placement.rebalance import RebalanceConfig, decide, stage_for_joiner

FORWARD = 1 / 3  # of a stage's work; a backward pass takes twice as long
RETRY_S = 0.5  # until the next look for a replica where there is none


@dataclass(frozen=True)
class SimulationConfig:
    """The settings of a simulation."""

    stages: tuple[StageCost, ...]
    feeders: int = 2
    in_flight: int = 16
    """Micro-batches of each feeder."""
    message_bytes: float = 1e6
    """Activations one way, gradients the other."""
    latency_s: float = 0.02
    queue_max: int = 32
    """Calls that a replica serves at once; it declines further ones."""
    refresh_s: float = 5.0
    batch: int = 0
    """Micro-batches in a round, after which all wait until the replicas of each stage have merged; 0: no rounds."""
    update_bytes: float = 0.0
    """Size of an update that is merged."""
    rebalance: RebalanceConfig | None = None
    """None: no peer moves."""
    decide_s: float = 10.0
    seed: int = 0


@dataclass(frozen=True)
class Fault:
    """A scripted fault: `peer` is killed, frozen or thawed at `at_s`."""

    at_s: float
    peer: str
    kind: Literal["kill", "freeze", "thaw"]


@dataclass
class PipelineReport:
    """What a simulation measured."""

    dispatched: int = 0
    retried: int = 0
    declined: int = 0
    wasted: int = 0
    """Answers that came after their caller had given up."""
    moves: int = 0
    rounds: int = 0
    merge_s: float = 0.0
    completed_s: list[float] = field(default_factory=list)
    """When each micro-batch completed."""
    served: dict[str, int] = field(default_factory=dict)  # answers accepted, by replica

    def throughput(self, first_s: float, last_s: float) -> float:
        """Return the micro-batches a second completed between two times."""
        return sum(first_s <= at_s < last_s for at_s in self.completed_s) / (last_s - first_s)

    def longest_pause_s(self, first_s: float, last_s: float) -> float:
        """Return the longest time without a completion between two times."""
        times = [first_s, *(t for t in self.completed_s if first_s < t < last_s), last_s]
        return max(after_s - before_s for before_s, after_s in pairwise(times))


def simulate_pipeline(trace: Trace, config: SimulationConfig, faults: Sequence[Fault] = ()) -> PipelineReport:
    """Replay `trace`, whose leaving peers are killed, and the scripted `faults`. Same arguments, same report."""
    return _Pipeline(trace, config, faults).run()


class _Pipeline:
    def __init__(self, trace: Trace, config: SimulationConfig, faults: Sequence[Fault]) -> None:
        self.trace, self.config, self.faults = trace, config, faults
        self.clock = VirtualClock()
        self.random = Random(config.seed)
        self.report = PipelineReport()
        self.machines: dict[str, Machine] = {}
        self.records: dict[str, PeerLoad] = {}  # what all peers have read
        self.outstanding: set[int] = set()  # micro-batches dispatched and not completed
        self.left = config.batch  # to dispatch in this round

    def run(self) -> PipelineReport:
        config = self.config
        for life in self.trace.lives:
            if life.join_s <= 0:
                self._join(life)
            else:
                self.clock.at(life.join_s, partial(self._join, life))
            if life.end_s <= self.trace.duration_s:
                self.clock.at(life.end_s, partial(self._kill, life.peer))
        for fault in self.faults:
            action = {"kill": self._kill, "freeze": self._freeze, "thaw": self._thaw}[fault.kind]
            self.clock.at(fault.at_s, partial(action, fault.peer))
        for index in range(config.feeders):
            name = f"feeder-{index}"
            self.machines[name] = Machine(self.clock, name, -1, 1.0, 1e12, self.random)
        self._refresh()
        if config.rebalance is not None:
            self.clock.after(config.decide_s, self._decide)
        self._start_round()
        self.clock.run_until(self.trace.duration_s)
        return self.report

    # Micro-batches

    def _start_round(self) -> None:
        self.left = self.config.batch
        for name in [name for name, machine in self.machines.items() if machine.stage < 0]:
            for _ in range(self.config.in_flight):
                self._dispatch_next(self.machines[name])

    def _dispatch_next(self, feeder: Machine) -> None:
        if self.config.batch:
            if not self.left:
                return
            self.left -= 1
        micro_batch = self.report.dispatched
        self.report.dispatched += 1
        self.outstanding.add(micro_batch)
        self._dispatch(micro_batch, 0, feeder, None, (), lambda: self._completed(feeder, micro_batch))

    def _completed(self, feeder: Machine, micro_batch: int) -> None:
        self.outstanding.remove(micro_batch)  # KeyError if one counts twice
        self.report.completed_s.append(self.clock.now_s)
        self._dispatch_next(feeder)
        if self.config.batch and not self.outstanding:
            self.report.rounds += 1
            seconds = max(
                merge_s(self.config.update_bytes, [m.link_bytes_s for m in self._serving(stage)], self.config.latency_s)
                for stage in range(len(self.config.stages))
            )
            self.report.merge_s += seconds
            self.clock.after(seconds, self._start_round)

    def _dispatch(
        self,
        micro_batch: int,
        stage: int,
        caller: Machine,
        parent: DeviceCall | None,
        tried: tuple[str, ...],
        done: Callable[[], None],
    ) -> None:
        """Send to a replica of `stage`; keep trying until the caller is dead or its own caller has given up."""
        if not caller.alive or (parent is not None and parent.ended):
            return
        now_s = self.clock.now_s
        chosen = caller.router.choose(now_s, exclude=tried) or caller.router.choose(now_s)
        if chosen is None:
            self.clock.after(RETRY_S, partial(self._dispatch, micro_batch, stage, caller, parent, (), done))
            return
        call = DeviceCall(micro_batch, stage, caller, chosen, tried, done, now_s, parent=parent)
        if parent is not None:
            parent.child = call
        caller.router.sent(chosen, call, now_s)
        arrives_s = caller.transfer_s(self.config.message_bytes, self.config.latency_s)
        self.clock.at(arrives_s, partial(self._arrived, call))
        self.clock.after(caller.router.deadline_s(chosen), partial(self._failed, call))

    def _arrived(self, call: DeviceCall) -> None:
        callee = self.machines.get(call.callee)
        if call.ended:
            return
        if callee is None or callee.stage != call.stage or callee.ready_s > self.clock.now_s:
            self.clock.after(self.config.latency_s, partial(self._failed, call))
        elif len(callee.calls) >= self.config.queue_max and not callee.frozen:
            self.clock.after(self.config.latency_s, partial(self._declined, call))
        else:
            callee.calls.add(call)
            last = call.stage == len(self.config.stages) - 1
            work = self.config.stages[call.stage].work * (1.0 if last else FORWARD)
            callee.compute(work, partial(self._forwarded, call, callee, self.clock.now_s + work / callee.speed, last))

    def _forwarded(self, call: DeviceCall, callee: Machine, unqueued_s: float, last: bool) -> None:
        call.queued_s += max(0.0, self.clock.now_s - unqueued_s)
        if call not in callee.calls:
            return
        if last:
            self._answer(call, callee)
        else:
            begin_s = self.clock.now_s
            returned = partial(self._returned, call, callee, begin_s)
            self._dispatch(call.micro_batch, call.stage + 1, callee, call, (), returned)

    def _returned(self, call: DeviceCall, callee: Machine, begin_s: float) -> None:
        """Handle the next stage's gradient."""
        call.downstream_s = self.clock.now_s - begin_s
        if call in callee.calls:
            work = self.config.stages[call.stage].work * (1 - FORWARD)
            unqueued_s = self.clock.now_s + work / callee.speed
            callee.compute(work, partial(self._backwarded, call, callee, unqueued_s), first=True)

    def _backwarded(self, call: DeviceCall, callee: Machine, unqueued_s: float) -> None:
        call.queued_s += max(0.0, self.clock.now_s - unqueued_s)
        if call in callee.calls:
            self._answer(call, callee)

    def _answer(self, call: DeviceCall, callee: Machine) -> None:
        callee.calls.discard(call)
        self.clock.at(callee.transfer_s(self.config.message_bytes, self.config.latency_s), partial(self._ended, call))

    def _ended(self, call: DeviceCall) -> None:
        if call.ended or not call.caller.alive:
            self.report.wasted += 1
            return
        call.ended = True
        self.report.served[call.callee] = self.report.served.get(call.callee, 0) + 1
        call.caller.router.succeeded(call.callee, call, self.clock.now_s, call.downstream_s, call.queued_s)
        call.done()

    def _declined(self, call: DeviceCall) -> None:
        if not call.ended:
            self._give_up(call)
            self.report.declined += 1
            call.caller.router.declined(call.callee, call, self.clock.now_s)
            pause_s = call.caller.router.pause_s(self.clock.now_s)
            self.clock.after(pause_s, partial(self._again, call, call.tried))

    def _failed(self, call: DeviceCall) -> None:
        """End a call by a deadline, a closed connection or a refusal, whichever comes first."""
        if not call.ended and call.caller.alive:
            self._give_up(call)
            self.report.retried += 1
            call.caller.router.failed(call.callee, call, self.clock.now_s)
            self._again(call, (*call.tried, call.callee))

    def _again(self, call: DeviceCall, tried: tuple[str, ...]) -> None:
        self._dispatch(call.micro_batch, call.stage, call.caller, call.parent, tried, call.done)

    def _give_up(self, call: DeviceCall | None) -> None:
        """Give up a call and all nested calls that it waits for."""
        while call is not None and not call.ended:
            call.ended = True
            if (callee := self.machines.get(call.callee)) is not None:
                callee.calls.discard(call)
            call = call.child
            if call is not None:
                call.caller.router.cancelled(call.callee, call)

    # Machines

    def _serving(self, stage: int) -> list[Machine]:
        now_s = self.clock.now_s
        return [m for m in self.machines.values() if m.stage == stage and m.ready_s <= now_s and not m.frozen]

    def _load(self, machine: Machine) -> PeerLoad:
        speed = machine.work_done / machine.busy_s if machine.busy_s else 0.0
        return PeerLoad(
            machine.name, machine.stage, speed, machine.link_bytes_s,
            since_s=machine.since_s, ready_s=machine.ready_s, source=machine.source,
        )  # fmt: skip

    def _join(self, life: Life) -> None:
        now_s = self.clock.now_s
        machine = Machine(self.clock, life.peer, 0, life.speed, life.link_bytes_s, self.random)
        view = LoadView.of(now_s, self.config.stages, self.records.values())
        asking = replace(self._load(machine), speed=life.speed)  # a benchmark before joining
        machine.stage = stage_for_joiner(view, asking) or 0
        machine.since_s = now_s if now_s > 0 else -math.inf
        machine.ready_s = now_s + (move_s(asking, self.config.stages[machine.stage]) if now_s > 0 else 0.0)
        self.machines[life.peer] = machine
        self.records[life.peer] = replace(asking, stage=machine.stage, since_s=machine.since_s, ready_s=machine.ready_s)

    def _kill(self, peer: str) -> None:
        machine = self.machines.pop(peer, None)
        if machine is not None:
            machine.alive = False
            self._abandon(machine)

    def _abandon(self, machine: Machine) -> None:
        """Lose all calls that `machine` serves; their callers see the connection close."""
        machine.drop_jobs()
        lost, machine.calls = machine.calls, set()
        for call in sorted(lost, key=lambda call: call.micro_batch):
            self.clock.after(self.config.latency_s, partial(self._failed, call))

    def _freeze(self, peer: str) -> None:
        self.machines[peer].freeze()

    def _thaw(self, peer: str) -> None:
        if peer in self.machines:
            self.machines[peer].thaw()

    def _refresh(self) -> None:
        """Let all peers read the records, with stages and queues. Frozen peers publish none."""
        now_s = self.clock.now_s
        self.records = {m.name: self._load(m) for m in self.machines.values() if m.stage >= 0 and not m.frozen}
        for machine in self.machines.values():
            replicas = self._serving(machine.stage + 1)
            machine.router.update([replica.name for replica in replicas], now_s)
            for replica in replicas:
                service_s = self.config.stages[replica.stage].work / replica.speed
                machine.router.published(replica.name, replica.waiting, service_s, self.config.latency_s)
        self.clock.after(self.config.refresh_s, self._refresh)

    def _decide(self) -> None:
        assert self.config.rebalance is not None
        now_s = self.clock.now_s
        for move in decide(LoadView.of(now_s, self.config.stages, self.records.values()), self.config.rebalance):
            machine = self.machines.get(move.peer)
            if machine is None or machine.stage != move.source or machine.frozen:
                continue
            self.report.moves += 1
            machine.stage, machine.source, machine.since_s = move.target, move.source, now_s
            machine.ready_s = now_s + move_s(self._load(machine), self.config.stages[move.target])
            self._abandon(machine)
            self.records[move.peer] = self._load(machine)
        self.clock.after(self.config.decide_s, self._decide)
