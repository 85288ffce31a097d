"""Replicas of a small model's stages over real sockets, each with its own host and worker process; a static table of
replicas stands in for the DHT."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from peer.events import Event
from peer.identity import Identity
from peer.model.layout import init_flat, split_flat
from peer.net.host import Host, open_host
from peer.worker.stage_client import StageWorkerGroup, open_stage_worker_group
from swarm.pipeline.accounting import SampleAccounting
from swarm.pipeline.config import LoadReport, PipelineSettings
from swarm.pipeline.messages import ForwardReply, ForwardRequest, forward_method
from swarm.pipeline.router import ReplicaRouter, RouterConfig
from swarm.pipeline.source import MicroBatchSource
from swarm.pipeline.stage_server import StageListener, StageServer
from swarm.protocol.head import Head, genesis
from swarm.protocol.ledger import Ledger, Range
from swarm.protocol.receipts import StageProof
from tests.peer.support.stage_harness import INNER, MODEL, SPLITS, spec_of
from tests.peer.support.worker_harness import Log, worker_config
from tests.support.newer_trio import TaskStatus

MICRO, SEQ = 2, 16
HIDDEN_BYTES = MICRO * SEQ * MODEL.hidden_size * 4  # as it is (activations "none"), and so is its gradient
NEVER_SILENT_S = 3600.0  # a worker that this machine has no time for is no lost worker
Table = dict[str, dict[str, Any]]  # peer -> {"stage", "addresses"}


def rules_of(stages: int, **changes: Any) -> PipelineSettings:
    values: dict[str, Any] = {
        "run_id": "run",
        "groups": tuple(f"group {stage}" for stage in range(stages)),
        "micro_batch": MICRO,
        "seq_len": SEQ,
        "hidden_size": MODEL.hidden_size,
        "vocab_size": MODEL.vocab_size,
        "activations": "none",
        **changes,
    }
    return PipelineSettings(**values)


def head_at(rules: PipelineSettings, stage: int, epoch: int = 0, ledger: Ledger | None = None) -> Head:
    first = genesis(rules.groups[stage], b"\0" * 32)
    return Head(**{**_fields(first), "round": epoch, "ledger": ledger or Ledger()})


def _fields(head: Head) -> dict[str, Any]:
    return {name: getattr(head, name) for name in head.__struct_fields__}


def tokens_of(span: Range) -> torch.Tensor:
    """Return the text of the run: (n, SEQ + 1) int64."""
    rows = [
        torch.randint(MODEL.vocab_size, (SEQ + 1,), generator=torch.Generator().manual_seed(n)) for n in range(*span)
    ]
    return torch.stack(rows)


async def read_tokens(spans: Sequence[Range]) -> torch.Tensor:
    """The same, for a `MicroBatchSource`."""
    return torch.cat([tokens_of(span) for span in spans])


def ids_of(span: Range) -> bytes:
    """The same on the wire."""
    return tokens_of(span).numpy().astype("<u4").tobytes()


async def prove_nothing(stage: int) -> StageProof:
    """Know of no other stage's heads."""
    return ()


