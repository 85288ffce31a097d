"""A pipeline of real processes as `peer coordinate` and `peer join` make it: every peer chooses its stage, one replica
is killed, one more joins, and every micro-batch counts exactly once at both stages."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.demo.child_processes import ChildPeer, children
from cli.demo.cluster import COORDINATOR, LocalCluster
from cli.demo.report import Report
from cli.demo.scenario import Scenario
from cli.demo.verdict import judge
from cli.progress.progress import Progress
from tests.simulation.histories.checks import check_histories
from tests.support.forking.forked import forked_children

pytestmark = pytest.mark.process

ROUNDS = 12
RUN = f"""
[run]
name = "two stages"
open = true
rounds = {ROUNDS}
[model]
vocab_size = 256
hidden_size = 32
layers = 2
heads = 2
kv_heads = 2
intermediate_size = 64
max_seq_len = 64
tie_embeddings = false
[data]
seq_len = 64
[inner]
lr = 1e-2
batch_size = 4
total_steps = 240
warmup_steps = 10
[outer]
method = "diloco"
steps = 20
[pipeline]
stages = 2
"""


def test_a_pipeline_with_a_kill_and_a_join_counts_every_micro_batch_once(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    progress, began = Progress("test", keeps_all=True, stages=2), time.time()
    with forked_children(), children() as group:
        cluster = LocalCluster(tmp_path, ROUNDS, group, progress, lambda: None)
        report = judge(play(cluster), progress, ROUNDS, began)
    check(report)
    check_histories(folder for folder in tmp_path.iterdir() if (folder / "events.jsonl").exists())


def play(cluster: LocalCluster) -> Scenario:
    cluster.begin()
    started = [cluster.join(number) for number in range(1, 5)]
    cluster.wait(None, "everybody has a stage", lambda: None not in stages_of(cluster, started))
    assert set(stages_of(cluster, started)) == {0, 1}, "those who choose at the same time spread out"
    added = cluster.add(5)  # early: where it starts slowly, many rounds are over before it can take part
    cluster.wait(None, "both stages have committed a round", lambda: cluster.progress.round >= 1)
    victim = cluster.choose_victim(started)
    cluster.kill(victim)
    survivors = [child for child in (*started, added) if child is not victim]
    cluster.wait(None, "all see the end of the run", lambda: not any(child.alive for child in survivors))
    assert set(stages_of(cluster, survivors)) == {0, 1}, "where it is worth most, by what was measured"
    assert COORDINATOR in group_names(cluster)
    return Scenario(cluster.children, [victim.name], [added.name], [child.name for child in survivors])


def stages_of(cluster: LocalCluster, children: Sequence[ChildPeer]) -> list[int | None]:
    return [cluster.progress.peer(child.name).claims.stage for child in children]


def group_names(cluster: LocalCluster) -> list[str]:
    return [child.name for child in cluster.children.values() if child.alive]


def check(report: Report) -> None:
    # Nobody was frozen here; all else that the quickstart asks for must hold.
    assert [text for text in report.broken_invariants if text != "no peer was frozen"] == []
    assert report.rounds_committed == ROUNDS and len(report.stages) == 2
    assert all(stage.round == ROUNDS and stage.replicas for stage in report.stages)
    books = report.micro_batches
    assert books is not None and books.double_counted == books.lost == 0
    assert books.completed >= 200 and books.dispatched >= books.completed
    # How much was learned before the first measurement, which is at the first commit, depends on the machine.
    assert report.val_loss_last < min(report.val_loss_first, math.log(256) - 2.0)
