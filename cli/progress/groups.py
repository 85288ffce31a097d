"""What the events of a coordinator change in a view: its groups, one for the whole model or one a stage."""

from __future__ import annotations

from typing import Final

from cli.progress.live_peer import STARTING, LivePeer
from cli.progress.losses import finite
from cli.progress.peers import Handler
from cli.progress.state import COMPLETE, ViewState
from peer.catalogue import groups, rounds
from peer.catalogue.happening import Happening
from swarm.run.sections import STAGES_MAX

_CATCHES_UP_S: Final = 30.0
_TRAINING: Final = "training"


def _run_entered(view: ViewState, peer: LivePeer, at: float, event: groups.RunEntered) -> bool:
    peer.claim(role=event.role, phase=STARTING)
    peer.pipelined, view.rounds, view.min_peers = event.stages > 1, event.rounds, event.min_peers
    if event.role == "coordinator":
        for stage in range(min(event.stages, STAGES_MAX)) if event.stages > 1 else (None,):
            view.group(stage)
    return len(view.peers) == 1


def _head_seen(view: ViewState, peer: LivePeer, at: float, event: rounds.HeadSeen) -> bool:
    before = view.group(event.stage).facts
    view.group(event.stage, _TRAINING, round=event.round, members=event.members)
    if event.round and view.pace.elapsed_s(at) is None:
        peer.catches_up_until = at + _CATCHES_UP_S
    view.pace.note(event.round, at, event.tokens, seen=at >= peer.catches_up_until)
    newer = event.round > (0 if before is None else before.round)
    return newer and len(view.peers) == 1  # peers in the same view report their commits in more detail


def _members_told(view: ViewState, peer: LivePeer, at: float, event: groups.MembersTold) -> bool:
    """What the members say of themselves, in the coordinator's view."""
    if event.round > peer.told_round:
        peer.told_round = event.round
        peer.claim(loss=finite(event.loss))
        peer.curve.add(peer.claims.loss)
        view.loss_curve.add(peer.claims.loss)
    if finite(event.val_loss) is not None:
        peer.claim(val_loss=event.val_loss, val_round=event.val_round)
    peer.claim(speed=event.steps_per_s, bytes_up=event.bytes_up, bytes_down=event.bytes_down)
    return False


def _regrouped(view: ViewState, peer: LivePeer, at: float, event: groups.Regrouped) -> bool:
    view.group(event.stage, _TRAINING, round=event.round, members=event.members, term=event.term)
    return True


def _quorum_lost(view: ViewState, peer: LivePeer, at: float, event: groups.QuorumLost) -> bool:
    view.group(event.stage, "cannot go on")
    remedy = event.remedy(view.name_of, view.home_option(peer))
    view.note(f"{event.sentence(peer.name, view.name_of)}: {remedy}")
    return False


def _coordinator_restored(view: ViewState, peer: LivePeer, at: float, event: groups.CoordinatorRestored) -> bool:
    view.group(event.stage, "waits for `peer regroup`")
    view.note(
        f"the coordinator's disk is not the newest one of {event.group}: it does nothing before"
        f" `peer regroup {view.home_option(peer)}`; use that once the members that are alive are connected"
    )
    return False


def _roster_full(view: ViewState, peer: LivePeer, at: float, event: groups.RosterFull) -> bool:
    """Told again once a round has no room for more of them."""
    is_fuller = event.left_out > view.fullest.get(event.stage, 0)
    if is_fuller:
        view.fullest[event.stage] = event.left_out
    return is_fuller


def _votes_in_one_hand(view: ViewState, peer: LivePeer, at: float, event: groups.VotesInOneHand) -> bool:
    from swarm.membership.vote_shares import VoteShare, caution

    share = VoteShare(
        invite=event.invite, prefix=event.prefix, votes=event.votes, members=event.members, stage=event.stage
    )
    view.note(
        f'{caution(share)}; where you post an invite publicly, create the run with [run] coordinator = "required"'
    )
    return False


def _run_completed(view: ViewState, peer: LivePeer, at: float, event: rounds.RunCompleted) -> bool:
    """Note it once: several peers in one view tell it of the same group."""
    view.group(event.stage, COMPLETE, round=event.round)
    if view.complete and len(view.groups) >= view.stages and not view.told_complete:
        view.told_complete = True
        view.note(f"complete: round {event.round} of {view.rounds or event.round}")
    return False


def _run_found_complete(view: ViewState, peer: LivePeer, at: float, event: rounds.RunFoundComplete) -> bool:
    complete = f"complete: round {event.round} of {event.round}"
    if not event.kept:
        view.note(
            f"{complete}, but the coordinator does not have the last state yet: start a member again that took part to"
            " the end"
        )
        return False
    view.group(None, COMPLETE, round=event.round)
    where = view.home_option(peer) if event.stages == 1 and peer.claims.role != "feeder" else "INVITE"
    if not event.common:
        where = "--home HOME_OF_ONE_THAT_TOOK_PART"
    peer.claim(phase=COMPLETE)
    view.told_complete = True
    view.note(f"{complete}; `peer export {where} --out DIR` writes the model")
    return False


def _last_state_missing(view: ViewState, peer: LivePeer, at: float, event: groups.LastStateMissing) -> bool:
    view.group(event.stage, "waits for its last state")
    return True


GROUP_EVENTS: Final[dict[type[Happening], Handler]] = {
    groups.RunEntered: _run_entered,
    rounds.HeadSeen: _head_seen,
    groups.MembersTold: _members_told,
    groups.Regrouped: _regrouped,
    groups.QuorumLost: _quorum_lost,
    groups.CoordinatorRestored: _coordinator_restored,
    groups.RosterFull: _roster_full,
    groups.VotesInOneHand: _votes_in_one_hand,
    rounds.RunCompleted: _run_completed,
    rounds.RunFoundComplete: _run_found_complete,
    groups.LastStateMissing: _last_state_missing,
}
