"""The check by loss: after how many rounds a wrong member is put out, and how often an honest one is judged wrongly.

    python benchmarks/training/loss_checks.py [--rounds 40] [--seeds 2] [--only NAME ...] [--json [FILE]]

Four peers train the small byte model of convergence.py in one process (DiLoCo, H 20, 8 bits), from its warm weights or
from random ones. After each round every peer that is still a member checks one other contribution, as with
`check_by_loss = 1`, by the rule that the network uses (`swarm.protocol.loss_check`), on 8 held-out batches of 8
windows. The leader, drawn for each round, leaves out what it has judged itself; a member left out for rounds in a row
under two different leaders is put out. The wrong one of the four sends its update with the sign flipped, noise of the
right norm, or the update of its first round again and again; it judges none. "slow" is an honest one that makes a fifth
of the steps.

A check has no outcome where the judge's own gain is not clear, nor where the other update gains too little, but not
clearly. The cost is the time of one check over that of one
inner step of the same process, both of CPU time on one thread.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import load_file

from benchmarks.common.options import add_json, write_results
from benchmarks.training.byte_task import BATCH, MODEL, SEQ, Task, inner_config, warm_up
from benchmarks.training.rounds import Rounds
from optim.config import CodecConfig, DilocoConfig
from optim.strategies.registry import build_strategy
from peer.compute.adamw_fused import FusedAdamW
from peer.compute.optimizer import InnerSpec
from peer.model.layout import init_flat
from swarm.protocol.agreement.rules.succession import ABSENCES_MAX
from swarm.protocol.loss_check import Judgements, LossCheck, ways

PEERS, STEPS, BATCHES, SLOWER = 4, 20, 8, 5
WRONG = 0  # the number of the peer that is wrong
KINDS = ("slow", "none", "sign flip", "noise", "first update")
HONEST = ("none", "slow")
STARTS = ("warm", "random")
Figures = dict[str, Any]


@dataclass
class Tally:
    """What came of the checks of one run, of honest members and of the wrong one."""

    checks: int = 0
    no_outcome: int = 0
    wrongly: int = 0
    """Honest contributions found harmful."""
    wrongly_left_out: int = 0
    """Rounds in which a leader left out an honest contribution."""
    found: list[bool] = field(default_factory=list)
    """Whether a check of the wrong member's contribution has found it."""
    told_in: int | None = None
    """The round after which the first judge leaves it out."""
    out_in: int | None = None
    """The round with which it is put out."""


class Group:
    """Four peers, and their judgements."""

    def __init__(self, kind: str, start: str, seed: int, folder: Path) -> None:
        self.kind, self.tally = kind, Tally()
        self.task = Task(seed)
        warm = load_file(folder / f"warm-{seed}.safetensors")["theta"]
        theta, layout = warm if start == "warm" else init_flat(MODEL, seed), self.task.layout
        method, inner = DilocoConfig(steps=STEPS), inner_config({})
        self.rounds = Rounds(lambda: build_strategy(method, CodecConfig(), layout, inner), theta, PEERS)
        self.inner = [FusedAdamW(InnerSpec.of(inner), layout, theta) for _ in range(PEERS)]
        self.judgements = [Judgements() for _ in range(PEERS)]
        self.members = list(range(PEERS))
        self.absent_under: set[int] = set()  # the leaders of the rounds in a row for which the wrong one was left out
        self.dice, self.noise = random.Random(seed), torch.Generator().manual_seed(seed)
        self.held_out = list(self.task.corpus.held_out_batches(BATCH, BATCHES))
        self.first: torch.Tensor | None = None
        self.samples = 0
        self.step_s = self.check_s = 0.0

    def round(self, number: int) -> None:
        """Train, check, merge what the leader merges."""
        theta = self.rounds.tensors[0]
        updates = {peer: self._update(peer, theta) for peer in self.members}
        leader = self.dice.choice(self.members)  # by the hash of the head in a run, so that none can foresee it
        left_out = {int(peer) for peer in self.judgements[leader].left_out}
        left_out = left_out if leader != WRONG or self.kind in HONEST else set()
        merged = [peer for peer in self.members if peer not in left_out]
        if 2 * len(merged) <= len(self.members):
            merged = list(self.members)
        self.tally.wrongly_left_out += sum(self._is_honest(peer) for peer in self.members if peer not in merged)
        for judge in merged:
            if self._is_honest(judge):
                self._check(judge, merged, updates, theta, number)
        self._merge(merged, updates)
        self.absent_under = {*self.absent_under, leader} if WRONG in self.members and WRONG not in merged else set()
        if len(self.absent_under) == ABSENCES_MAX:
            self.members.remove(WRONG)
            self.tally.out_in = number + 1

    def _steps(self, peer: int) -> int:
        return STEPS // SLOWER if peer == WRONG and self.kind == "slow" else STEPS

    def _update(self, peer: int, theta: torch.Tensor) -> torch.Tensor:
        local, steps = theta.clone(), self._steps(peer)
        begin = time.thread_time()
        for _ in range(steps):
            self.inner[peer].step(local, self.task.gradient(local, self.samples))
            self.samples += 1
        self.step_s += (time.thread_time() - begin) / steps
        update = theta - local
        if peer != WRONG or self.kind in HONEST:
            return update
        self.first = update.clone() if self.first is None else self.first
        noise = torch.randn(update.shape, generator=self.noise)
        if self.kind == "sign flip":
            return -update
        return self.first if self.kind == "first update" else noise * (update.norm() / noise.norm())

    def _check(
        self, judge: int, merged: Sequence[int], updates: dict[int, torch.Tensor], theta: torch.Tensor, number: int
    ) -> None:
        others = [peer for peer in merged if peer != judge]
        suspects = [peer for peer in others if str(peer) in self.judgements[judge].suspects]
        other = self.dice.choice(suspects or others)
        begin = time.thread_time()
        own_way, way = ways(float(updates[judge].norm()), float(updates[other].norm()))
        points = (theta, theta - own_way * updates[judge], theta - way * updates[other])
        work = self._steps(other) / self._steps(judge)
        before, own, along = map(self._losses, points)
        is_harmful = LossCheck(before, own, along, work).is_harmful
        self.check_s += time.thread_time() - begin
        self.tally.checks += 1
        if is_harmful is None:
            self.tally.no_outcome += 1
            return
        self.judgements[judge].note(str(other), is_harmful)
        if self._is_honest(other):
            self.tally.wrongly += is_harmful
            return
        self.tally.found.append(is_harmful)
        if self.tally.told_in is None and str(other) in self.judgements[judge].left_out:
            self.tally.told_in = number + 1

    def _losses(self, weights: torch.Tensor) -> list[float]:
        self.task.flat.copy_(weights)
        with torch.no_grad():
            return [float(self.task._loss(batch)) for batch in self.held_out]

    def _merge(self, merged: Sequence[int], updates: dict[int, torch.Tensor]) -> None:
        """Merge by tokens, with the gate; those that are left out have no tokens."""
        tokens = [STEPS * BATCH * SEQ * (peer in merged) for peer in range(PEERS)]
        if self.kind == "slow":
            tokens[WRONG] //= SLOWER
        nothing = torch.zeros_like(self.rounds.tensors[0])
        self.rounds.exchange([updates.get(peer, nothing) for peer in range(PEERS)], tokens)

    def _is_honest(self, peer: int) -> bool:
        return peer != WRONG or self.kind in HONEST


