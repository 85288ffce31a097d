"""`peer regroup`: continue a run that has lost too many members at once.

The coordinator of a home is asked to let its groups go on with the members that are left.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.homes import coordinator_home
from cli.options import home_option
from cli.terminal.figures import several
from cli.terminal.lines import say
from peer.errors import ConfigError, NoQuorum

if TYPE_CHECKING:
    from swarm.coordinator.regroup_files import GroupOutcome


@click.command()
@home_option("Home of the coordinator, which must run.  [default: the only one of this machine]")
@click.option(
    "--without",
    multiple=True,
    metavar="PEER_ID",
    help="Go on without this member, even if it answers. May be given several times.",
)
@click.option("--undo", is_flag=True, help="Undo the last rounds if no peer that answers has their weights.")
def regroup(home: Path | None, without: tuple[str, ...], undo: bool) -> None:
    """Continue a run that has lost too many members at once, with those that are left.

    A group that can go on by itself is left alone. What comes back later follows the new term, and what it did in the
    old one after the regroup is lost.
    """
    from peer.identity import is_peer_id
    from swarm.coordinator.regroup_files import ask_coordinator

    for peer in without:
        if not is_peer_id(peer):
            raise ConfigError(f"--without {peer} is not a peer id: `peer status INVITE --json` shows the ids")
    outcomes = ask_coordinator(home or coordinator_home(), without, undo)
    if not outcomes:
        raise ConfigError("a gossip run has no groups: its peers go on by themselves, so start more of them")
    for outcome in outcomes:
        say(told(outcome))
    stuck = [outcome for outcome in outcomes if outcome.outcome not in ("regrouped", "withdrawn")]
    if stuck:
        raise NoQuorum(f"{several(len(stuck), 'group')} cannot go on yet: {_remedy(stuck)}")


def told(outcome: GroupOutcome) -> str:
    """Return what came of the request in one group, as a sentence."""
    name = "the run" if outcome.stage is None else f"stage {outcome.stage}"
    match outcome.outcome:
        case "regrouped":
            members = several(outcome.members, "member")
            return f"{name} goes on from round {outcome.round} with {members} (term {outcome.term})"
        case "withdrawn":
            return f"{name} goes on by itself from round {outcome.round}: nothing was changed"
        case "would_undo":
            return f"{name} could go on only by undoing the rounds after {outcome.round}: nothing was changed"
        case "failed":
            return f"{name} cannot go on from round {outcome.round}: {outcome.reason}"
        case "unnamed":
            return f"{name} stays at round {outcome.round}: {_absence(outcome)}"
        case "silent":
            return f"{name} cannot go on from round {outcome.round}: no peer answers that has its weights"


def _absence(outcome: GroupOutcome) -> str:
    """Return what it may mean that these members do not answer."""
    if outcome.alone:
        return (
            "no member answers, so check this machine's own connection first. If they are alive elsewhere, what they do"
            " after a new term is lost"
        )
    names = ", ".join(outcome.away)
    return f"{names} {'do' if len(outcome.away) > 1 else 'does'} not answer. Alive elsewhere, what they do then is lost"


def _remedy(stuck: list[GroupOutcome]) -> str:
    kinds = {outcome.outcome for outcome in stuck}
    if "unnamed" in kinds:
        away = dict.fromkeys(peer for outcome in stuck for peer in outcome.away)
        named = " ".join(f"--without {peer}" for peer in away)
        return f"start those members again, or go on without them for good: peer regroup {named}"
    if "would_undo" in kinds:
        return "start a member that has its last rounds, or give --undo"
    return "start one of its members again (`peer join INVITE --home DIR`), then ask again"
