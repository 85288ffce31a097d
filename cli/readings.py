"""Readings of a run or a served model, as `peer top` and `peer status` print and follow them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio
from rich.text import Text

from cli.homes import default_home
from cli.options import read_invite
from cli.run import end_unless_watched
from cli.terminal.lines import say_json
from cli.terminal.screen import live, screen, table_screen
from cli.views.kept_home import kept_lines
from cli.views.monitor_view import monitor_view
from peer.errors import NetworkError

if TYPE_CHECKING:
    from swarm.monitor.collector import MonitorCollector
    from swarm.status.state import KeptHome, MonitorState

_PIPE_COLUMNS: Final = 160


def collector_of(invite: str | None, home: Path | None) -> MonitorCollector:
    """Return a collector for whom alone sees what it shows. Raises ConfigError for an invite or home that is none."""
    from cli.progress.kept_home import kept_home
    from swarm.monitor.collector import MonitorCollector
    from swarm.run.invite import read_saved_invite

    opened = read_invite(invite) if invite is not None else read_saved_invite(home or Path())

    def read_home() -> KeptHome | None:
        return kept_home(home or default_home(opened.run_id[:12]), opened.run_id, time.time())

    return MonitorCollector(opened, home, names_invites=True, read_home=read_home)


async def read_once(collector: MonitorCollector, as_json: bool) -> MonitorState:
    """Return one reading. Raises what keeps the run from being reached; prints before what the home keeps of it."""
    try:
        return await collector.once()
    except NetworkError:
        print_kept(collector.state, as_json)
        raise


async def follow(collector: MonitorCollector, as_json: bool, guests: bool = False) -> None:
    """Show each new state until cancelled."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collector.run)
        console = screen()
        if as_json or not console.is_terminal:
            while True:
                print_state(await collector.changed(), as_json, guests)
                end_unless_watched()
        view = monitor_view(collector.state, console.width, console.height - 1, guests)
        with live(view, console) as display:
            while True:
                state = await collector.changed()
                display.update(monitor_view(state, console.width, console.height - 1, guests), refresh=True)
                end_unless_watched()


def print_state(state: MonitorState, as_json: bool, guests: bool = False) -> None:
    """Print one reading: whole lines in a pipe, and folded ones in a terminal."""
    if as_json:
        say_json(msgspec.to_builtins(state))
        return
    console = screen()
    width = console.width if console.is_terminal else _PIPE_COLUMNS
    console.print(monitor_view(state, width, guests=guests), soft_wrap=not console.is_terminal)


def print_kept(state: MonitorState, as_json: bool) -> None:
    """Print what the home keeps of a run whose peers do not answer; nothing where it keeps nothing."""
    if state.home is None:
        return
    if as_json:
        say_json({"run_id": state.run_id, "home": msgspec.to_builtins(state.home)}, uncut=True)
        return
    console = table_screen()
    for line in kept_lines(state.home, state.home.at):
        console.print(Text(line))
