"""`peer pause`: give this machine back to its owner, and lose nothing.

A peer that trains from the home stops between two steps and ends the process that computes; `peer resume` starts it
again.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import click

from cli.options import home_option
from cli.paused_home import paused_file
from cli.terminal.lines import say
from peer.errors import ConfigError

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@click.command()
@home_option("Home of the peer.  [default: ~/.barnraise/<run id>, if there is one]")
@click.option("--for", "lasts", metavar="TIME", help="End the pause after this time, such as 90m or 2h.")
def pause(home: Path | None, lasts: str | None) -> None:
    """Give this machine back to its owner: the peer's device is free within two seconds.

    It keeps its connections, its state and its place, and follows the run. One that is started again stays paused.
    """
    from swarm.run.home import Home
    from swarm.run.owners_pause import PauseRequest, write_request

    until = None if lasts is None else time.time() + _seconds(lasts)
    file, runs = paused_file(home)
    write_request(file, PauseRequest(until))
    what = "is paused" if runs else "does not run: it will be paused when it is started"
    end = (
        f"by `peer resume {Home(file.parent).option}`"
        if until is None
        else f"at {time.strftime('%H:%M on %Y-%m-%d', time.localtime(until))}"
    )
    say(f"The peer of {file.parent} {what}. The pause ends {end}.")


def _seconds(text: str) -> float:
    """Parse "90m". Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smhd])", text.strip())
    if found is None or not (seconds := float(found[1]) * _SECONDS[found[2]]):
        raise ConfigError(f"--for {text} is no time: give a number and s, m, h or d, such as 90m")
    return seconds
