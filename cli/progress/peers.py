"""What the events of a peer about itself change in a view: phases, commits, losses, checkpoints, stages and moves.

A handler returns whether the event is news to the user: then its words become a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from cli.progress.live_peer import STARTING, LivePeer, StepsDone
from cli.progress.losses import finite
from cli.progress.micro_batch_audit import AuditEntry, AuditTotals
from cli.progress.state import PEERS_MAX, WAITING, ViewState
from peer.catalogue import groups, machine, pages, rounds, serving, stages
from peer.catalogue.happening import Happening, OwnRound
from peer.figures import several

_PHASES: Final = {"compute": "training", "submit": "submitting", "exchange": "exchanging", "vote": "voting"}
_BETWEEN: Final = "waiting for the next round"
AWAITED_LONG_S: Final = 5.0  # a shorter wait for pages is no news
FEEDING_EVERY_S: Final = 60.0  # a feeder has no other news

Handler = Callable[[ViewState, LivePeer, float, Any], bool]


def _phase_entered(view: ViewState, peer: LivePeer, at: float, event: rounds.PhaseEntered) -> bool:
    peer.claim(phase=_PHASES.get(event.phase, event.phase))
    if event.steps is not None:
        last_rate = peer.work.tokens_per_s if peer.work is not None else 0.0
        peer.work = StepsDone(event.steps, at, first=event.step or 0, tokens_per_s=last_rate)
    return False


def _inner_step(view: ViewState, peer: LivePeer, at: float, event: rounds.InnerStep) -> bool:
    peer.claim(loss=finite(event.loss), phase="training")
    peer.curve.add(event.loss)
    if peer.work is not None:
        peer.work.done, peer.work.at = max(0, event.step - peer.work.first + 1), at
        peer.work.tokens_per_s = event.tokens_per_s
    return False


def _worker_ready(view: ViewState, peer: LivePeer, at: float, event: machine.WorkerReady) -> bool:
    """A worker has begun, the first one or one in the place of another; of several devices each has its own."""
    if not event.device:
        return False  # it only reads text
    is_new, peer.device = event.facts != peer.device, event.facts
    if peer.claims.phase == STARTING:
        peer.claim(phase=WAITING)
    return is_new


def _pause(view: ViewState, peer: LivePeer, at: float, event: machine.PeerPaused | machine.PeerResumed) -> bool:
    peer.paused = isinstance(event, machine.PeerPaused)
    return True


def _state_progress(view: ViewState, peer: LivePeer, at: float, event: rounds.StateProgress) -> bool:
    peer.claim(phase=f"fetching state, {event.share:.0%}")
    return False


def _loading_progress(view: ViewState, peer: LivePeer, at: float, event: serving.LoadingProgress) -> bool:
    what = {"fetch": "fetching base", "check": "checking base"}.get(event.phase)
    if what is not None and event.size_bytes:
        peer.claim(phase=f"{what}, {event.done_bytes / event.size_bytes:.0%}")
    return False


def _round_committed(view: ViewState, peer: LivePeer, at: float, event: rounds.RoundCommitted) -> bool:
    _position(peer, event)
    newest = event.round > max((r for seen in view.commits.values() for r in seen), default=0)
    if event.stage is not None:
        newest = event.round > view.reached.get(event.stage, 0)
        view.reached[event.stage] = max(event.round, view.reached.get(event.stage, 0))
    _record_merged(view, event)
    commits = view.commits.setdefault(peer.name, {})
    commits[event.round] = event
    view.trim(commits)
    view.pace.note(event.round, at, event.tokens)
    if newest:
        view.loss_curve.add(peer.claims.loss)
    return newest


def _head_adopted(view: ViewState, peer: LivePeer, at: float, event: rounds.HeadAdopted) -> bool:
    _record_merged(view, event)
    _position(peer, event)
    view.pace.note(event.round, at, event.tokens, seen=not event.round)  # others may be further by now
    return True


def _gossip_round(view: ViewState, peer: LivePeer, at: float, event: rounds.GossipAlone) -> bool:
    """A round of a gossip run is this peer's own; other peers may be at other rounds."""
    _position(peer, event)
    view.pace.note(event.round, at)
    return True


def _round_discarded(view: ViewState, peer: LivePeer, at: float, event: rounds.DiscardedRound) -> bool:
    place = (peer.claims.stage, event.round)
    if place not in view.discarded:
        view.discarded[place] = event.reason
        view.trim(view.discarded)
        peer.claim(phase=_BETWEEN)
        view.note(replace(event, stage=peer.claims.stage).sentence(peer.name, view.name_of))
    return False


def _corpus_read(view: ViewState, peer: LivePeer, at: float, event: machine.CorpusRead) -> bool:
    return peer.is_news("corpus", "".join(event.account))  # each new worker reads the same text again


