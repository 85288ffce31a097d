"""One of several processes that run rounds of any method with invented work; started by `test_methods.py`.

    python -m tests.swarm.method_child NUMBER ROUNDS FOLDER   < {"outer": ..., "codec": ...}

The child prints {"peer", "session", "addresses"}, reads the list of what all children printed, and prints that it is
ready. After another line it runs the rounds. It stays until a last line comes, because the others look for it at
the end. After each round it prints {"round", "state_hash", "members", "bulk_bytes_up", "ideal_bytes"}: the bytes it has
sent in total, and the bytes that the round's coding needs for the exchange of all these members together.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio
from swarm.rounds.engine import Engine
from swarm.rounds.handlers import RunLimits
from swarm.rounds.replay import replay

from optim.config import CodecConfig, OuterConfig
from optim.strategies.registry import build_strategy
from peer.config import InnerConfig, ModelConfig
from peer.events import EventLog
from peer.identity import Identity, sign_body
from peer.model.layout import FlatLayout
from peer.net.host import HostConfig, open_host
from peer.net.limits import NetLimits
from peer.net.method import Call
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.messages import REGROUP_KIND
from swarm.protocol.quorum import HeadCandidate
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.trainer import TrainRequest, TrainResult
from swarm.state.fetch import fetch_state
from swarm.state.messages import AskChunk, AskResult
from swarm.state.outer_state import OuterState
from swarm.state.snapshots import SnapshotStore

MODEL = ModelConfig(
    hidden_size=96, layers=5, heads=4, kv_heads=4, intermediate_size=256, max_seq_len=128, vocab_size=512
)
PATIENT = NetLimits(suspect_after_s=120.0)  # a peer that stands still for some seconds must be in every round
INNER = InnerConfig(lr=1e-3, batch_size=1, total_steps=1000)


class Setup(msgspec.Struct):
    outer: OuterConfig
    codec: CodecConfig


class Invented:
    """Work of the size the method wants, different at every peer and in every round."""

    speed = 1.0

    def __init__(self, number: int) -> None:
        self._number = number

    async def train(self, request: TrainRequest) -> TrainResult:
        steps = request.assignment.steps
        size = sum(place.stop - place.start for place in request.places)
        generator = torch.Generator().manual_seed(1000 * self._number + request.round_info.round)
        return TrainResult(steps, steps, 1.0, torch.randn(size, generator=generator).mul_(1e-3))

    def finish_early(self) -> None:
        """Do nothing: training takes no time."""

    def adopt(self, theta: torch.Tensor, changed: tuple[slice, ...] | None, head: Head) -> None:
        """Wait without end: each member knows its own work."""

    def has_run_dry(self, round: int) -> bool:
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
    """The engine's `CommitListener`: prints each commit. A peer that missed commits replays or fetches them."""

    def __init__(self, context: RoundContext, snapshots: Snapshots, part_file: Path) -> None:
        self._context, self._snapshots = context, snapshots
        self._part_file = part_file

    async def committed(self, head: Head, results: list[memoryview]) -> None:
        context, members = self._context, len(head.members)
        context.snapshots.publish(context.state.tree, context.state.tensors, msgspec.msgpack.encode(head), results)
        coding = context.state.strategy.coding(
            context.schedule.round_info(head), context.state.tensors
        )  # the same size every round
        slices = range(coding.count)
        messages = sum(coding.message_bytes(i) for i in slices)
        down = sum(coding.result_bytes(i, members) for i in slices)
        report = {
            "round": head.round,
            "state_hash": head.state_hash.hex(),
            "members": members,
            "bulk_bytes_up": context.host.bulk_bytes_up - self._snapshots.uploaded_bytes,
            "ideal_bytes": (members - 1) * (messages + down),
        }
        say(report)

    async def fetch(self, candidate: HeadCandidate, mine: Head) -> None:
        context, wanted, donors = self._context, candidate.head.state_hash, candidate.holders
        if not await replay(context, mine, wanted, donors):
            state, file, vectors = context.state, self._part_file, len(context.state.tensors)
            fetched = await fetch_state(
                context.host.rpc, lambda: donors, wanted, state.size_bytes, file, context.events, vectors
            )
            state.replace(fetched.tensors, fetched.tree)

    def known_peers(self) -> Iterable[str]:
        return ()


def say(message: object) -> None:
    print(json.dumps(message), flush=True)  # noqa: T201


async def hear() -> str:
    return await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)


async def main(number: int, rounds: int, folder: Path) -> None:
    torch.set_num_threads(1)
    setup = msgspec.json.decode(await hear(), type=Setup)
    layout = FlatLayout.of(MODEL)
    strategy = build_strategy(setup.outer, setup.codec, layout, INNER)
    theta = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1)) * 0.02
    state = OuterState([theta, *(torch.zeros_like(theta) for _ in strategy.shared)], strategy)
    authority, identity, log = Identity.load_or_create(folder / "authority.key"), Identity.generate(), EventLog()
    async with open_host(HostConfig(identity=identity, events=log, limits=PATIENT)) as host:
        me = Member(host.peer_id, secrets.token_hex(4))
        say({"peer": me.peer, "session": me.session, "addresses": host.addresses})
        group = json.loads(await hear())
        for hello in group:
            host.book.add(hello["peer"], hello["addresses"])
        first = genesis("methods", state.tree.root)
        head = first.regrouped(tuple(Member(hello["peer"], hello["session"]) for hello in group), 1)
        schedule, snapshots = RoundSchedule(setup.outer, INNER, 8, 60.0), Snapshots(state.size_bytes, 9 << 20)
        snapshots.publish(state.tree, state.tensors)
        snapshots.serve(host.rpc)
        context = RoundContext(
            me, host, state, snapshots, Invented(number), schedule, AdaptiveTimeouts(timeout_floor_s=60.0)
        )
        limits = RunLimits(first, authority.peer_id, rounds, len(group))
        signed = sign_body(authority, REGROUP_KIND, head)
        engine = Engine(context, limits, head, signed, Reporter(context, snapshots, folder / f"{number}.part"))
        say("ready")
        await hear()
        await engine.run()
        await hear()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
