"""A pipeline's events in the live table and in the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from cli.commands.join import what_was_kept
from cli.commands.quickstart import run_toml
from cli.demo.report import broken_in_pipeline, broken_invariants
from cli.progress.micro_batch_audit import MicroBatches
from cli.progress.progress import Progress
from cli.views.table import live_view
from optim.config import DilocoConfig
from peer.catalogue.rounds import RoundCommitted
from peer.files import write_atomically
from swarm.run.config import parse_run_config


def shown(progress: Progress) -> str:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(live_view(progress, 80))
    return captured.get()


def told(progress: Progress) -> list[str]:
    """The notes, without their times."""
    return [note.split("  ", 1)[1] for note in progress.notes]


def committed(stage: int, number: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "round": number, "stage": stage, "state_hash": "abcdef", "head": f"h{number}", "previous": f"h{number - 1}",
        "members": 2, "loss": 3.0, "counted": [],
    }  # fmt: skip
    return {**fields, **changes}


def test_the_table_shows_stage_rate_and_queue() -> None:
    progress = Progress("a run", stages=2)
    progress.apply("a", "replica_opened", 1.0, {"stage": 1})
    progress.apply("a", "stage_load", 2.0, {"queue": 7.0, "rate": 12.34, "phase": "waiting for stage 0"})
    progress.apply("b", "phase_entered", 2.0, {"round": 1, "phase": "plan"})
    text = shown(progress)
    for word in ("stage", "speed", "queue", "12.3", "waiting for stage"):
        assert word in text
    assert "speed" not in shown(Progress("no pipeline"))


def test_the_round_of_a_pipeline_is_that_of_its_last_stage() -> None:
    progress = Progress("a run", stages=2)
    progress.apply("a", "round_committed", 1.0, committed(0, 3))
    assert progress.round == 0
    progress.apply("b", "round_committed", 1.0, committed(1, 2))
    assert progress.round == 2
    alone = Progress("one peer's own view")
    alone.apply("b", "round_committed", 1.0, committed(1, 2))
    assert alone.round == 2


def test_commits_and_dispatches_are_audited() -> None:
    progress = Progress("a run", keeps_all=True, stages=1)
    progress.apply("a", "head_adopted", 1.0, committed(0, 0, previous="genesis"))
    progress.apply("a", "round_committed", 2.0, committed(0, 1, counted=["0-8,16-24", "8-16"]))
    assert progress.audit_trail.merged(0, "genesis", "h1") == [(0, 8), (16, 24), (8, 16)]
    for dispatched in (4, 9):
        counters = {"dispatched": dispatched, "completed": 4, "retried": 1, "abandoned": 0}
        progress.apply("a", "pipeline_progress", 3.0, counters)
    assert progress.audit_trail.totals["a"].of("dispatched") == 9


def test_moves_are_noted_and_kept() -> None:
    progress = Progress("a run", stages=2)
    move = {"source": 0, "target": 1, "reason": "it has no replica", "gain": 1.5}
    progress.apply("a", "move_started", 1.0, move)
    progress.apply("a", "move_finished", 9.0, {"target": 1, "seconds": 8.2})
    progress.apply("a", "stages_missing", 9.0, {"stages": ["1"]})
    assert [(name, m.source, m.target, m.gain) for name, _, m in progress.moves] == [("a", 0, 1, 1.5)]
    assert told(progress) == [
        "a moves from stage 0 to 1: it has no replica",
        "a works in stage 1 after 8 s",
        "a waits for stage 1",
    ]


def test_refused_samples_are_noted_with_the_remedy() -> None:
    progress = Progress("a run", stages=2)
    refused = {"first": 8, "last": 12, "cause": "not_finite", "reason": "the output holds NaN.", "synchronous": True}
    for changes in ({}, {"cause": "value", "reason": "no\x1b ids"}, {"synchronous": False}):
        progress.apply("a", "pipeline_refused", 1.0, refused | changes)
    batch = "a: the batch cannot be completed while every replica refuses samples 8 to 11"
    assert told(progress) == [
        f"{batch} (the output holds NaN): lower [inner] lr, or continue from an earlier checkpoint",
        f"{batch} (no? ids)",
        "a puts off samples 8 to 11, which every replica refuses (the output holds NaN):"
        " lower [inner] lr, or continue from an earlier checkpoint",
    ]


def test_a_peer_that_takes_a_stage_has_no_round_yet() -> None:
    progress = Progress("one peer's own view")
    progress.apply("a", "run_entered", 1.0, {"name": "big", "role": "auto", "rounds": 12, "stages": 3})
    assert "starting the worker" in shown(progress)
    progress.apply("a", "replica_opened", 2.0, {"stage": 2})
    progress.apply("a", "replica_opened", 3.0, {"stage": 1})
    progress.apply("a", "stage_restored", 3.0, {"stage": 1, "round": 7, "donors": 2})
    assert told(progress) == [
        "a is in the run 'big': a model in 3 stages, 12 rounds",
        "a takes stage 2",
        "a restores stage 1 at round 7, from the backups of 2 peers",
    ]


def test_a_backup_of_another_stage_is_not_the_own_checkpoint(tmp_path: Path) -> None:
    progress = Progress("one peer's own view")
    progress.apply("a", "replica_opened", 1.0, {"stage": 0})
    progress.apply("a", "round_committed", 1.0, committed(0, 3))
    write_atomically(tmp_path / "invite", b"")
    kept = what_was_kept(progress, tmp_path)
    assert kept.startswith("Left after round 3. No checkpoint was written: joining again (`peer join --home")
    for stage, number in ((0, 3), (1, 2)):
        path = f"home/stage-{stage}/checkpoints/{number}"
        progress.apply("a", "checkpoint_saved", 2.0, {"round": number, "path": path})
    kept = what_was_kept(progress, Path("home"))
    assert "Saved: round 3 of stage 0 in home/stage-0/checkpoints/3." in kept
    assert "with a --home of each other stage" in kept
    feeder = Progress("another")
    feeder.apply("f", "text_fed", 1.0, {"micro_batches": 9, "peers": ["x"]})
    assert what_was_kept(feeder, Path("/a/home")) == (
        "Read 9 micro-batches for 1 peer. A feeder saves nothing. Join again: `peer join --home /a/home`."
    )
    assert "Left before the first commit of this peer." in what_was_kept(Progress("nothing yet"), tmp_path)
    assert what_was_kept(Progress("nothing yet"), Path("home")) == "", "it was not in the run"


def test_after_a_move_the_stage_of_the_checkpoint_is_named() -> None:
    progress = Progress("one peer's own view")
    progress.apply("a", "replica_opened", 1.0, {"stage": 0})
    progress.apply("a", "round_committed", 1.0, committed(0, 12))
    progress.apply("a", "checkpoint_saved", 2.0, {"round": 12, "path": "home/stage-0/checkpoints/12"})
    progress.apply("a", "replica_opened", 3.0, {"stage": 1})
    kept = what_was_kept(progress, Path("home"))
    assert "Saved: round 12 of stage 0 in home/stage-0/checkpoints/12. Nothing is saved yet of stage 1" in kept
    assert "to continue" not in kept
    progress.apply("a", "checkpoint_saved", 4.0, {"round": 13, "path": "home/stage-1/checkpoints/13"})
    kept = what_was_kept(progress, Path("home"))
    assert "Saved: round 13 of stage 1 in home/stage-1/checkpoints/13. Join again" in kept


@pytest.mark.parametrize("end", ["left_complete", "left_for_good"])
def test_only_who_can_go_on_is_told_to_join_again(end: str) -> None:
    """A gossip run's peers know of no common round that is the last, and a run that has diverged is over here."""
    progress = Progress("one peer's own view")
    progress.apply("a", "gossip_alone", 1.0, {"round": 3, "loss": 2.0})
    progress.apply("a", "checkpoint_saved", 2.0, {"round": 3, "path": "home/checkpoints/3"})
    assert "Join again to continue from there: `peer join --home /a/home`" in what_was_kept(progress, Path("/a/home"))
    setattr(progress, end, True)
    kept = what_was_kept(progress, Path("/a/home"))
    where = "Saved: round 3 in home/checkpoints/3."
    assert kept == f"{where} `peer export --home /a/home --out DIR` writes a model from it."