def _data_set_opened(view: ViewState, peer: LivePeer, at: float, event: pages.DataSetOpened) -> bool:
    peer.data_set = event
    return True


def _pages_kept(view: ViewState, peer: LivePeer, at: float, event: pages.PagesKept) -> bool:
    peer.pages_kept = event
    return False


def _samples_awaited(view: ViewState, peer: LivePeer, at: float, event: pages.SamplesAwaited) -> bool:
    peer.waited_s += max(0.0, event.seconds)
    return event.seconds >= AWAITED_LONG_S


def _val_evaluated(view: ViewState, peer: LivePeer, at: float, event: rounds.ValEvaluated) -> bool:
    peer.claim(val_loss=event.finite_loss, val_round=event.round)
    view.val_losses.setdefault(event.round, math.nan if event.finite_loss is None else event.finite_loss)
    view.trim(view.val_losses)
    return True


def _steps_skipped(view: ViewState, peer: LivePeer, at: float, event: rounds.StepsSkipped) -> bool:
    peer.useless_round = event.round
    return True


def _once(topic: str) -> Handler:
    """Return a handler for what happens over and over, and is said once."""
    return lambda view, peer, at, event: peer.is_news(topic, topic)


def _relay(view: ViewState, peer: LivePeer, at: float, event: machine.RelayFailed | machine.RelayReserved) -> bool:
    """Note a change: a relay is asked again and again."""
    return peer.is_news(f"relay {event.relay}", event.event_name())


def _peer_suspect(view: ViewState, peer: LivePeer, at: float, event: groups.PeerSuspect) -> bool:
    if event.peer in view.missed:
        return False
    view.missed.add(event.peer)
    while len(view.missed) > PEERS_MAX:
        view.missed.pop()
    return True


def _peer_recovered(view: ViewState, peer: LivePeer, at: float, event: groups.PeerRecovered) -> bool:
    is_missed = event.peer in view.missed
    view.missed.discard(event.peer)
    return is_missed


def _member_joined(view: ViewState, peer: LivePeer, at: float, event: groups.MemberJoined) -> bool:
    view.names[event.peer] = event.name
    while len(view.names) > PEERS_MAX:
        del view.names[next(iter(view.names))]
    if event.role in ("full", "stage") and len(view.here) < PEERS_MAX:
        view.here.add(event.peer)
        _note_those_here(view, peer, event)
    return False


def _member_left(view: ViewState, peer: LivePeer, at: float, event: groups.MemberLeft) -> bool:
    if event.peer in view.here:
        view.here.discard(event.peer)
        _note_those_here(view, peer, event)
    return False


def _note_those_here(view: ViewState, peer: LivePeer, event: Happening) -> None:
    """Say how many of the peers that the first round needs are there, in the view of one process, until it begins."""
    begun = peer.claims.state_hash or any(group.facts is not None for group in view.groups.values())
    if view.min_peers and len(view.peers) == 1 and not begun:
        here, needed = len(view.here), view.min_peers
        count = f"{here} of {several(needed, 'peer')}" if here <= needed else f"{here} peers"
        view.note(f"{event.sentence('', view.name_of)}: {count}")


def _run_finished(view: ViewState, peer: LivePeer, at: float, event: rounds.RunFinished) -> bool:
    peer.claim(phase="finished")
    return False


def _checkpoint_saved(view: ViewState, peer: LivePeer, at: float, event: machine.CheckpointSaved) -> bool:
    stage = peer.claims.stage
    if stage is None or f"stage-{stage}" in Path(event.path).parts:  # not a backup of another stage
        view.saved = (event, stage)
    return False


def _last_checkpoint_failed(view: ViewState, peer: LivePeer, at: float, event: machine.LastCheckpointFailed) -> bool:
    view.left_unsaved = True
    return False


def _replica_opened(view: ViewState, peer: LivePeer, at: float, event: stages.ReplicaOpened) -> bool:
    is_first = peer.claims.stage is None  # a move has its own notes
    peer.claim(stage=event.stage, speed=0.0, queue=0.0)
    peer.pipelined = True
    return is_first


def _stage_load(view: ViewState, peer: LivePeer, at: float, event: stages.StageLoad) -> bool:
    peer.claim(queue=event.queue, speed=event.rate, phase=event.phase)
    return False


def _pipeline_progress(view: ViewState, peer: LivePeer, at: float, event: stages.PipelineProgress) -> bool:
    view.audit_trail.totals.setdefault(peer.name, AuditTotals()).note(event.as_fields())
    return False


def _move_started(view: ViewState, peer: LivePeer, at: float, event: stages.MoveStarted) -> bool:
    view.keep_move(peer.name, at, event)
    peer.claim(phase=f"moving to stage {event.target}")
    return True


