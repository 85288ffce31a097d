"""The verdict on a training run, and what its stages lack: pure rules from the state to one line with a remedy.

What stands still, or will, is a condition of a rule: the gravest is the verdict, and each that lasts is an alert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from peer.catalogue.groups import QuorumLost
from peer.catalogue.pages import PageMissing
from peer.figures import several
from swarm.run.manifest import Manifest
from swarm.status.reading import RunReading
from swarm.status.state import Alert, Level, MonitorState, StageState, Verdict

LATE_ROUNDS: Final = 3.0
"""After so many usual rounds without a commit a run stands still, but not before `LATE_S`."""
LATE_S: Final = 120.0
AWAY_S: Final = 600.0
UNREAD: Final = Verdict(level="unknown", word="unknown", reason="", basis=())
EDGE: Final = "healthy, at the edge"
SHORT_OF_PAGES: Final = "short of pages"
EXPORT_HOME: Final = "make the model with `peer export --home DIR --out DIR`"
_NO_ROUND: Final = "no round is committed yet"
_GRAVEST: Final[tuple[Level, ...]] = ("bad", "waiting", "edge")


class Condition(Alert, frozen=True, kw_only=True):
    """What a rule finds at one time, before it has lasted."""

    after_s: float = 0.0
    """It is told as an alert once it has held for so long."""
    word: str = ""
    """That of the verdict, where none is graver; empty for what leaves that as it is."""
    level: Level = "bad"
    """Of the verdict."""


def verdict_of(state: MonitorState, reading: RunReading) -> Verdict:
    """Return the verdict on a run, whose `state` has none yet."""
    manifest, stages = reading.manifest, state.stages
    if reading.complete or _all_stages_over(manifest, stages):
        return _complete(manifest, reading)
    if not reading.records and not any(proven and proven.near for proven in reading.best):
        return _all_away(stages)
    if not manifest.outer.has_common_state:
        return _gossip(reading)
    if not_begun := _not_begun(manifest, reading, stages):
        return not_begun
    found = [
        one
        for rule in (coordinator_away, replicas, quorum, page_missing, run_stalled)
        for one in rule(state)
        if one.word
    ]
    return gravest(found) or _going(stages)


def gravest(found: Sequence[Condition]) -> Verdict | None:
    """Return the verdict that the gravest of these makes; None without one."""
    if not found:
        return None
    one = min(found, key=lambda one: _GRAVEST.index(one.level))
    return Verdict(level=one.level, word=one.word, reason=one.text, remedy=one.remedy, basis=one.basis)


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
            remedy=f"{EXPORT_HOME}, from the home of a member",
            basis=("facts", "seen"),
        )
    where, remedy = "the coordinator keeps the last state", "make the model with `peer export INVITE --out DIR`"
    if not manifest.outer.has_common_state:
        where = "each home has its own weights"
        remedy = f"{EXPORT_HOME} from the home of a peer"
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
        reached = f"; {last}" if min(rounds) else f"; {_NO_ROUND}"
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


def _begun(state: MonitorState) -> bool:
    return any(stage.facts is not None and stage.facts.members for stage in state.stages)


def _of(state: MonitorState, stage: StageState) -> str:
    return f" of stage {stage.stage}" if len(state.stages) > 1 else ""


def _join(state: MonitorState, stage: StageState) -> str:
    return f"`peer join INVITE{f' --stage {stage.stage}' if len(state.stages) > 1 else ''}`"


def coordinator_away(state: MonitorState) -> Iterator[Condition]:
    """Find whether the coordinator is away."""
    if state.coordinator_here or not (_begun(state) or state.round):
        return
    needed = state.mode == "required"
    yield Condition(
        name="coordinator_away",
        severity="critical" if needed else "warning",
        text="the coordinator is away, and in this run each commit needs its vote"
        if needed
        else "the coordinator is away: rounds go on, but after a lost majority no peer could begin a new term",
        remedy="start `peer coordinate` again with its home",
        basis=("facts", "seen"),
        after_s=0.0 if needed else AWAY_S,
        word="stopped" if needed else "",
    )


def replicas(state: MonitorState) -> Iterator[Condition]:
    """Find the stages without a replica, or with one."""
    if len(state.stages) < 2 or not _begun(state):
        return
    for stage in state.stages:
        here, arriving = stage.claims.replicas, stage.claims.arriving
        if here > 1:
            continue
        lost = f"stage {stage.stage} (blocks {stage.first} to {stage.end - 1}) has no replica"
        lost += f", and {arriving} on the way to it" if arriving else ""
        yield Condition(
            name="single_replica" if here else "stage_lost",
            subject=str(stage.stage),
            severity="warning" if here else "critical",
            text=f"stage {stage.stage} has one replica: where that goes, the pipeline stands still" if here else lost,
            remedy="wait until it is there" if arriving and not here else f"start a peer with {_join(state, stage)}",
            basis=("claims",),
            after_s=AWAY_S if here else 0.0,
            word="" if here else "waiting" if arriving else "stopped",
            level="waiting" if arriving else "bad",
        )


def quorum(state: MonitorState) -> Iterator[Condition]:
    """Find the stages whose members are too few to go on, or just enough."""
    for stage in state.stages:
        facts, margin, answering = stage.facts, stage.seen.margin, stage.seen.answering
        if facts is None or margin is None or margin > 0:
            continue
        of = _of(state, stage)
        lost = margin < 0
        if lost:
            who = f"the {facts.members} members{of} of round {facts.round}"
            text = (
                f"{answering} of {who} answer, and {facts.quorum} are needed" if answering else f"none of {who} answers"
            )
        else:
            here = f"{answering} of {facts.members} members{of} answer and {facts.quorum} are needed"
            text = f"{here}: one more that falls silent stops it"
        yield Condition(
            name=QuorumLost.event_name() if lost else "quorum_at_edge",
            subject=str(stage.stage),
            severity="critical" if lost else "warning",
            text=text,
            remedy=f"start {-margin} of the missing again, with their homes; if they are lost, the owner goes on with"
            " `peer regroup`"
            if lost
            else f"start another peer with {_join(state, stage)}",
            basis=("facts", "seen"),
            after_s=30.0 if lost else 120.0,
            word=EDGE if not lost else "stopped" if answering else "everybody away",
            level="bad" if lost else "edge",
        )


def run_stalled(state: MonitorState) -> Iterator[Condition]:
    """Find the stages whose last commit is older than three usual rounds."""
    for stage in state.stages:
        age_s, round_s = stage.seen.commit_age_s, stage.seen.round_s
        usual_s = state.compute_s_max if round_s is None else LATE_ROUNDS * round_s
        if not _begun(state) or age_s is None or age_s <= max(LATE_S, usual_s):
            continue
        enough = " though enough members answer" if (stage.seen.margin or 0) >= 0 else ""
        usual = "" if round_s is None else f", a round took {_seconds(round_s)} before"
        why = f"; the last attempt failed, as its leader says: {state.failure}" if state.failure else ""
        yield Condition(
            name="run_stalled",
            subject=str(stage.stage),
            severity="critical",
            text=f"no commit{_of(state, stage)} for {_seconds(age_s)}{enough}{usual}{why}",
            remedy="see which member is absent or last, and its terminal; the next attempt has another leader",
            basis=("facts", "seen", "claims") if state.failure else ("facts", "seen"),
            word="stopped",
        )


def page_missing(state: MonitorState) -> Iterator[Condition]:
    """Find whether peers wait for pages of the data set that do not come."""
    data_set = state.data_set
    if data_set is None or not data_set.missing:
        return
    first = min(data_set.missing, key=lambda missing: missing.holders)
    who = ", ".join(state.names.get(peer) or f"…{peer[-6:]}" for peer in first.peers[:2])
    who += f" and {several(len(first.peers) - 2, 'other peer')}" if len(first.peers) > 2 else ""
    keep = "no peer keeps" if not first.holders else f"{several(first.holders, 'peer')} should have"
    others = len(data_set.missing) - 1
    also = f", nor {several(others, 'other page')}" if others else ""
    yield Condition(
        name=PageMissing.event_name(),
        severity="warning" if first.holders else "critical",
        text=f"{who} cannot get page {first.page} of the data set, which {keep}{also}; of {data_set.ranges} ranges of"
        f" pages {data_set.rare} have fewer than two holders",
        remedy="start `peer coordinate` again with the data set (--data DIR), or a peer that has it (`peer join INVITE"
        " --data DIR`)",
        basis=("claims",),
        after_s=30.0,
        word=SHORT_OF_PAGES,
        level="edge",
    )


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
        age = f"; {_NO_ROUND}"
    elif least.seen.round_s is not None and age_s is not None:
        age = f"; round {facts.round} came {_seconds(age_s)} ago, a round takes {_seconds(least.seen.round_s)}"
    return Verdict(level="good", word="healthy", reason=f"{here}{age}", basis=("facts", "seen"))


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
