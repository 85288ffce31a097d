"""`peer status`: print what `peer top` shows of a run or a served model, once."""

from __future__ import annotations

from pathlib import Path

import click

from cli.combinations import check_one_source, refuse_beside
from cli.homes import default_home
from cli.options import home_option, invite_argument, read_invite
from cli.readings import collector_of, follow, print_state, read_once
from cli.run import run_until_stopped
from cli.terminal.lines import say
from cli.terminal.screen import screen
from peer.errors import ConfigError


@click.command()
@invite_argument(required=False)
@home_option("Show the run of the peer that has this home (it need not be running).")
@click.option("--guests", is_flag=True, help="Show as well who came by which invite of a closed run.")
@click.option("--watch", is_flag=True, help="Show it again every few seconds, until Ctrl-C.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Only draw the loss by round, from the events in this machine's home of the run: .png, .svg or .pdf.",
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
    collector = collector_of(invite, home)

    async def show() -> None:
        seen = await read_once(collector, as_json)
        if as_json or not (watch and screen().is_terminal):
            print_state(seen, as_json, guests)
        if watch:
            await follow(collector, as_json, guests)

    run_until_stopped(show)


def _plot(home: Path, file: Path) -> None:
    from cli.progress.losses import losses_in
    from cli.views.loss_picture import draw_home

    losses = losses_in(home)
    if not losses:
        raise ConfigError(f"the events in {home} have no loss: give the --home of a peer or coordinator of the run")
    draw_home(losses, file)
    say(f"Drew the loss to {file}.")