def test_a_feeder_names_its_peers_and_totals() -> None:
    progress = Progress("one peer's own view")
    progress.apply("f", "member_joined", 1.0, {"peer": "12D3KooWverylong", "name": "ann\x1b[2J"})
    peers: list[str] = []
    progress.apply("f", "text_fed", 2.0, {"micro_batches": 0, "peers": peers})
    assert "waiting for requests" in shown(progress)
    progress.apply("f", "text_fed", 3.0, {"micro_batches": 1, "peers": ["12D3KooWverylong"]})
    for at in (13.0, 73.0):
        progress.apply("f", "text_fed", at, {"micro_batches": 41 + int(at), "peers": ["12D3KooWverylong"]})
    assert told(progress) == [
        "f is a feeder: it reads text for the replicas of the first stage and holds no weights",
        "f feeds ann?[2J",
        "f has read 114 micro-batches for 1 peer",
    ]
    assert "feeding 1 peer" in shown(progress) and "1.0 micro-batches/s" in shown(progress)


def commit(state_hash: str, stage: int, term: int = 1) -> RoundCommitted:
    return RoundCommitted(round=1, state_hash=state_hash, stage=stage, term=term)


COMMITS = {"e": {0: commit("x", 0), 1: commit("y", 1)}}
RULES: dict[str, Any] = {
    "commits": COMMITS,
    "ended": {"a": 4, "b": 4},
    "rounds": 4,
    "faults": {"killed": ["c"], "frozen": ["d"], "added": ["e"]},
}
COUNTED: dict[str, Any] = {
    "losses": {1: 3.0, 4: 2.5},
    "rounds": 4,
    "micro_batches": MicroBatches(dispatched=9, completed=8, retried=1, double_counted=0, lost=0, undone=0),
}


