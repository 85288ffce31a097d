"""`peer resume`: end the pause of `peer pause`."""

from __future__ import annotations

from pathlib import Path

import click

from cli.options import home_option
from cli.paused_home import paused_file
from cli.terminal.lines import say


@click.command()
@home_option("Home of the peer.  [default: ~/.barnraise/<run id>, if there is one]")
def resume(home: Path | None) -> None:
    """End the pause of `peer pause`: the peer trains again. A condition of `peer join --pause-when` still holds."""
    file, runs = paused_file(home)
    was_paused = file.exists()
    file.unlink(missing_ok=True)
    if not was_paused:
        say(f"The peer of {file.parent} was not paused.")
    else:
        say(f"The peer of {file.parent} {'goes on' if runs else 'does not run: it will train when it is started'}.")