def _text_fed(view: ViewState, peer: LivePeer, at: float, event: stages.TextFed) -> bool:
    """Note a feeder's start, each new replica that asks for text, and a total once a minute."""
    fed, peer.pipelined = peer.fed, True
    peer.claim(role="feeder", phase="waiting for requests")
    if fed is None or event.micro_batches < fed[1].micro_batches:  # counters restart with the process
        view.note(f"{peer.name} is a feeder: it reads text for the replicas of the first stage and holds no weights")
        peer.fed = (at, event, at)
        return False
    last_at, last, told_at = fed
    count = several(len(event.peers), "peer")
    if at - last_at >= 1.0:  # an earlier event reports a new peer, not a rate
        peer.claim(speed=(event.micro_batches - last.micro_batches) / (at - last_at))
    if event.peers:
        peer.claim(phase=f"feeding {count}")
    if new := event.peers[len(last.peers) :]:
        view.note(f"{peer.name} feeds {', '.join(map(view.name_of, new))}")
    elif at - told_at >= FEEDING_EVERY_S:
        view.note(f"{peer.name} has read {event.micro_batches} micro-batches for {count}")
        told_at = at
    peer.fed = (at, event, told_at)
    return False


def _position(peer: LivePeer, event: OwnRound) -> None:
    """Take in the round, state and members of a peer."""
    sent_before = peer.claims.bytes_up
    peer.claim(
        round=event.round,
        phase=_BETWEEN,
        state_hash=event.state_hash,
        loss=finite(event.loss),
        bytes_up=event.bytes_up or sent_before,
        bytes_down=event.bytes_down or peer.claims.bytes_down,
    )
    peer.said.pop("unsaved", None)
    peer.members = event.members or peer.members
    peer.round_bytes_up = max(0, peer.claims.bytes_up - sent_before) if sent_before else 0
    if peer.work is None or not peer.work.tokens_per_s:  # no steps are told of: its rounds are short, or others'
        peer.curve.add(peer.claims.loss)


def _record_merged(view: ViewState, event: rounds.HeadAdopted) -> None:
    """Keep what a commit of a stage has merged, for the report."""
    if view.keeps_all and event.stage is not None:
        merged = tuple(_ranges(text) for text in event.counted or ())
        view.audit_trail.commit(event.stage, AuditEntry(event.head, event.previous, merged))


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Parse "0-8,16-24" into half-open ranges."""
    pairs = (piece.split("-") for piece in text.split(",") if piece)
    return tuple((int(first), int(last)) for first, last in pairs)


PEER_EVENTS: Final[dict[type[Happening], Handler]] = {
    rounds.PhaseEntered: _phase_entered,
    rounds.InnerStep: _inner_step,
    rounds.StateProgress: _state_progress,
    rounds.RoundCommitted: _round_committed,
    rounds.HeadAdopted: _head_adopted,
    rounds.GossipMet: _gossip_round,
    rounds.GossipAlone: _gossip_round,
    rounds.DiscardedRound: _round_discarded,
    rounds.ValEvaluated: _val_evaluated,
    rounds.StepsSkipped: _steps_skipped,
    rounds.RunFinished: _run_finished,
    machine.WorkerReady: _worker_ready,
    machine.PeerPaused: _pause,
    machine.PeerResumed: _pause,
    machine.CorpusRead: _corpus_read,
    pages.DataSetOpened: _data_set_opened,
    pages.HoldersUnread: _once("holders unread"),
    pages.PagesKept: _pages_kept,
    pages.SamplesAwaited: _samples_awaited,
    machine.RecordsUnsaved: _once("unsaved"),
    machine.RelayFailed: _relay,
    machine.RelayReserved: _relay,
    machine.CheckpointSaved: _checkpoint_saved,
    machine.LastCheckpointFailed: _last_checkpoint_failed,
    groups.MembershipStale: _once("stale"),
    groups.PeerSuspect: _peer_suspect,
    groups.PeerRecovered: _peer_recovered,
    groups.MemberJoined: _member_joined,
    groups.MemberLeft: _member_left,
    serving.CommitServed: _once("serves"),
    serving.LoadingProgress: _loading_progress,
    stages.ReplicaOpened: _replica_opened,
    stages.StageLoad: _stage_load,
    stages.PipelineProgress: _pipeline_progress,
    stages.MoveStarted: _move_started,
    stages.TextFed: _text_fed,
}
"""Events without a handler change nothing, and are news but for these, which only the log of the whole run has."""
IN_LOG_ONLY: Final = (
    rounds.AttemptFailed, rounds.CatchUpFailed, rounds.ContributionJudged, rounds.MergeFailed, rounds.RoundEmpty,
    rounds.FetchedState, groups.PeerPenalized, stages.PipelineLost, stages.PipelineRedispatched,
    stages.PipelineResumed, stages.PipelineWaiting,
)  # fmt: skip
