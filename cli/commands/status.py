"""`peer status`: show the peers, round and loss of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click
import msgspec
import trio
from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from cli.combinations import check_one_source, refuse_beside
from cli.homes import default_home
from cli.options import home_option, invite_argument, read_invite
from cli.run import end_unless_watched, run_until_stopped
from cli.terminal.figures import NOTHING, held_out_text, number_text, several, size_text
from cli.terminal.lines import say, say_json
from cli.terminal.screen import drawn, live, screen, table_screen
from cli.views.table import fitting
from peer.errors import ConfigError, NetworkError
from peer.plain_text import plain
from swarm.rounds.trainers.trained_rounds import REMEDY

if TYPE_CHECKING:
    from swarm.client.status import MemberStatus, StageStatus, SwarmStatus
    from swarm.inference.model_status import ServedModelStatus, ServedRunStatus
    from swarm.run.invite import Invite

_STAGES: Final = ("stage", "blocks", "round", "replicas", "members", "batch/s", "queue", "phase")
_PIPELINE: Final = ("peer", "id", "stage", "round", "batch/s", "queue", "loss", "phase")
_WHOLE: Final = ("peer", "id", "round", "phase", "steps/s", "loss", "up / down", "state", "seen")
_LEFT: Final = ("blocks", "members", "phase", "peer", "id", "state")
_FIRST_TO_GO: Final = ("state", "up / down", "seen", "id", "queue", "steps/s", "batch/s", "members", "blocks", "loss")
"""What a narrow terminal does not show. Peer, stage, round and phase always stay."""
_PHASE_LEAST: Final = 9
_WATCH_S: Final = 3.0


@click.command()
@invite_argument(required=False)
@home_option("Show the run of the peer that has this home (it need not be running).")
@click.option("--guests", is_flag=True, help="Show as well who came by which invite of a closed run.")
@click.option("--watch", is_flag=True, help="Show it again every few seconds, until Ctrl-C.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Only draw the loss by round, as the events in this machine's home of the run tell it: .png, .svg or .pdf.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, which has more about each peer.")
def status(invite: str | None, home: Path | None, guests: bool, watch: bool, plot: Path | None, as_json: bool) -> None:
    """Show the peers of the run of INVITE, its round and its loss, and who serves it; of a served model its servers,
    blocks and load.

    A peer's entry is at most 9 seconds old. A dead or frozen peer disappears after that time.
    """
    check_one_source("run", "invite", "home")
    if plot is not None:
        refuse_beside("--plot", True, "guests", "watch", "as_json")
        _plot(home or default_home(read_invite(invite or "").run_id[:12]), plot)
        return
    from swarm.inference.model_status import read_any_status
    from swarm.run.invite import read_saved_invite

    opened = read_invite(invite) if invite is not None else read_saved_invite(home or Path())

    async def show() -> None:
        try:
            if watch:
                await _watch(opened, home, guests, as_json)
            else:
                _tell(await read_any_status(opened, home), guests, as_json)
        except NetworkError:
            _tell_kept(home or default_home(opened.run_id[:12]), opened.run_id, as_json)
            raise

    run_until_stopped(show)


def _tell_kept(home: Path, run_id: str, as_json: bool) -> None:
    """Print what the home keeps of a run whose peers do not answer; nothing where it keeps nothing."""
    from cli.progress.kept_home import kept_home
    from cli.views.kept_home import kept_lines

    kept = kept_home(home, run_id, time.time())
    if kept is None:
        return
    if as_json:
        say_json({"run_id": run_id, "home": msgspec.to_builtins(kept)}, uncut=True)
        return
    console = table_screen()
    for line in kept_lines(kept, kept.at):
        console.print(Text(line))


def _plot(home: Path, file: Path) -> None:
    from cli.progress.losses import losses_in
    from cli.views.loss_picture import draw_home

    losses = losses_in(home)
    if not losses:
        raise ConfigError(f"the events in {home} tell of no loss: give the --home of a peer or coordinator of the run")
    draw_home(losses, file)
    say(f"Drew the loss to {file}.")


async def _watch(opened: Invite, home: Path | None, guests: bool, as_json: bool) -> None:
    """Show the status again and again until cancelled. A reading that fails is told, and tried again."""
    from swarm.inference.model_status import any_status, open_any

    async with open_any(opened, home) as client:
        if as_json or not (console := screen()).is_terminal:
            while True:
                _tell(await any_status(client), guests, as_json)
                end_unless_watched()
                await trio.sleep(_WATCH_S)
        with live("", console) as display:
            while True:
                seen = await any_status(client)
                display.update(drawn(partial(_tell, seen, guests, as_json)), refresh=True)
                end_unless_watched()
                await trio.sleep(_WATCH_S)


def _tell(seen: ServedRunStatus | ServedModelStatus, guests: bool, as_json: bool) -> None:
    """Print the status."""
    from cli.views.served_model import show_run_servers, show_served_model
    from swarm.inference.model_status import ServedModelStatus

    if as_json:
        say_json(msgspec.to_builtins(seen))
        return
    if isinstance(seen, ServedModelStatus):
        show_served_model(seen)
        return
    _show(seen)
    show_run_servers(seen)
    if guests:
        _show_guests(seen)


def _show(seen: SwarmStatus) -> None:
    from swarm.membership.vote_shares import alarms, caution

    console = table_screen(80 if seen.stages else 100)
    admission = "open" if seen.open else "by invitation"
    console.print(Text(plain(seen.name), style="bold"), f"  run {seen.run_id}  ", admission)
    console.print(_summary(seen))
    if seen.stages:
        console.print(_table(_STAGES, [_stage_cells(stage, seen.complete) for stage in seen.stages], console.width))
        console.print(_table(_PIPELINE, [_cells(seen, peer) for peer in seen.peers], console.width))
        for peer in seen.peers:
            if peer.ready_in_s > 0:
                way = "joining" if peer.source < 0 else f"moving from stage {peer.source} to"
                going = f"is {way} stage {peer.stage}, ready in about {peer.ready_in_s:.0f} s"
                console.print(f"{plain(peer.name)} {going}")
        if feeders := [plain(peer.name) for peer in seen.peers if peer.role == "feeder"]:
            console.print(f"text is read by {', '.join(feeders)}")
    else:
        console.print(_table(_WHOLE, [_cells(seen, peer) for peer in seen.peers], console.width, ruled=True))
    for peer in seen.peers:
        if peer.skipped:
            console.print(Text(_skipped_text(peer), style="red" if peer.skipped == peer.steps else ""))
    if clients := [plain(peer.name) for peer in seen.peers if peer.client]:
        console.print(f"{', '.join(clients)} cannot be dialled: {'they merge' if clients[1:] else 'it merges'} nothing")
    if any(_is_outside(seen, peer) for peer in seen.peers):
        console.print("+  not a member of the last commit: joining, or behind")
    if seen.silent:
        names = {peer.peer: peer.name for peer in seen.peers}
        silent = ", ".join(f"{plain(names.get(peer, 'the coordinator'))} {peer[-6:]}" for peer in seen.silent)
        console.print(Text(f"no answer from {silent}", style="yellow"))
    for text in _judged_texts(seen):
        console.print(Text(text, style="yellow"))
    for share in alarms(seen.shares):
        console.print(Text(f"{plain(caution(share))}.", style="yellow"))


def _judged_texts(seen: SwarmStatus) -> list[str]:
    """Return whose updates make the loss worse, by the word of the members that answered."""
    if seen.judges == 0 and seen.members:
        return ["no member answered whose updates make the loss worse"]
    names, of, texts = {peer.peer: peer.name for peer in seen.peers}, several(seen.judges or 0, "member"), []
    for judged in seen.judged:
        says, leave = len(judged.judges), len(judged.left_out_by)
        who = f"{plain(names.get(judged.peer, 'away'))} {judged.peer[-6:]}"
        text = f"{who} makes the loss worse, {'says' if says == 1 else 'say'} {says} of {of} that answered"
        lead = "leaves it out where it leads" if leave == 1 else "leave it out where they lead"
        texts.append(text + (f"; {leave} {lead}" if leave else ""))
    return texts


def _show_guests(seen: SwarmStatus) -> None:
    """Show who came by which invite, directly or through a member that came by it, and what that means for votes."""
    from swarm.membership.vote_shares import caution

    console, names = table_screen(), {peer.peer: peer.name for peer in seen.peers}
    if not seen.guests:
        why = "this run is open" if seen.open else "no peer came by one yet"
        console.print(f"No invite has brought in a peer: {why}.")
    for invite in seen.guests:
        peers = ", ".join(f"{plain(names.get(peer, 'away'))} {peer[-6:]}" for peer in invite.peers)
        came = f"{len(invite.peers)} of {several(invite.guests, 'guest')}, {several(invite.members, 'member')}"
        console.print(Text(f"invite {plain(invite.invite[:8])}  {came}: {peers}"))
    for share in seen.shares:
        if share.is_only:
            console.print(f"{plain(caution(share))}.")


def _summary(seen: SwarmStatus) -> Text | str:
    """Return the run's progress in one sentence."""
    of = f" of {seen.rounds}" if seen.rounds else ""
    loss = "" if seen.val_loss is None else f", held-out loss {held_out_text(seen.val_loss, seen.val_round)}"
    if seen.method == "gossip" and seen.complete:
        return f"complete: round {seen.rounds} of {seen.rounds}, each home has its own weights{loss}"
    if seen.stages and seen.round is None:
        missing = [str(stage.stage) for stage in seen.stages if stage.round is None]
        return f"No commit with a majority was found for stage {', '.join(missing)}: none of its peers is alive."
    if seen.round is None:
        return "No commit with a majority was found: the run has not begun, or most peers are away."
    if seen.complete:
        return _outcome(seen, loss)
    if seen.stages:
        stages = f"{len(seen.stages)} stages, all at round {seen.round}{of} or beyond"
        return f"{stages}, {seen.tokens / 1e6:.1f} M tokens{loss}"
    if seen.method == "gossip":
        rounds = [peer.round for peer in seen.peers if peer.role == "full" and peer.round is not None]
        if not rounds:
            return f"gossip: {several(seen.members, 'peer')}, none of which has begun."
        return (
            f"gossip: {several(seen.members, 'peer')}, each with its own weights,"
            f" at rounds {min(rounds)} to {max(rounds)}{of},"
            f" {seen.tokens / 1e6:.1f} M tokens{loss}{' (of one peer)' if loss else ''}"
        )
    if not (seen.round or seen.members):
        return f"round 0{of}: the run waits for its first peers"
    return Text.assemble(
        f"round {seen.round}{of}, {seen.tokens / 1e6:.1f} M tokens{loss},"
        f" state {seen.state_hash[:8] or NOTHING}, {several(seen.members, 'member')} (quorum {seen.quorum}: ",
        "alive" if seen.quorum_alive else ("too few alive to go on", "red"),
        ")",
    )


