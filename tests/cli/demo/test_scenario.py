"""The choice of peers to kill and freeze, and the audit of a stage that no peer reported."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.demo.child_processes import ChildPeer, Children, children
from cli.demo.cluster import LocalCluster, choose_frozen
from cli.demo.scenario import play_pipeline
from cli.demo.verdict import _audit_micro_batches
from cli.progress.event_tail import EventTail
from cli.progress.progress import Progress
from peer.identity import Identity
from swarm.protocol.ledger import Ledger
from tests.cli.test_pipeline_input import manifest_of

ARRIVALS = ((1, 0), (2, 1), (3, 0), (4, 1))


class Late(LocalCluster):
    """A cluster whose rounds are committed before its last peers have a stage. Its peers do nothing."""

    arrivals: tuple[tuple[int, int], ...] = ARRIVALS

    def __init__(self, home: Path, group: Children, progress: Progress, rounds: int = 12) -> None:
        super().__init__(home, rounds, group, progress, lambda: None)
        self.at_the_kill: list[int | None] = []
        self._to_come: list[tuple[str, str, dict[str, Any]]] = [
            ("replica_opened", f"peer-{number}", {"stage": stage}) for number, stage in self.arrivals
        ]
        committed: dict[str, Any] = {"round": 9, "state_hash": "ab", "head": "h", "previous": "g", "counted": []}
        for stage in (1, 0):
            self._to_come.insert(2, ("round_committed", f"peer-{stage + 1}", {**committed, "stage": stage}))

    def begin(self) -> None:
        self.started: list[str] = []

    def join(self, number: int) -> ChildPeer:
        name = f"peer-{number}"
        waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        process = subprocess.Popen(waits, stdin=subprocess.PIPE)
        child = ChildPeer(name, Path(name), process, EventTail(Path(name)), time.time())
        self.children[name] = child
        self.started.append(name)
        return child

    def kill(self, victim: ChildPeer) -> None:
        self.at_the_kill = [self.progress.peer(name).claims.stage for name in self.started[: len(self.arrivals)]]
        super().kill(victim)

    def wait(self, limit_s: float | None, what: str, done: Callable[[], bool]) -> None:
        while self._to_come and not done():
            event, name, fields = self._to_come.pop(0)
            self.progress.apply(name, event, 1.0, fields)


def test_no_peer_is_killed_before_all_have_a_stage(tmp_path: Path) -> None:
    with children() as group:
        cluster = Late(tmp_path, group, Progress("test", keeps_all=True, stages=2))
        scenario = play_pipeline(cluster, 4)
    assert cluster.at_the_kill == [0, 1, 0, 1]
    assert scenario.killed and scenario.frozen and {*scenario.killed}.isdisjoint(scenario.frozen)


class Fast(Late):
    """A cluster whose rounds take no time."""

    def wait(self, limit_s: float | None, what: str, done: Callable[[], bool]) -> None:
        super().wait(limit_s, what, done)
        while not done() and self.progress.round < self.rounds:
            number = self.progress.round + 1
            committed = {"round": number, "state_hash": "ab", "head": "h", "previous": "g", "counted": []}
            for stage in (0, 1):
                self.progress.apply(f"peer-{stage + 1}", "round_committed", 1.0, {**committed, "stage": stage})

    def thaw(self, frozen: ChildPeer) -> None:
        self.thawed_in = self.progress.round
        super().thaw(frozen)


def test_a_frozen_peer_is_thawed_before_the_end(tmp_path: Path) -> None:
    """Else all others would have the last round and leave."""
    with children() as group:
        cluster = Fast(tmp_path, group, Progress("test", keeps_all=True, stages=2), rounds=15)
        play_pipeline(cluster, 4)
    assert cluster.thawed_in <= cluster.rounds - 3


class Many(Late):
    """A cluster with a peer more than two for each stage."""

    arrivals = (*ARRIVALS, (5, 0))

    @contextmanager
    def slowed(self, slow: ChildPeer) -> Iterator[None]:
        self.slow = (slow.name, self.progress.peer(slow.name).claims.stage)
        with super().slowed(slow):
            yield


def test_one_of_many_peers_is_slow_and_no_other_fault_meets_it(tmp_path: Path) -> None:
    with children() as group:
        cluster = Many(tmp_path, group, Progress("test", keeps_all=True, stages=2))
        scenario = play_pipeline(cluster, 5)
    name, stage = cluster.slow
    assert stage == 1, "of the other two replicas of stage 0 one is killed"
    assert name in scenario.survivors and name not in (*scenario.killed, *scenario.frozen)
    assert any(f"slowed {name}" in mark for mark in scenario.marks.values())


@pytest.mark.parametrize(
    ("stages", "killed_in", "names"),
    [
        ({"a": 0, "b": 0, "c": 1, "d": 2}, 0, {"a", "b"}),  # c and d are alone in their stages
        ({"a": 0, "b": 0, "c": 1, "d": 1}, 0, {"c", "d"}),
        ({"a": 0, "b": 1, "c": 2}, 0, {"b", "c"}),
        ({"a": 0, "b": 1, "c": 1, "d": 2, "e": 2, "f": 2}, 0, {"d", "e", "f"}),
    ],
)
def test_the_frozen_peer_has_another_replica(stages: dict[str, int | None], killed_in: int, names: set[str]) -> None:
    assert choose_frozen(stages, killed_in) in names


def test_an_unreported_stage_is_not_audited() -> None:
    manifest = manifest_of(Identity.generate(), 3)
    whole = {"round": 1, "ledger": Ledger(cursor=4096), "tokens": 4096 * manifest.data.seq_len}
    heads = [msgspec.structs.replace(manifest.first_head(stage), **whole) for stage in range(3)]
    progress = Progress("test", keeps_all=True, stages=3)
    for stage, head in enumerate(heads[:2]):
        previous = manifest.first_head(stage).hash.hex()
        fields = {"round": 1, "stage": stage, "head": head.hash.hex(), "previous": previous, "counted": ["0-4096"]}
        progress.apply("a", "round_committed", 1.0, {**fields, "state_hash": "ab"})
    unknown: list[str] = []
    counts, _ = _audit_micro_batches(progress, manifest, heads, unknown)
    assert (counts.double_counted, counts.lost) == (0, 0)
    assert unknown == ["no peer reported all commits of stage 2, so its micro-batches were not audited"]
