"""A child of `benchmarks/pipelines/swarm.py`: one stage of a pipeline, with a host and a compute worker of its own.

    python -m benchmarks.pipelines.swarm_stage SETTING STAGES INDEX IP FOLDER

    says  {"peer": id, "address": multiaddr}
    hears {"peers": [...]}          what all stages have said, in order; connects to the next one
    says  {"ready": true}
    hears {"micro_batches": n}      stage 0: dispatches so many, and waits until all have come back
    says  {"seconds", "steady", "steady_s", "retried", "window"}: how many came back while others were still
          begun, in what time, calls repeated, and how many were in flight at the end
    hears {"report": true}          says its counters since the start

Ends with its standard input. The source, the servers, their calls and workers are the network's; the table of replicas
is fixed, nothing is merged and no step is made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import trio

from benchmarks.pipelines.swarm_setting import HIDDEN_SIZE, SEED, SETTINGS, VOCAB_SIZE, Setting, some_tokens
from peer.events import EventLog
from peer.footprint.layout import Compute
from peer.identity import Identity
from peer.ipc.span import spans_of
from peer.ipc.stage_spec import StageSpec
from peer.model.layout import init_flat, split_flat
from peer.net.host import open_host
from peer.net.reach import Reach
from peer.worker.config import WorkerConfig
from peer.worker.stage_client import StageWorkerGroup, open_stage_worker_group
from swarm.pipeline.accounting import SampleAccounting
from swarm.pipeline.config import LoadReport, PipelineSettings
from swarm.pipeline.micro_batch import MicroBatchResult
from swarm.pipeline.source import MicroBatchSource
from swarm.pipeline.stage_server import StageServer
from swarm.protocol.head import Head
from swarm.protocol.ledger import Ledger, Range
from swarm.protocol.receipts import StageProof

RUN = "benchmark"
CALL_S = 30.0


def rules_of(setting: Setting, stages: int) -> PipelineSettings:
    return PipelineSettings(
        run_id=RUN,
        groups=tuple(f"{RUN}-{stage}" for stage in range(stages)),
        micro_batch=setting.sequences,
        seq_len=setting.seq_len,
        hidden_size=HIDDEN_SIZE,
        vocab_size=VOCAB_SIZE,
        activations=setting.activations,
    )


def worker_config(setting: Setting, stages: int, index: int, folder: Path) -> WorkerConfig:
    return WorkerConfig(
        model=setting.model(stages),
        data=setting.data,
        inner=setting.inner,
        directory=folder,
        events=EventLog(),
        compute=Compute("cpu", threads=1),
        stage=StageSpec(
            span=spans_of(setting.cuts(stages))[index], index=index, max_tokens=setting.tokens, staleness=1
        ),
    )


class Dispatches:
    """Stage 0's micro-batches; no sample comes twice."""

    def __init__(self, setting: Setting, server: StageServer) -> None:
        self._setting = setting
        self._generator = torch.Generator().manual_seed(SEED)
        self._source = MicroBatchSource(server, self._tokens, self._on_result)
        self._came_back: list[float] = []
        self._next = 0

    async def run(self, micro_batches: int) -> dict[str, float]:
        """Carry out {"micro_batches": n}."""
        begin, retried = trio.current_time(), self._source.totals.retried
        self._came_back = []
        first, self._next = self._next, self._next + micro_batches * self._setting.sequences
        await self._source.dispatch([(first, self._next)])
        steady = self._came_back[: max(micro_batches // 2, micro_batches - self._source.window)]
        return {
            "seconds": trio.current_time() - begin,
            "steady": len(steady) - 1,
            "steady_s": steady[-1] - steady[0],
            "retried": self._source.totals.retried - retried,
            "window": self._source.window,
        }

    def _on_result(self, samples: Range, result: MicroBatchResult) -> None:
        assert result.counted
        self._came_back.append(trio.current_time())

    async def _tokens(self, spans: Sequence[Range]) -> torch.Tensor:
        return some_tokens(self._setting, self._generator)


async def main() -> None:
    name, stages, index, ip, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
    torch.set_num_threads(1)
    setting = SETTINGS[name]
    rules = rules_of(setting, stages)
    config = open_host(identity=Identity.generate(), events=EventLog(), reach=Reach((f"/ip4/{ip}/tcp/0",)))
    async with (
        config as host,
        open_stage_worker_group(worker_config(setting, stages, index, folder)) as worker_group,
    ):
        await load(setting, worker_group, stages)
        say(peer=host.peer_id, address=host.addresses[0])
        peers = (await hear())["peers"]
        if index + 1 < stages:
            await host.connect_address(peers[index + 1]["address"], timeout_s=CALL_S)
        table = [{peer["peer"]: LoadReport()} for peer in peers]

        def replicas_of(stage: int) -> Mapping[str, LoadReport]:
            return table[stage]

        async def prove(stage: int) -> StageProof:
            return ()

        head = Head(rules.groups[index], 0, 0, b"", b"", (), Ledger(), 0, 0)
        accounting = SampleAccounting(head, rules.micro_batch)
        server = StageServer(index, rules, worker_group, host, accounting, replicas_of, prove)
        async with server.open():
            dispatches = Dispatches(setting, server)
            say(ready=True)
            while order := await hear():
                if "micro_batches" in order:
                    say(**await dispatches.run(order["micro_batches"]))
                else:
                    say(bytes_up=host.bytes_up)


async def load(setting: Setting, worker_group: StageWorkerGroup, stages: int) -> None:
    """Load the start weights, the same at all stages."""
    model = setting.model(stages)
    parts = split_flat(model, init_flat(model, SEED), spans_of(setting.cuts(stages)))
    worker_group.outer.copy_(parts[worker_group.spec.index])
    await worker_group.import_weights(epoch=0)


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


async def hear() -> dict[str, Any]:
    """Return the parent's next line; empty at the end."""
    line = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
    message: dict[str, Any] = json.loads(line) if line else {}
    return message


if __name__ == "__main__":
    trio.run(main)