def beside(commit: RoundCommitted) -> dict[str, dict[int, RoundCommitted]]:
    return {**COMMITS, "f": {1: commit}}


def counts(**changes: int) -> dict[str, Any]:
    return {"micro_batches": msgspec.structs.replace(COUNTED["micro_batches"], **changes)}


def test_a_good_pipeline_breaks_no_invariant() -> None:
    assert broken_in_pipeline(**COUNTED) == broken_invariants(**RULES) == []
    made_again = beside(commit("z", 1, term=2))  # after a regroup: no fork
    assert broken_invariants(**{**RULES, "commits": made_again}) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"commits": beside(commit("z", 1))}, "stage 1 held 2 different states"),
        ({"ended": {"a": 4, "b": 3}}, "b ended at round 3 instead of 4"),
        ({"faults": {"killed": ["c"], "frozen": [], "added": ["e"]}}, "no peer was frozen"),
        ({"losses": {1: 3.0}}, "not measured"),
        ({"losses": {1: 3.0, 4: 3.1}}, "did not fall"),
        (counts(double_counted=1), "counted twice"),
        (counts(lost=2), "lost: 2 micro-batches"),
        (counts(completed=0), "no micro-batch was completed"),
    ],
)
def test_each_broken_invariant_of_a_pipeline_is_named(changes: dict[str, Any], words: str) -> None:
    common = changes.keys() <= RULES.keys()
    (text,) = broken_invariants(**{**RULES, **changes}) if common else broken_in_pipeline(**{**COUNTED, **changes})
    assert words in text


def test_the_quickstarts_pipeline_is_valid() -> None:
    config = parse_run_config(run_toml(12, 3))
    assert config.model is not None and config.pipeline.stages == 3
    assert config.model.layers == 6 and not config.model.tie_embeddings
    assert isinstance(config.outer, DilocoConfig) and config.inner.total_steps == 12 * config.outer.steps
    assert parse_run_config(run_toml(12)).pipeline.stages == 1