def without_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no answer be late, however long this machine stands still: for tests that count calls."""
    config = RouterConfig(deadline_first_s=60.0, deadline_min_s=60.0)
    monkeypatch.setattr("swarm.pipeline.sender.ReplicaRouter", lambda seed: ReplicaRouter(seed, config))
    for name in (
        "stage_server.IS_COUNTED_S",
        "sender.IS_COUNTED_S",
        "duplicate_checks.STILL_WAITING_S",
        "recovery.redispatch.ANSWER_S",
        "data_feed.FEED_S",
    ):
        monkeypatch.setattr(f"swarm.pipeline.{name}", 60.0)
    monkeypatch.setattr("swarm.pipeline.duplicate_checks.CHECKS_MAX", 100)  # each standstill leads to a check


def spans(first: int, count: int) -> list[Range]:
    """Return so many micro-batches, from the first-th on."""
    return [(MICRO * k, MICRO * (k + 1)) for k in range(first, first + count)]


class Listener(StageListener):
    """Notes what happened at a stage, and forwards redispatches to `source`."""

    def __init__(self) -> None:
        self.source: MicroBatchSource | None = None
        self.later: list[int] = []
        self.has_later, self.has_lost = trio.Event(), trio.Event()
        self.redispatched: list[object] = []

    def later_epoch(self, epoch: int) -> None:
        self.later.append(epoch)
        self.has_later.set()

    def worker_lost(self) -> None:
        self.has_lost.set()

    def redispatch(self, ranges: tuple[Range, ...], epoch: int) -> None:
        self.redispatched.append(ranges)
        if self.source is not None:
            self.source.redispatch(ranges, epoch if self.source._runner.accounting.synchronous else None)

    def dispatching(self) -> tuple[Range, ...]:
        return self.source.dispatching if self.source is not None else ()


@dataclass
class Replica:
    """One peer of a pipeline: a host and a worker with the start weights; `server`, on stage 0 `source`, and `listener`
    while it is `serving`."""

    stage: int
    host: Host
    worker_group: StageWorkerGroup
    log: Log
    events: list[Event] = field(default_factory=list)
    server: StageServer = field(init=False)
    source: MicroBatchSource = field(init=False)
    listener: Listener = field(init=False)

    @property
    def peer(self) -> str:
        return self.host.peer_id

    def struck(self) -> list[str]:
        """The peers penalized, once for each penalty: the log tells of those that follow each other together."""
        return [str(event.fields["peer"]) for event in self.seen("strike")]

    def seen(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    def kill_worker(self) -> None:
        assert self.worker_group.worker_pid is not None
        os.kill(self.worker_group.worker_pid, signal.SIGKILL)

    @asynccontextmanager
    async def serving(
        self, rules: PipelineSettings, table: Table, counts: type[SampleAccounting] = SampleAccounting
    ) -> AsyncIterator[Replica]:
        """Its server serves, and the others can find it."""
        accounting = counts(head_at(rules, self.stage), MICRO, rules.round_samples or None, self.peer)

        def replicas_of(stage: int) -> dict[str, LoadReport]:
            found = replicas_in(table, stage, self.host)
            self.host.watch(found, "next stage") if stage > self.stage else None
            return found

        self.server = StageServer(
            self.stage, rules, self.worker_group, self.host, accounting, replicas_of, prove_nothing
        )
        self.listener = Listener()
        if self.stage == 0:
            self.source = self.listener.source = MicroBatchSource(self.server, read_tokens)
        async with self.server.open(self.listener):
            table[self.peer] = {"stage": self.stage, "addresses": list(self.host.addresses)}
            yield self


@asynccontextmanager
async def open_replica(folder: Path, stages: int, stage: int, **spec: Any) -> AsyncIterator[Replica]:
    cuts, log = SPLITS[stages], Log()
    folder.mkdir(parents=True, exist_ok=True)
    changes: dict[str, Any] = {"staleness": 1, **spec}
    spec_of_stage = spec_of(cuts, stage, **changes)
    config = worker_config(
        folder, folder, model=MODEL, inner=INNER, stage=spec_of_stage, events=log, silence_s=NEVER_SILENT_S
    )
    async with (
        open_host(identity=Identity.generate(), events=log) as host,
        open_stage_worker_group(config) as worker_group,
    ):
        worker_group.outer.copy_(split_flat(MODEL, init_flat(MODEL, seed=0), cuts)[stage])
        await worker_group.import_weights(epoch=0)
        replica = Replica(stage, host, worker_group, log)
        penalize = host.rpc.server.penalize

        def counted(peer: str, reason: str) -> None:
            replica.events.append(Event(0.0, "strike", {"peer": peer}))
            penalize(peer, reason)

        host.rpc.server.penalize = counted  # type: ignore[method-assign]
        with log.subscribed(replica.events.append):
            yield replica


def replicas_in(table: Table, stage: int, host: Host) -> dict[str, LoadReport]:
    for peer, entry in table.items():
        host.book.add(peer, entry["addresses"])
    return {peer: LoadReport() for peer, entry in table.items() if entry["stage"] == stage}


@asynccontextmanager
async def open_replicas(folder: Path, replicas: list[int], **spec: Any) -> AsyncIterator[list[list[Replica]]]:
    """`replicas[s]` replicas of stage s in this process; their workers load side by side."""
    found: list[list[Replica]] = [[] for _ in replicas]
    done = trio.Event()
    async with trio.open_nursery() as replicas_open:

        async def keep(stage: int, k: int, task_status: TaskStatus[None]) -> None:
            async with open_replica(folder / f"{stage}-{k}", len(replicas), stage, **spec) as replica:
                found[stage].append(replica)
                task_status.started()
                await done.wait()

        async with trio.open_nursery() as starters:
            for stage, number in enumerate(replicas):
                for k in range(number):
                    starters.start_soon(replicas_open.start, keep, stage, k)
        try:
            yield found
        finally:
            done.set()


@asynccontextmanager
async def serving(stages: list[list[Replica]], rules: PipelineSettings) -> AsyncIterator[Table]:
    """Let all of them serve under these rules, with nothing counted yet."""
    table: Table = {}
    async with AsyncExitStack() as stack:
        for replica in (replica for replicas in stages for replica in replicas):
            await stack.enter_async_context(replica.serving(rules, table))
        yield table


Answerer = Callable[[ForwardRequest, memoryview], Awaitable[tuple[ForwardReply, bytes]]]


@asynccontextmanager
async def open_impostor(
    rules: PipelineSettings, stage: int, table: Table, answer: Answerer | None
) -> AsyncIterator[Host]:
    """A peer without a stage, that calls as it likes and answers FORWARD with `answer`, if any."""
    log = Log()
    async with open_host(identity=Identity.generate(), events=log) as host:
        if answer is not None:

            async def on_pass(call: Any) -> tuple[ForwardReply, bytes]:
                return await answer(call.body, call.payload)

            host.rpc.register(forward_method(rules), on_pass)
            table[host.peer_id] = {"stage": stage, "addresses": list(host.addresses)}
        yield host


async def pass_to(
    host: Host, rules: PipelineSettings, peer: str, stage: int, payload: bytes, **changes: Any
) -> ForwardReply:
    """One FORWARD, by hand, to a replica of `stage` whose addresses `host` knows."""
    values: dict[str, Any] = {
        "group": rules.groups[stage],
        "samples": (0, MICRO),
        "epoch": 0,
        "batch": MICRO,
        "length": SEQ,
        **changes,
    }
    return (await host.rpc.call(peer, forward_method(rules), ForwardRequest(**values), payload, timeout_s=60)).body


async def dispatch_all(replica: Replica, spans: list[Range], window: int = 8) -> float:
    """Dispatch them side by side; return the loss in nats, summed."""
    total = 0.0
    limiter = trio.CapacityLimiter(window)

    async def dispatch(span: Range) -> None:
        nonlocal total
        async with limiter:
            result = await replica.source.dispatch_one(span, tokens_of(span))
            assert result.done, result
            total += result.loss

    async with trio.open_nursery() as nursery:
        for span in spans:
            nursery.start_soon(dispatch, span)
    return total
