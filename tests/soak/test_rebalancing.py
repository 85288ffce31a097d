"""Two of the three replicas of a stage die at once while the other stages have one to spare: somebody moves, and the
pipeline is nearly as fast again as the remaining devices allow.

Every peer has a device of its own (`tests.swarm.support.slow_devices`), so that a stage is as fast as it has replicas.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Final

import pytest
import trio

from tests.swarm.support.pipeline_run import STAGES, Pipeline, open_pipeline
from tests.swarm.support.slow_devices import open_devices, unavailable

pytestmark = [
    pytest.mark.soak,
    pytest.mark.process,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]

PEERS: Final = 9
CORES: Final = 0.12  # of each peer's worker
MEASURED_S: Final = 40.0
STILL_S: Final = 60.0  # without a move: all is as it should be
SETTLES_WITHIN_S: Final = 300.0
RECOVERED: Final = 0.8
MOVES_MAX: Final = 3  # to replace two
HIDDEN_SIZE: Final = 256  # so large that a peer's time goes into its stage, as it does where models are worth it
BATCH: Final = 16  # four micro-batches an inner step
OUTER: Final = '[outer]\nmethod = "diloco"\nsteps = 8'


def levels(pipeline: Pipeline) -> list[int]:
    """How many replicas each stage has."""
    where = Counter(replica.stage for replica in pipeline.replicas)
    return [where[stage] for stage in range(STAGES)]


def service_s(pipeline: Pipeline) -> list[float]:
    """What a micro-batch takes of a replica of each stage, by what they say."""
    told: list[list[float]] = [[] for _ in range(STAGES)]
    for replica in pipeline.replicas:
        loads = [f.fields["service_s"] for f in replica.peer.all("stage_load") if f.fields["service_s"] > 0]
        told[replica.stage] += loads[-1:]
    return [fmean(of) for of in told]


def allowed(peers: int, service: list[float]) -> float:
    """Micro-batches a second of so many alike devices, spread out as well as can be."""
    spreads = [spread for spread in product(range(1, peers), repeat=STAGES) if sum(spread) == peers]
    return max(min(n / s for n, s in zip(spread, service, strict=True)) for spread in spreads)


def moves(pipeline: Pipeline, since: float) -> list[str]:
    """Since then: seconds, who, from where to where."""
    found = sorted(
        (f.at - since, p.name, f.fields["source"], f.fields["target"])
        for p in pipeline.all_peers()
        for f in p.all("move_started")
        if f.at > since
    )
    return [f"{at:.0f} s: {name} {source} -> {target}" for at, name, source, target in found]


async def settled(pipeline: Pipeline) -> None:
    """Until nobody has moved for a while, and all are at work."""
    since = time.time()

    def is_still() -> bool:
        now = time.time()
        return now - since > STILL_S and not moves(pipeline, now - STILL_S)

    await pipeline.until(is_still, "nobody moves any more", SETTLES_WITHIN_S)
    await pipeline.whole(240.0)


async def measured(pipeline: Pipeline, what: str) -> float:
    """Micro-batches a second that came back."""
    since = time.time()
    await trio.sleep(MEASURED_S)
    found = pipeline.completed(since, time.time()) / (time.time() - since)
    service = service_s(pipeline)
    could = allowed(len(pipeline.replicas), service)
    of_each = ", ".join(f"{each:.3f}" for each in service)
    print(f"{what}: {levels(pipeline)} replicas of {of_each} s, {found:.2f} a second; best {could:.2f}", flush=True)
    return found


async def test_a_peer_moves_and_the_throughput_recovers(tmp_path: Path) -> None:
    began = time.time()
    with open_devices(CORES) as devices:
        async with (
            open_pipeline(tmp_path, OUTER, range(STAGES), HIDDEN_SIZE, BATCH) as pipeline,
            trio.open_nursery() as nursery,
        ):
            for _ in range(PEERS - STAGES):
                pipeline.join()
            await pipeline.whole(240.0)
            nursery.start_soon(devices.keep, lambda: [pid for r in pipeline.replicas for pid in r.workers])
            await settled(pipeline)
            print(f"\nall are at work after {time.time() - began:.0f} s; moves: {moves(pipeline, began)}", flush=True)
            full = await measured(pipeline, "whole")
            service = service_s(pipeline)
            assert 3 in levels(pipeline), "no stage has three replicas"
            robbed = levels(pipeline).index(3)
            for victim in pipeline.of(robbed)[:2]:
                pipeline.replicas.remove(victim)
                victim.peer.kill()
            killed = time.time()
            await measured(pipeline, f"two of stage {robbed} killed")
            await settled(pipeline)
            again = await measured(pipeline, "settled")
            moved = moves(pipeline, killed)
            print(f"moves after the kill: {moved}", flush=True)
            assert 1 <= len(moved) <= MOVES_MAX
            could = full * allowed(PEERS - 2, service) / allowed(PEERS, service)
            assert again >= RECOVERED * could, (full, could, again)
            assert not pipeline.twice() and not pipeline.forks()
            nursery.cancel_scope.cancel()
