"""The cost of a late joiner to the rounds of the members, in real processes on 127.0.0.1.

    python benchmarks/rounds/late_join.py [--peers 3] [--params 8000000] [--compute 1.5] [--rounds 32] [--nice 19 0]
                                   [--json [FILE]]

The members run rounds whose compute phase is a pause of `--compute` seconds, as if a GPU did the work. Every third
round or so, at a random moment, a joiner fetches the state of the current head (8 bytes a parameter) from all, as a
late peer does. Rounds that a fetch overlaps are compared with the other rounds of the same run.

A real joiner has its own machine. Here it shares the members' cores, and its decryption and hashing would count as
theirs. So there is one run for each `--nice`: at 19 the joiner takes what the members leave, and the difference is the
work of the donors; at 0 it competes with them. `member_cpu_s` is the CPU time of a donor for one round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import trio

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.children import START_S, Child, begin
from benchmarks.common.options import add_json, write_results
from benchmarks.rounds.averaging_data import delta_of
from benchmarks.rounds.averaging_peer import SCHEDULE, NoTraining, Observer, diloco_state, take_part
from optim.algorithms.outer_step import DilocoOuter
from peer.errors import NetworkError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import open_host
from swarm.membership.proven_heads import ask_proven_heads
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.head import genesis
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.replica_driver import restore_replica
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult
from swarm.rounds.work import work_of
from swarm.state.fetch import fetch_state
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore

OUTER = DilocoOuter(lr=0.7, momentum=0.9)
ROUND_S = 60.0
WARM_UP = 3  # rounds
REST = 3  # rounds from one fetch to the next


class Pausing(NoTraining):
    """Pauses in place of training."""

    def __init__(self, delta: torch.Tensor, pause_s: float) -> None:
        super().__init__(delta)
        self._pause_s = pause_s
        self.speed = 1 / pause_s

    async def train(self, request: TrainRequest) -> TrainResult:
        await trio.sleep(self._pause_s)
        return await super().train(request)


def config_of(peer: str, numel: int, rounds: int, folder: Path) -> AgreementConfig:
    """Return the part of `peer` in the group. The coordinator takes no part: its key is in `folder`."""
    authority = Identity.load_or_create(folder / "authority.key")
    first = genesis("benchmark", diloco_state(numel, "int8", OUTER).tree.root)
    return AgreementConfig(genesis=first, peer=peer, coordinator=authority.peer_id, rounds=rounds)


async def member(number: int, numel: int, pause_s: float, rounds: int, folder: Path) -> None:
    """Run one member, in its own process."""
    torch.set_num_threads(1)
    authority, identity = Identity.load_or_create(folder / "authority.key"), Identity.generate()
    log = EventLog()
    state = diloco_state(numel, "int8", OUTER)
    async with open_host(identity=identity, events=log) as host, trio.open_nursery() as nursery:
        snapshots = SnapshotStore(state.size_bytes, 9 << 20)
        serve_snapshots(host.rpc, [snapshots])
        trainer = Pausing(delta_of(number, numel), pause_s)
        parts = RoundContext(host, state, snapshots, trainer, SCHEDULE, AdaptiveTimeouts(), folder / host.peer_id)
        work = work_of(state.strategy, SCHEDULE, lambda head: ROUND_S)
        driver = await restore_replica(parts, config_of(host.peer_id, numel, rounds, folder), work, lambda: ())
        observer = Observer(parts, rounds)
        driver.actor.listener = observer
        me = driver.me
        print(json.dumps({"peer": me.peer, "session": me.session, "addresses": host.addresses}), flush=True)
        await take_part(driver, parts, authority, rounds, nursery)
        seconds, cpu = list(observer.seconds.values()), list(observer.cpu_s.values())
        print(json.dumps({"seconds": seconds, "cpu": cpu}), flush=True)
        await trio.sleep_forever()  # other members may still need this one; the parent ends it


async def joiner(numel: int, rounds: int, nice: int, folder: Path) -> None:
    """Fetch a state now and then until the run is over, and print when."""
    torch.set_num_threads(1)
    os.nice(nice)
    line = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
    group = json.loads(line)["group"]
    peers = [hello["peer"] for hello in group]
    dice = random.Random(1)
    fetches: list[dict[str, float]] = []
    next_round = WARM_UP + REST
    async with open_host(identity=Identity.generate(), events=EventLog()) as host:
        for hello in group:
            host.book.add(hello["peer"], hello["addresses"])
        config = config_of(host.peer_id, numel, rounds, folder)
        round_number = 0
        while round_number < rounds - 1:
            await trio.sleep(dice.uniform(0.1, 0.6))
            found = await ask_proven_heads(host, config, peers)
            head = found[0].head if found else config.genesis
            round_number = head.round
            if round_number < next_round:
                continue
            began = time.monotonic()
            with suppress(NetworkError):  # the head has moved on
                file = folder / "joiner.part"
                got = await fetch_state(host.rpc, lambda: peers, head.state_hash, 8 * numel, file, host.events)
                fetches.append({"began": began, "ended": time.monotonic(), "donors": len(got.donors)})
                next_round = head.round + REST
        print(json.dumps({"fetches": fetches}), flush=True)


def measure(peers: int, numel: int, pause_s: float, rounds: int, nice: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        children = []
        for number in range(peers):
            children.append(Child("benchmarks.rounds.late_join", "--member", number, numel, pause_s, rounds, folder))
            stack.callback(children[-1].end)
        late = Child("benchmarks.rounds.late_join", "--joiner", numel, rounds, nice, folder)
        stack.callback(late.end)
        group = [child.read(START_S) for child in children]
        late.tell({"group": group})
        begin(children, group)
        fetches = late.read(rounds * ROUND_S)["fetches"]
        notes = [child.read(ROUND_S) for child in children]
    costs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}  # (wall, CPU) seconds of rounds, by overlap
    for note in notes:
        ends = list(zip(note["seconds"], note["cpu"], strict=True))
        for (began, cpu_before), (ended, cpu_after) in list(pairwise(ends))[WARM_UP:]:
            overlapped = any(fetch["began"] < ended and fetch["ended"] > began for fetch in fetches)
            costs[overlapped].append((ended - began, cpu_after - cpu_before))
    (alone, cpu_alone), (beside, cpu_beside) = (map(median, zip(*costs[kind], strict=True)) for kind in (False, True))
    fetch_s = median(fetch["ended"] - fetch["began"] for fetch in fetches)
    return {
        "joiner_nice": nice,
        "peers": peers,
        "params": numel,
        "compute_s": pause_s,
        "round_s_alone": alone,
        "round_s_beside_a_fetch": beside,
        "slowdown": beside / alone - 1,
        "member_cpu_s_alone": cpu_alone,
        "member_cpu_s_beside": cpu_beside,
        "rounds_alone": len(costs[False]) // peers,
        "rounds_beside": len(costs[True]) // peers,
        "fetches": len(fetches),
        "fetch_s": fetch_s,
        "fetch_mb_s": 8e-6 * numel / fetch_s,
        "donors": max(fetch["donors"] for fetch in fetches),
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--params", type=int, default=8_000_000)
    parser.add_argument("--compute", type=float, default=1.5, help="seconds that a round's training takes")
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--nice", type=int, nargs="+", default=[19, 0], help="priorities of the joiner, a run for each")
    add_json(parser, "late_join")
    options = parser.parse_args()
    runs = [measure(options.peers, options.params, options.compute, options.rounds, nice) for nice in options.nice]
    for name in runs[0]:
        values = (f"{run[name]:>12.3f}" if isinstance(run[name], float) else f"{run[name]:>12}" for run in runs)
        print(f"{name:24}", *values)
    if options.json:
        write_results(options.json, runs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--member"]:
        _, _, number, numel, pause, rounds, folder = sys.argv
        trio.run(member, int(number), int(numel), float(pause), int(rounds), Path(folder))
    elif sys.argv[1:2] == ["--joiner"]:
        _, _, numel, rounds, nice, folder = sys.argv
        trio.run(joiner, int(numel), int(rounds), int(nice), Path(folder))
    else:
        main()