def _skipped_text(peer: MemberStatus) -> str:
    """Return what a peer's skipped steps mean for the run."""
    which = "all" if peer.skipped == peer.steps else str(peer.skipped)
    of = f"{which} {several(peer.steps, 'step')}" if which == "all" else f"{which} of {several(peer.steps, 'step')}"
    return f"{plain(peer.name)} skipped {of} of its last round, whose loss or gradient was NaN or infinite: {REMEDY}"


def _outcome(seen: SwarmStatus, loss: str) -> Text:
    """Return the sentence about a complete run. No members are needed, so none are missing."""
    state = f", {len(seen.stages)} stages" if seen.stages else f", state {seen.state_hash[:8] or NOTHING}"
    done = f"complete: round {seen.round} of {seen.rounds}, {seen.tokens / 1e6:.1f} M tokens{loss}{state}; "
    if seen.kept:
        return Text.assemble(done, "the coordinator keeps it")
    return Text.assemble(done, ("not kept yet: start a member again that took part to the end", "red"))


def _bad_if(bad: bool, text: str) -> Text:
    return Text(text, style="red" if bad else "")


def _table(columns: Sequence[str], lines: Sequence[dict[str, Text | str]], width: int, ruled: bool = False) -> Table:
    """Return a table in which only the phase is wrapped where the terminal is too narrow, with as many columns as a
    terminal of `width` shows whole."""
    least = {
        column: _PHASE_LEAST
        if column == "phase"
        else max(len(column), *(cell_len(str(cells[column])) for cells in lines), 0)
        for column in columns
    }
    columns = fitting(columns, least, width, _FIRST_TO_GO, 3 if ruled else 2)
    table = Table(box=HEAVY_HEAD if ruled else SIMPLE_HEAD, pad_edge=ruled, collapse_padding=not ruled)
    for column in columns:
        justify: Literal["left", "right"] = "left" if column in _LEFT else "right"
        table.add_column(column, justify=justify, no_wrap=column != "phase", overflow="fold")
    for cells in lines:
        table.add_row(*(Text(c) if isinstance(c, str) else c for c in (cells[column] for column in columns)))
    return table


