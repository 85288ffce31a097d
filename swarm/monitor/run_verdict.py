"""The verdict on a training run: pure rules from the state to one line with a reason and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from swarm.client.reading import RunReading
from swarm.monitor.state import StageState, Verdict, Watch
from swarm.run.manifest import Manifest

LATE_ROUNDS: Final = 3.0
"""After so many usual rounds without a commit a run stands still, but not before `LATE_S`."""
LATE_S: Final = 120.0


def verdict_of(
    manifest: Manifest, reading: RunReading, stages: Sequence[StageState], watch: Watch, last_failure: str = ""
) -> Verdict:
    """Return the verdict on a run. `last_failure`: why the last attempt failed, if its round is not committed yet."""
    if reading.complete or _all_stages_over(manifest, stages):
        return _complete(manifest, reading)
    if not reading.records and not any(proven and proven.near for proven in reading.best):
        return _all_away(stages)
    if not manifest.outer.has_common_state:
        return _gossip(reading)
    for rule in (_not_begun, _coordinator_needed, _stage_unserved, _no_majority):
        if found := rule(manifest, reading, stages):
            return found
    return _late(manifest, stages, last_failure) or _going(stages)


def _all_stages_over(manifest: Manifest, stages: Sequence[StageState]) -> bool:
    """Return whether the last round of each stage is proved, though its members may all have left since."""
    return 0 < manifest.run.rounds <= min(stage.facts.round if stage.facts else -1 for stage in stages)


def _complete(manifest: Manifest, reading: RunReading) -> Verdict:
    last = f"round {manifest.run.rounds} of {manifest.run.rounds} is committed"
    if not reading.records:
        return Verdict(
            level="over",
            word="complete",
            reason=f"{last}, and all peers have left",
            remedy="make the model with `peer export --home DIR --out DIR`, from the home of a member",
            basis=("facts", "seen"),
        )
    where, remedy = "the coordinator keeps the last state", "make the model with `peer export INVITE --out DIR`"
    if not manifest.outer.has_common_state:
        where = "each home has its own weights"
        remedy = "make the model with `peer export --home DIR --out DIR` from the home of a peer"
    if reading.kept or not manifest.outer.has_common_state:
        return Verdict(
            level="over", word="complete", reason=f"{last}; {where}", remedy=remedy, basis=("facts", "claims")
        )
    return Verdict(
        level="edge",
        word="complete, not kept",
        reason=f"{last}, but the coordinator does not say that it has the last state",
        remedy="start the coordinator, and again a member that took part to the end, with its home",
        basis=("facts", "claims"),
    )


def _all_away(stages: Sequence[StageState]) -> Verdict:
    rounds = [stage.facts.round for stage in stages if stage.facts]
    reached = ""
    if rounds:
        last = f"the last commit that was seen is of round {min(rounds)}"
        reached = f"; {last}" if min(rounds) else "; no round is committed yet"
    return Verdict(
        level="bad",
        word="everybody away",
        reason=f"no peer of this run answers, nor does the coordinator{reached}",
        remedy="start the coordinator and the members again, each with its home; what they have saved is still there",
        basis=("seen",),
    )


def _gossip(reading: RunReading) -> Verdict:
    rounds = [record.round for record in reading.full.values() if record.round >= 0]
    if not rounds:
        return Verdict(
            level="waiting",
            word="waiting",
            reason=f"{len(reading.records)} peers are here, and none of them trains yet",
            remedy="start peers with `peer join INVITE`",
            basis=("claims",),
        )
    return Verdict(
        level="good",
        word="going on",
        reason=f"{len(rounds)} peers train by gossip, at rounds {min(rounds)} to {max(rounds)}, as they say",
        basis=("claims",),
    )


def _not_begun(manifest: Manifest, reading: RunReading, stages: Sequence[StageState]) -> Verdict | None:
    if not any(stage.facts is None or (not stage.facts.members and not stage.facts.round) for stage in stages):
        return None
    if any(stage.facts and stage.facts.round for stage in stages):
        return None  # a stage whose head no peer proves: another rule says so
    here = sum(record.role in ("full", "stage") for record in reading.records.values())
    wanted = max(manifest.run.min_peers, manifest.stages)
    if manifest.authority not in reading.records:
        reason = f"{here} peers are here, but the coordinator, which begins the run, publishes no record"
        remedy = "start `peer coordinate` with the home of the run"
    elif here < wanted:
        reason = f"{here} of the {wanted} peers that the run begins with are here"
        remedy = f"start {wanted - here} more with `peer join INVITE`"
    else:
        reason = f"{here} peers are here, and the run begins as soon as they are ready"
        remedy = "wait; if this lasts, see the log of the coordinator"
    return Verdict(level="waiting", word="not begun", reason=reason, remedy=remedy, basis=("facts", "claims"))


def _coordinator_needed(manifest: Manifest, reading: RunReading, stages: Sequence[StageState]) -> Verdict | None:
    if manifest.agreement_mode != "required" or manifest.authority in reading.records:
        return None
    if any(m.peer == manifest.authority for proven in reading.best if proven for m in proven.near):
        return None
    return Verdict(
        level="bad",
        word="stopped",
        reason="the coordinator is away, and in this run each commit needs its vote",
        remedy="start `peer coordinate` again with its home",
        basis=("facts", "seen"),
    )


def _stage_unserved(manifest: Manifest, reading: RunReading, stages: Sequence[StageState]) -> Verdict | None:
    if manifest.stages == 1:
        return None
    for stage in stages:
        if stage.claims.replicas:
            continue
        if stage.claims.arriving:
            return Verdict(
                level="waiting",
                word="waiting",
                reason=f"stage {stage.stage} has no replica, and {stage.claims.arriving} on the way to it",
                remedy="wait until it is there",
                basis=("claims",),
            )
        return Verdict(
            level="bad",
            word="stopped",
            reason=f"stage {stage.stage} (blocks {stage.first} to {stage.end - 1}) has no replica",
            remedy=f"start a peer with `peer join INVITE --stage {stage.stage}`",
            basis=("claims",),
        )
    return None


def _no_majority(manifest: Manifest, reading: RunReading, stages: Sequence[StageState]) -> Verdict | None:
    for stage in stages:
        of = f" of stage {stage.stage}" if manifest.stages > 1 else ""
        facts, margin = stage.facts, stage.seen.margin
        if facts is None or margin is None or margin >= 0:
            continue
        if not stage.seen.answering:
            return Verdict(
                level="bad",
                word="everybody away",
                reason=f"none of the {facts.members} members{of} of round {facts.round} answers",
                remedy="start them again, each with its home; if they are lost, the owner goes on with `peer regroup`",
                basis=("facts", "seen"),
            )
        return Verdict(
            level="bad",
            word="stopped",
            reason=f"{stage.seen.answering} of the {facts.members} members{of} of round {facts.round} answer,"
            f" and {facts.quorum} are needed",
            remedy=f"start {-margin} of the missing again, with their homes; if they are lost, the owner continues"
            " with `peer regroup`",
            basis=("facts", "seen"),
        )
    return None


def _late(manifest: Manifest, stages: Sequence[StageState], last_failure: str) -> Verdict | None:
    for stage in stages:
        age_s, round_s = stage.seen.commit_age_s, stage.seen.round_s
        usual_s = manifest.run.compute_s_max if round_s is None else LATE_ROUNDS * round_s
        if age_s is None or age_s <= max(LATE_S, usual_s):
            continue
        of = f" of stage {stage.stage}" if manifest.stages > 1 else ""
        usual = "" if round_s is None else f", a round took {_seconds(round_s)} before"
        why = f"; the last attempt failed, as its leader says: {last_failure}" if last_failure else ""
        return Verdict(
            level="bad",
            word="stopped",
            reason=f"no commit{of} for {_seconds(age_s)} though enough members answer{usual}{why}",
            remedy="see below which member is absent or last, and its log; the next attempt has another leader",
            basis=("facts", "seen", "claims") if last_failure else ("facts", "seen"),
        )
    return None


def _going(stages: Sequence[StageState]) -> Verdict:
    least = min(stages, key=lambda stage: stage.seen.margin if stage.seen.margin is not None else 1 << 30)
    of = f" of stage {least.stage}" if len(stages) > 1 else ""
    facts, margin = least.facts, least.seen.margin
    if facts is None or margin is None:
        return Verdict(
            level="unknown",
            word="unknown",
            reason="no peer proves a commit of every stage",
            remedy="wait for the next reading; if this lasts, start the missing members again",
            basis=("seen",),
        )
    here = f"{least.seen.answering} of {facts.members} members{of} answer and {facts.quorum} are needed"
    age_s = least.seen.commit_age_s
    age = "" if age_s is None else f"; the last commit, round {facts.round}, is at least {_seconds(age_s)} old"
    if not facts.round:
        age = "; no round is committed yet"
    elif least.seen.round_s is not None and age_s is not None:
        age = f"; round {facts.round} came {_seconds(age_s)} ago, a round takes {_seconds(least.seen.round_s)}"
    if margin == 0:
        return Verdict(
            level="edge",
            word="healthy, at the edge",
            reason=f"{here}: one more that falls silent stops it{age}",
            remedy=f"start another peer with `peer join INVITE{f' --stage {least.stage}' if of else ''}`",
            basis=("facts", "seen"),
        )
    return Verdict(level="good", word="healthy", reason=f"{here}{age}", basis=("facts", "seen"))


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
