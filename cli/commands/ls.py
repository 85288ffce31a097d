"""`peer ls`: list the runs and served models of this machine.

Commands take a name as INVITE.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from cli.known_homes import KnownHome, known_homes
from cli.terminal.lines import say, say_json
from cli.terminal.screen import table_screen
from peer.plain_text import plain

if TYPE_CHECKING:
    from rich.table import Table

_NAME_COLUMNS = 24


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each home.")
def ls(as_json: bool) -> None:
    """List the homes of this machine: whose run or served model each belongs to, and whether its peer is running.

    Every command takes a name, or a home, as INVITE.
    """
    homes = known_homes()
    if as_json:
        for home in homes:
            facts = {"role": home.role, "name": home.name, "run_id": home.run_id, "running": home.is_running}
            say_json({"home": str(home.path), **facts}, uncut=True)
        return
    if not homes:
        say("There is no home on this machine yet: `peer quickstart` trains a model, `peer join` takes part in a run.")
        return
    table_screen(80).print(_table(homes))
    for name, runs in _shared_names(homes).items():
        say(f"{runs} runs are called {name!r}: give the home in place of the name.")


def _table(homes: list[KnownHome]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in ("name", "role", "state", "run", "home"):
        table.add_column(column, no_wrap=column != "home", overflow="fold" if column == "home" else "ellipsis")
    for home in sorted(homes, key=lambda home: (not home.is_running, home.name, str(home.path))):
        name = plain(home.name, _NAME_COLUMNS) or "-"
        state = Text("running", style="green") if home.is_running else Text("stopped")
        table.add_row(name, home.role or "no run", state, home.run_id[:8] or "-", Text(plain(str(home.path), 1000)))
    return table


def _shared_names(homes: list[KnownHome]) -> dict[str, int]:
    """Return the names that several runs have, each with their number."""
    runs = Counter(name for name, _ in {(home.name, home.run_id) for home in homes if home.name})
    return {plain(name, _NAME_COLUMNS): count for name, count in runs.items() if count > 1}