def _stage_cells(stage: StageStatus, complete: bool = False) -> dict[str, Text | str]:
    """Return the text of each column for a stage. Of a `complete` run nothing is missing."""
    alive, served = stage.quorum_alive or complete, bool(stage.replicas) or complete
    phase = "complete" if complete and not stage.replicas else plain(stage.phase)
    replicas = str(stage.replicas) + (f" +{stage.arriving}" if stage.arriving else "")
    members = f"{stage.members} (quorum {stage.quorum})" if stage.members else "none"
    return {
        "stage": str(stage.stage),
        "blocks": f"{stage.first}-{stage.end - 1}",
        "round": _or_nothing(stage.round),
        "replicas": _bad_if(not served, replicas),
        "members": _bad_if(not alive, members),
        "batch/s": f"{stage.rate:.1f}",
        "queue": NOTHING if stage.queue is None else f"{stage.queue:.1f}",
        "phase": _bad_if(not served or not alive, phase),
    }


def _cells(seen: SwarmStatus, peer: MemberStatus) -> dict[str, Text | str]:
    """Return the text of each column for a peer."""
    at_stage = peer.stage >= 0
    return {
        "peer": plain(peer.name[:16]) + (" +" if _is_outside(seen, peer) else ""),
        "id": peer.peer[-6:],
        "stage": str(peer.stage) if at_stage else NOTHING,
        "round": _or_nothing(peer.round),
        "phase": plain(peer.phase),
        "batch/s": f"{peer.rate:.1f}" if at_stage else NOTHING,
        "queue": f"{peer.queue:.1f}" if at_stage else NOTHING,
        "steps/s": f"{peer.speed:.1f}" if peer.speed else "",
        "loss": number_text(peer.loss),
        "up / down": f"{size_text(peer.bytes_up)} / {size_text(peer.bytes_down)}",
        "state": peer.state_hash[:8],
        "seen": f"{peer.age_s:.0f} s",
    }


def _or_nothing(number: int | None) -> str:
    return NOTHING if number is None else str(number)


def _is_outside(seen: SwarmStatus, peer: MemberStatus) -> bool:
    return seen.method != "gossip" and not peer.in_head and peer.role in ("full", "stage")
