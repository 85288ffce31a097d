"""`peer regroup`: continue a run that has lost too many members at once.

It asks the coordinator of a home to continue its groups with the members that are left.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cli.homes import coordinator_home
from cli.options import home_option
from cli.terminal.lines import say
from peer.errors import ConfigError, NoQuorum
from peer.figures import several
from swarm.run.home import Home

if TYPE_CHECKING:
    from swarm.coordinator.regroup_files import GroupOutcome


@click.command()
@home_option("Home of the coordinator, which must run.  [default: the only one of this machine]")
@click.option(
    "--without",
    multiple=True,
    metavar="PEER_ID",
    help="Exclude this member, even if it answers, until --readmit. May be given several times.",
)
@click.option(
    "--readmit",
    multiple=True,
    metavar="PEER_ID",
    help="Let this peer be a member again, after --without. May be given several times.",
)
@click.option("--undo", is_flag=True, help="Undo the last rounds if no peer that answers has their weights.")
def regroup(home: Path | None, without: tuple[str, ...], readmit: tuple[str, ...], undo: bool) -> None:
    """Continue a run that has lost too many members at once, with those that are left.

    A group that can continue by itself is left alone. A member that returns follows the new term; what it did in the
    old one after the regroup is lost.
    """
    from peer.identity import is_peer_id
    from swarm.coordinator.regroup_files import ask_coordinator

    found = Home(home or coordinator_home())
    for option, peer in (*(("--without", peer) for peer in without), *(("--readmit", peer) for peer in readmit)):
        if not is_peer_id(peer):
            raise ConfigError(f"{option} {peer} is not a peer id: `peer status {found.option} --json` shows the ids")
    if both := next((peer for peer in without if peer in readmit), ""):
        raise ConfigError(f"--without and --readmit both name {both}: give one of them")
    outcomes = ask_coordinator(found.path, without, readmit, undo)
    if not outcomes:
        raise ConfigError("a gossip run has no groups: peers continue by themselves, so start more of them")
    for outcome in outcomes:
        say(told(outcome))
        say(*(f"  {branch}" for branch in outcome.branches), uncut=True)
    if stuck := [outcome for outcome in outcomes if outcome.outcome not in _GOES_ON]:
        remedy = _remedy(stuck)
        if remedy.asks:  # whole on a line of its own: it may name many
            words = dict.fromkeys((*without, *remedy.without))
            options = [found.option, *(f"--without {peer}" for peer in words)]
            options += [*(f"--readmit {peer}" for peer in readmit), *(["--undo"] * (undo or remedy.undo))]
            say(f"peer regroup {' '.join(options)}", err=True, uncut=True)
        raise NoQuorum(f"{several(len(stuck), 'group')} cannot continue: {remedy.advice}")


_GOES_ON: Final = ("resumed", "begun", "withdrawn")


def told(outcome: GroupOutcome) -> str:
    """Return what came of the request in one group, as a sentence."""
    name = "the run" if outcome.stage is None else f"stage {outcome.stage}"
    match outcome.outcome:
        case "resumed":
            members = several(outcome.members, "member")
            return f"{name} resumes from round {outcome.round} with {members} (term {outcome.term})"
        case "begun":
            return f"{name} begins with {several(outcome.members, 'member')}"
        case "unbegun":
            are = "is" if outcome.connected == 1 else "are"
            all_ = "" if outcome.stage is None else " in all stages, one of each"
            connected = f"{several(outcome.connected, 'peer')} of it {are} connected"
            return f"{name} has not begun: {connected}, and the run begins with {outcome.needed}{all_}"
        case "withdrawn":
            return f"{name} continues by itself from round {outcome.round}: nothing changed"
        case "would_undo":
            rounds = f"undoing {several(outcome.undone, 'round')} and resuming from round {outcome.round}"
            return f"{name} could continue only by {rounds}: nothing changed"
        case "failed":
            reason = outcome.reason if outcome.connected else "no peer answers yet"
            return f"{name} is stuck at round {outcome.round}: {reason}"
        case "unnamed":
            return f"{name} stays at round {outcome.round}: {_absence(outcome)}"
        case "silent":
            none = "no peer answers that has its weights" if outcome.connected else "no peer answers yet"
            return f"{name} is stuck at round {outcome.round}: {none}"


def _absence(outcome: GroupOutcome) -> str:
    """Return what it may mean that these members do not answer."""
    if not outcome.connected:
        return "no peer answers yet"
    if outcome.alone:
        return (
            "no member answers, so check this machine's own connection first. If they are alive elsewhere, what they do"
            " after a new term is lost"
        )
    names = ", ".join(outcome.away)
    return f"{names} {'do' if len(outcome.away) > 1 else 'does'} not answer. Alive elsewhere, what they do then is lost"


@dataclass(frozen=True)
class _Remedy:
    """The advice for groups that cannot continue."""

    advice: str
    asks: bool = True
    """Whether to ask again, by the command that is printed above the advice."""
    without: tuple[str, ...] = ()
    """Members that the command names besides those named already."""
    undo: bool = False


def _remedy(stuck: list[GroupOutcome]) -> _Remedy:
    begun = [outcome for outcome in stuck if outcome.outcome != "unbegun"]
    kinds = {outcome.outcome for outcome in begun}
    if begun and not any(outcome.connected for outcome in begun):
        return _Remedy(
            "wait until its members are connected, or start them again (`peer join --home DIR` where each ran), then"
            " type the line above. If all are up, check this machine's own connection"
        )
    if "unnamed" in kinds:
        away = tuple(dict.fromkeys(peer for outcome in begun for peer in outcome.away))
        return _Remedy("start those members again, or exclude them for good by the line above", without=away)
    if "would_undo" in kinds:
        advice = "start a member that has its last rounds, or undo them by the line above"
        if any(outcome.branches for outcome in begun):
            advice += ". It resumes from the first round listed: to leave that one out, add --without for its peers"
        return _Remedy(advice, undo=True)
    if begun:
        return _Remedy("start one of its members again (`peer join --home DIR` where it ran), then type the line above")
    needed = max(outcome.needed for outcome in stuck)
    if any(outcome.restored for outcome in stuck):
        return _Remedy(
            f"wait until {several(needed, 'peer')} are connected, or start more with `peer join INVITE`, then type the"
            " line above: a restored coordinator begins nothing before"
        )
    return _Remedy(
        f"it begins by itself once {several(needed, 'peer')} are connected and ready: start more with"
        " `peer join INVITE`",
        asks=False,
    )
