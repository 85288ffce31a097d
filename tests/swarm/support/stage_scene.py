"""All groups of a pipeline at work in one process, and checks of what they committed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trio

from optim.config import AllReduceConfig
from peer.compute.train_loop import learning_rate
from peer.identity import Identity
from peer.model.layout import FlatLayout, init_flat, join_flat
from swarm.protocol.head import Member
from swarm.protocol.ledger import count, overlaps, union, without
from tests.peer.support.stage_harness import MODEL, SPLITS, relative, whole_gradient
from tests.support.forking.forked import ForkedProcess
from tests.support.newer_trio import run_abandonable
from tests.swarm.support.pipeline_harness import Table, open_replicas, tokens_of
from tests.swarm.support.stage_replicas import UNCLIPPED, Setting, StageMember, entry_of, open_member, run_members

ROOT = Path(__file__).parents[3]
BATCH = 24


@dataclass
class Scene:
    stages: list[list[StageMember]]
    table: Table

    @property
    def members(self) -> list[StageMember]:
        return [member for members in self.stages for member in members]

    async def run(self) -> None:
        """Run until every member has committed the last round."""
        await run_members(self.members)

    def tell(self) -> None:
        """Print what happened, for the output of a failed test."""
        told = [(event.at, member.replica, event) for member in self.members for event in member.replica.events]
        for at, replica, event in sorted(told, key=lambda entry: entry[0]):
            print(f"{at % 1000:8.3f} {replica.stage} {replica.peer[-4:]} {event.name} {event.fields}")  # noqa: T201

    def check(self, rounds: int) -> None:
        """Check that each stage has one chain of the same bits, and that no sample was merged twice or lost."""
        for members in self.stages:
            chain = {head.round: head for member in members for head in member.heads}
            for member in members:
                assert member.heads[-1].round == rounds
                assert all(head == chain[head.round] for head in member.heads)
                assert member.context.state.tree.root == chain[rounds].state_hash
                struck = [e for e in member.replica.seen("peer_penalized") if e.fields["peer"] in self.table]
                assert not struck and not member.replica.seen("bug")
            merged = {
                head.round: m for member in members for head, m in zip(member.heads, member.merged, strict=True) if m
            }
            parts = {f"{number} {k}": part for number, m in merged.items() for k, part in enumerate(m)}
            assert not overlaps(parts), "a sample was merged twice"
            ledger = chain[rounds].ledger
            used = union(r for part in parts.values() for r in part)
            empty = {int(str(event.fields["round"])) for m in members for event in m.replica.seen("round_empty")}
            assert merged.keys() | empty == set(range(1, rounds + 1)) and not merged.keys() & empty
            assert all(member.trainer.is_exhausted(number) for number in empty for member in members)
            assert count(used) + count(ledger.returned) + ledger.lost == ledger.cursor
            missing = without([(0, ledger.cursor)], [*used, *ledger.returned])
            assert count(missing) == ledger.lost, "a sample was lost silently"
            if not members[0].replica.server.settings.synchronous:
                first = max((m.heads[-1] for m in self.stages[0]), key=lambda head: head.round).ledger
                assert not without(first.settled, ledger.settled), "the first stage has merged more, and none was told"


@asynccontextmanager
async def scene_of(
    folder: Path, setting: Setting, replicas: list[int], child: dict[str, Any] | None = None
) -> AsyncIterator[Scene]:
    authority = Identity.load_or_create(folder / "authority.key")
    async with open_replicas(folder, replicas, **setting.spec) as stages, AsyncExitStack() as stack:
        table: Table = {replica.peer: entry_of(replica) for group in stages for replica in group} | (child or {})
        members = [
            [await stack.enter_async_context(open_member(r, setting, table, authority, folder)) for r in group]
            for group in stages
        ]
        scene = Scene(members, table)
        try:
            yield scene
        except BaseException:
            scene.tell()
            raise


def one_process(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The whole model's gradient, and the weights after it, of each step of torch's AdamW on the same batches, in
    float64."""
    layout, flat = FlatLayout.of(MODEL), init_flat(MODEL, seed=0).double()
    parameters = {name: torch.nn.Parameter(view.clone()) for name, view in layout.views(flat).items()}
    matrices = [p for p in parameters.values() if p.dim() > 1]
    others = [p for p in parameters.values() if p.dim() <= 1]
    inner = UNCLIPPED
    groups = [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=inner.lr, betas=inner.betas, eps=inner.eps)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(inner, step)
        _, gradient = whole_gradient(MODEL, flat, [tokens_of((step * BATCH, (step + 1) * BATCH))])
        for name, view in layout.views(gradient).items():
            parameters[name].grad = view.view_as(parameters[name]).clone()
        optimizer.step()
        for name, view in layout.views(flat).items():
            view.copy_(parameters[name].detach())
        yield gradient, flat.clone()


def check_one_process(scene: Scene, steps: int) -> None:
    """The gradient that each round has merged and the weights after the last, of all stages, are one process's."""
    splits = SPLITS[len(scene.stages)]
    gradients, weights = zip(*one_process(steps), strict=True)
    for number, theirs in enumerate(gradients, start=1):
        parts = [next(s.gradients[number] for s in members if number in s.gradients) for members in scene.stages]
        ours = join_flat(MODEL, parts, splits)
        assert relative(ours, theirs) < 1e-5, f"the gradient of step {number}"
        assert all(relative(ours, g) > 1e-3 for g in gradients if g is not theirs), "told from all others"
    ours = join_flat(MODEL, [members[0].context.state.theta for members in scene.stages], splits)
    assert relative(ours, weights[-1]) < 1e-5
    assert relative(ours, weights[-2]) > 1e-4, "the last step is told from the one before"


async def check_a_kill(folder: Path, replicas: list[int], stage: int, steps: int) -> None:
    """A synchronous run of so many steps in which a replica of `stage` that joined at the start (besides `replicas`) is
    killed in the middle of a batch: it ends like one process all the same."""
    setting = Setting(len(replicas), AllReduceConfig(batch=BATCH), steps)
    Identity.load_or_create(folder / "authority.key")
    arguments = [folder, len(replicas), stage, BATCH, steps]
    pipe = subprocess.PIPE
    child_of = "tests.swarm.support.stage_child"
    with ForkedProcess(child_of, *map(str, arguments), stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as child:
        try:
            assert child.stdin is not None and child.stdout is not None
            entry = json.loads(await run_abandonable(child.stdout.readline))
            async with scene_of(folder, setting, replicas, entry) as scene:
                with trio.fail_after(240 + 30 * steps):
                    child.stdin.write(json.dumps(scene.table) + "\n")
                    child.stdin.flush()
                    ready = await run_abandonable(child.stdout.readline)
                    assert json.loads(ready) == {"ready": True}, "else its first round may begin without it"
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(scene.run)
                        witness = scene.stages[1 if stage == 0 else 0][0]
                        await until(lambda: len(witness.heads) >= 2 and witness.replica.server.accounting.counted)
                        child.kill()
                    group = scene.stages[stage]
                    victim, head = member_of(entry), group[0].heads[-1]
                    assert group[0].heads[0].has(victim)
                    assert not head.has(victim) or any(absence.member == victim for absence in head.absent)
                    scene.check(steps)
                    check_one_process(scene, steps)
        finally:
            child.kill()


def member_of(entry: Table) -> Member:
    ((peer, fields),) = entry.items()
    return Member(peer, fields["session"])


async def until(ready: Callable[[], Any]) -> None:
    while not ready():
        await trio.sleep(0.002)


def kill_worker(member: StageMember) -> None:
    pid = member.replica.worker_group.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
