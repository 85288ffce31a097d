"""Child of test_four_processes: one peer with invented pseudo-gradients, in a process of its own.

    diloco_child.py NUMBER NUMEL ROUNDS FOLDER

The child prints its addresses, reads the whole group from stdin and prints that it is ready. After another line it
takes part in ROUNDS rounds, writes its final state to FOLDER and prints a report. It stays until a last line comes,
because the others look for it at the end. All children hold the key of one authority (in FOLDER) and sign the first
head: Ed25519 is deterministic, so they sign the same bytes.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
import trio
from safetensors.torch import save_file
from swarm.rounds.engine import Engine
from swarm.rounds.handlers import RunLimits
from swarm.rounds.replay import replay

from optim.algorithms.outer_step import DilocoOuter
from optim.codecs import get_codec
from optim.config import DilocoConfig
from optim.strategies.dense import DenseWire
from optim.strategies.diloco import DilocoStrategy
from peer.config import InnerConfig
from peer.events import EventLog
from peer.identity import Identity, sign_body
from peer.net.host import HostConfig, open_host
from peer.net.limits import NetLimits
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.messages import REGROUP_KIND
from swarm.protocol.quorum import HeadCandidate
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.trainer import TrainRequest, TrainResult
from swarm.state.outer_state import OuterState
from swarm.state.snapshots import SnapshotStore

STEPS, BATCH, SEQ = 2, 1, 8
PATIENT = NetLimits(suspect_after_s=120.0)  # a peer that stands still for some seconds must be in every round


def initial_theta(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1))


def delta_of(number: int, first_step: int, numel: int) -> torch.Tensor:
    """The pseudo-gradient of peer `number` in the round whose first inner step is `first_step`."""
    seed = 1000 * number + first_step
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * (0.01 + 0.001 * number)


class Invented:
    speed = 1.0

    def __init__(self, number: int, numel: int) -> None:
        self._number, self._numel = number, numel

    async def train(self, request: TrainRequest) -> TrainResult:
        assignment = request.assignment
        await trio.lowlevel.checkpoint()
        delta = delta_of(self._number, request.round_info.step, self._numel)
        return TrainResult(assignment.steps, assignment.steps * BATCH, 1.0, delta)

    def finish_early(self) -> None:
        """Do nothing: training takes no time."""

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head) -> None:
        """Wait without end: each member knows its own work."""

    def has_run_dry(self, round: int) -> bool:
        return False

    async def gather(self, members: Sequence[str]) -> None:
        await trio.sleep_forever()


class Witness:
    """The engine's `CommitListener`: notes the number of members in each round. A peer that sees the others' commit
    before its own result is ready replays it; none falls further behind."""

    def __init__(self, context: RoundContext) -> None:
        self.members: list[int] = []
        self._context = context

    async def committed(self, head: Head, results: list[memoryview]) -> None:
        state = self._context.state
        self.members.append(len(head.members))
        self._context.snapshots.publish(state.tree, state.tensors, msgspec.msgpack.encode(head), results)

    async def fetch(self, candidate: HeadCandidate, mine: Head) -> None:
        assert await replay(self._context, mine, candidate.head.state_hash, candidate.holders)

    def known_peers(self) -> Iterable[str]:
        return ()


async def hear() -> str:
    return await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)


async def main(number: int, numel: int, rounds: int, folder: Path) -> None:
    torch.set_num_threads(1)
    authority = Identity.load_or_create(folder / "authority.key")
    identity, log, codec = Identity.generate(), EventLog(), get_codec("fp32")
    theta = initial_theta(numel)
    strategy = DilocoStrategy(DenseWire([[slice(0, numel)]], codec, codec), DilocoOuter(0.7, 0.9, True))
    state = OuterState([theta, torch.zeros_like(theta)], strategy)
    async with open_host(HostConfig(identity=identity, events=log, limits=PATIENT)) as host:
        me = Member(host.peer_id, secrets.token_hex(4))
        print(json.dumps({"peer": me.peer, "session": me.session, "addresses": host.addresses}), flush=True)  # noqa: T201
        group = json.loads(await hear())
        for hello in group:
            host.book.add(hello["peer"], hello["addresses"])
        first = genesis("four processes", state.tree.root)
        head = first.regrouped(tuple(Member(hello["peer"], hello["session"]) for hello in group), 1)
        schedule = RoundSchedule(
            DilocoConfig(steps=STEPS), InnerConfig(lr=1e-3, batch_size=BATCH, total_steps=1), SEQ, 60.0
        )
        snapshots = SnapshotStore(state.size_bytes, 9 << 20)
        snapshots.serve(host.rpc)
        context = RoundContext(
            me, host, state, snapshots, Invented(number, numel), schedule, AdaptiveTimeouts(timeout_floor_s=60.0)
        )
        witness = Witness(context)
        limits = RunLimits(first, authority.peer_id, rounds, len(group))
        engine = Engine(context, limits, head, sign_body(authority, REGROUP_KIND, head), witness)
        print(json.dumps("ready"), flush=True)  # noqa: T201
        await hear()
        await engine.run()
        save_file(state.named(), folder / f"{number}.safetensors")
        report = {"members": witness.members, "state_hash": state.tree.root.hex(), "bytes_up": host.bytes_up}
        print(json.dumps(report), flush=True)  # noqa: T201
        await hear()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