def measure(kind: str, start: str, seeds: int, rounds: int, folder: Path) -> Figures:
    """Return one row of the table, over all seeds."""
    groups = [Group(kind, start, seed, folder) for seed in range(seeds)]
    for group in groups:
        for number in range(rounds):
            group.round(number)
    tallies = [group.tally for group in groups]
    found = [one for tally in tallies for one in tally.found]
    return {
        "wrong": kind,
        "start": start,
        "rounds": rounds * seeds,
        "checks": sum(tally.checks for tally in tallies),
        "no_outcome": sum(tally.no_outcome for tally in tallies),
        "of_honest_wrongly": sum(tally.wrongly for tally in tallies),
        "honest_left_out": sum(tally.wrongly_left_out for tally in tallies),
        "checks_of_wrong": len(found),
        "found": sum(found),
        "told_in": [tally.told_in for tally in tallies],
        "out_in": [tally.out_in for tally in tallies],
        "loss": round(sum(group.task.loss(group.rounds.tensors[0]) for group in groups) / seeds, 4),
        "check_in_steps": round(
            sum(group.check_s for group in groups)
            / max(1, sum(tally.checks for tally in tallies))
            / (sum(group.step_s for group in groups) / sum(_trained(group, rounds) for group in groups)),
            2,
        ),
    }


def _trained(group: Group, rounds: int) -> int:
    """Return how many updates a group has made."""
    without = 0 if group.tally.out_in is None else rounds - group.tally.out_in
    return PEERS * rounds - without


COLUMNS = {
    "one of four is": "wrong", "start": "start", "rounds": "rounds", "checks": "checks",
    "of these without an outcome": "no_outcome", "honest updates judged wrongly": "of_honest_wrongly",
    "honest updates left out": "honest_left_out", "checks of the wrong one": "checks_of_wrong",
    "that found it": "found",
    "first left out after round": "told_in", "put out in round": "out_in", "loss at the end": "loss",
    "a check, in inner steps": "check_in_steps",
}  # fmt: skip


def table_of(rows: Sequence[Figures]) -> Figures:
    """Return the figures as `benchmarks/report.py` prints them."""

    def cell(value: Any) -> str:
        values = value if isinstance(value, list) else [value]
        return ", ".join("never" if one is None else str(one) for one in values)

    return {"columns": list(COLUMNS), "rows": [[cell(row[name]) for name in COLUMNS.values()] for row in rows]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="only these kinds")
    add_json(parser, "training/loss_checks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            warm_up(seed, Path(folder))
        for start in STARTS:
            for kind in options.only:
                rows.append(measure(kind, start, options.seeds, options.rounds, Path(folder)))
                print(rows[-1], flush=True)
    if options.json:
        write_results(options.json, table_of(rows))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
