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
    of = f" of {seen.rounds}" if seen.rounds else ""
    console.print(f"[bold]{seen.name}[/bold]   run {seen.run_id}   {'open' if seen.open else 'by invitation'}")
    if seen.round is None:
        console.print("No commit that a majority stands by was found: the run has not begun, or most peers are away.")
    elif seen.method == "gossip":
        loss = "" if seen.val_loss is None else f", held-out loss {seen.val_loss:.3f} (of one peer)"
        rounds = [peer.round for peer in seen.peers if peer.role == "full"]
        console.print(
            f"gossip: {seen.members} peers, each with weights of its own, at rounds {min(rounds)} to {max(rounds)}{of},"
            f" {seen.tokens / 1e6:.1f} M tokens{loss}"
        )
    else:
        state = "alive" if seen.quorum_alive else "[red]too few alive to go on[/red]"
        loss = "" if seen.val_loss is None else f", held-out loss {seen.val_loss:.3f}"
        console.print(
            f"round {seen.round}{of}, {seen.tokens / 1e6:.1f} M tokens{loss},"
            f" state {seen.state_hash[:8]}, {seen.members} members (quorum {seen.quorum}: {state})"
        )
    table = Table()
    for column in ("peer", "id", "round", "phase", "steps/s", "loss", "up / down", "state", "seen"):
        right = column in ("round", "steps/s", "loss", "up / down", "seen")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for peer in seen.peers:
        table.add_row(
            peer.name[:16] + (" +" if _is_outside(seen, peer) else ""),
            peer.peer[-6:],
            str(peer.round),
            peer.phase,
            f"{peer.speed:.1f}" if peer.speed else "",
            "" if peer.loss is None else f"{peer.loss:.3f}",
            f"{size_text(peer.bytes_up)} / {size_text(peer.bytes_down)}",
            peer.state_hash[:8],
            f"{peer.age_s:.0f} s",
        )
    console.print(table)
    if any(_is_outside(seen, peer) for peer in seen.peers):
        console.print("+  not a member of the last commit: joining, or left behind")


def _is_outside(seen: SwarmStatus, peer: MemberStatus) -> bool:
    return seen.method != "gossip" and not peer.in_head and peer.role == "full"
