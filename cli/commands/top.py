"""`peer top`: watch a run or a served model in the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import trio

from cli.combinations import check_one_source
from cli.homes import default_home
from cli.options import home_option, invite_argument, read_invite
from cli.run import end_unless_watched, run_until_stopped
from cli.terminal.lines import say_json
from cli.terminal.screen import live, screen
from cli.views.monitor_view import monitor_view

if TYPE_CHECKING:
    from swarm.monitor.collector import MonitorCollector
    from swarm.monitor.state import KeptHome, MonitorState

_LINES_ONCE = 10_000  # what is printed once may be as long as it is


@click.command()
@invite_argument(required=False)
@home_option("Watch the run of the peer that has this home (it need not be running).")
@click.option("--once", is_flag=True, help="Print one reading and end.")
@click.option("--json", "as_json", is_flag=True, help="Print each reading as one JSON object a line.")
def top(invite: str | None, home: Path | None, once: bool, as_json: bool) -> None:
    """Watch the run or served model of INVITE in the terminal, until Ctrl-C.

    It shows what `peer monitor` shows, in 80 columns. Where the output is no terminal it prints one reading.
    """
    check_one_source("run", "invite", "home")
    from swarm.monitor.collector import MonitorCollector, MonitorTarget
    from swarm.run.invite import read_saved_invite

    opened = read_invite(invite) if invite is not None else read_saved_invite(home or Path())
    from cli.progress.kept_home import kept_home

    def read_home() -> KeptHome | None:
        return kept_home(home or default_home(opened.run_id[:12]), opened.run_id, time.time())

    collector = MonitorCollector(MonitorTarget(opened, home), read_home=read_home)
    if once or not (as_json or screen().is_terminal):
        _print(run_until_stopped(collector.once), as_json)
    else:
        run_until_stopped(lambda: _follow(collector, as_json))


def _print(state: MonitorState, as_json: bool) -> None:
    if as_json:
        say_json(msgspec.to_builtins(state))
        return
    console = screen()
    console.print(monitor_view(state, console.width, _LINES_ONCE))


async def _follow(collector: MonitorCollector, as_json: bool) -> None:
    """Show each new state until cancelled."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collector.run)
        if as_json:
            while True:
                _print(await collector.changed(), as_json=True)
                end_unless_watched()
        console = screen()
        with live(monitor_view(collector.state, console.width, console.height - 1), console) as display:
            while True:
                state = await collector.changed()
                display.update(monitor_view(state, console.width, console.height - 1), refresh=True)
                end_unless_watched()
