"""`peer status`: one look at a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.table import Table

from cli.edge import run_until_stopped
from cli.options import home_option, read_invite
from cli.progress import size_text
from peer.errors import ConfigError

if TYPE_CHECKING:
    from swarm.view import MemberStatus, SwarmStatus


@click.command()
@click.argument("invite", required=False)
@home_option("Look at the run of the peer that lives here (it need not be running).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(invite: str | None, home: Path | None, as_json: bool) -> None:
    """Show who is in the run of INVITE, in which round it is, and how well it learns.

    What a peer says of itself is at most 9 seconds old; one that is dead or frozen has disappeared after that.
    """
    if (invite is None) == (home is None):
        raise ConfigError("say which run to look at: either INVITE or --home DIR.")
    from swarm.view import read_status
    from swarm.visit import read_kept_invite

    opened = read_invite(invite) if invite is not None else read_kept_invite(home or Path())
    seen = run_until_stopped(lambda: read_status(opened, home))
    if as_json:
        click.echo(msgspec.json.encode(seen).decode())
    else:
        _show(seen)


def _show(seen: SwarmStatus) -> None:
    console = Console(width=max(100, Console().width))
    console.print(f"[bold]{seen.name}[/bold]   run {seen.run_id}   {'open' if seen.open else 'by invitation'}")
    console.print(_summary(seen))
    if seen.stages:
        console.print(_stages(seen))
        for peer in seen.peers:
            if peer.ready_in_s > 0:
                way = "joining" if peer.source < 0 else f"moving from stage {peer.source} to"
                console.print(f"{peer.name} is {way} stage {peer.stage}, at work in about {peer.ready_in_s:.0f} s")
        if feeders := [peer.name for peer in seen.peers if peer.role == "feeder"]:
            console.print(f"fed by {', '.join(feeders)}")
    console.print(_peers(seen))
    if any(_is_outside(seen, peer) for peer in seen.peers):
        console.print("+  not a member of the last commit: joining, or left behind")


def _summary(seen: SwarmStatus) -> str:
    """How far the run has come, in one sentence."""
    of = f" of {seen.rounds}" if seen.rounds else ""
    loss = "" if seen.val_loss is None else f", held-out loss {seen.val_loss:.3f}"
    if seen.stages and seen.round is None:
        missing = [str(stage.stage) for stage in seen.stages if stage.round is None]
        return f"No commit that a majority stands by was found of stage {', '.join(missing)}: its peers are away."
    if seen.round is None:
        return "No commit that a majority stands by was found: the run has not begun, or most peers are away."
    if seen.stages:
        stages = f"{len(seen.stages)} stages, all at round {seen.round}{of} or beyond"
        return f"{stages}, {seen.tokens / 1e6:.1f} M tokens{loss}"
    if seen.method == "gossip":
        rounds = [peer.round for peer in seen.peers if peer.role == "full"]
        return (
            f"gossip: {seen.members} peers, each with weights of its own, at rounds {min(rounds)} to {max(rounds)}{of},"
            f" {seen.tokens / 1e6:.1f} M tokens{loss}{' (of one peer)' if loss else ''}"
        )
    alive = "alive" if seen.quorum_alive else _bad_if(True, "too few alive to go on")
    return (
        f"round {seen.round}{of}, {seen.tokens / 1e6:.1f} M tokens{loss},"
        f" state {seen.state_hash[:8]}, {seen.members} members (quorum {seen.quorum}: {alive})"
    )


def _bad_if(bad: bool, text: str) -> str:
    return f"[red]{text}[/red]" if bad else text


def _stages(seen: SwarmStatus) -> Table:
    """One line a stage of a pipeline."""
    table = Table()
    for column in ("stage", "blocks", "round", "state", "replicas", "members", "queue", "s/micro-batch"):
        right = column in ("stage", "round", "replicas", "queue", "s/micro-batch")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for stage in seen.stages:
        replicas = str(stage.replicas) + (f" +{stage.arriving}" if stage.arriving else "")
        table.add_row(
            str(stage.stage),
            f"{stage.first} to {stage.end - 1}",
            "" if stage.round is None else str(stage.round),
            stage.state_hash[:8],
            _bad_if(not stage.replicas, replicas),
            _bad_if(not stage.quorum_alive, f"{stage.members} (quorum {stage.quorum})" if stage.members else "none"),
            "" if stage.queue is None else f"{stage.queue:.1f}",
            "" if stage.service_s is None else f"{stage.service_s:.3g}",
        )
    return table


def _peers(seen: SwarmStatus) -> Table:
    """One line a peer."""
    table = Table()
    own = ("stage", "queue") if seen.stages else ()
    for column in ("peer", "id", *own, "round", "phase", "steps/s", "loss", "up / down", "state", "seen"):
        right = column in ("stage", "queue", "round", "steps/s", "loss", "up / down", "seen")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for peer in seen.peers:
        stage = "" if peer.stage < 0 else str(peer.stage)
        table.add_row(
            peer.name[:16] + (" +" if _is_outside(seen, peer) else ""),
            peer.peer[-6:],
            *((stage, f"{peer.queue:.1f}" if stage else "") if seen.stages else ()),
            str(peer.round),
            peer.phase,
            f"{peer.speed:.1f}" if peer.speed else "",
            "" if peer.loss is None else f"{peer.loss:.3f}",
            f"{size_text(peer.bytes_up)} / {size_text(peer.bytes_down)}",
            peer.state_hash[:8],
            f"{peer.age_s:.0f} s",
        )
    return table


def _is_outside(seen: SwarmStatus, peer: MemberStatus) -> bool:
    return seen.method != "gossip" and not peer.in_head and peer.role in ("full", "stage")
