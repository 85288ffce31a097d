"""`peer top`: watch a run or a served model in the terminal."""

from __future__ import annotations

from pathlib import Path

import click

from cli.combinations import check_one_source
from cli.options import home_option, invite_argument
from cli.readings import collector_of, follow, print_state, read_once
from cli.run import run_until_stopped
from cli.terminal.screen import screen


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
    collector = collector_of(invite, home)
    if once or not (as_json or screen().is_terminal):
        print_state(run_until_stopped(lambda: read_once(collector, as_json)), as_json)
    else:
        run_until_stopped(lambda: follow(collector, as_json))
