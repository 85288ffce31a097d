"""Options that several commands share, and the checks they do on what was typed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from peer.errors import ConfigError
from swarm.run.invite import Invite

Command = TypeVar("Command", bound=Callable[..., Any])
_INVITE_FILE_MAX = 1 << 16
_AMOUNT_MAX = 1_000_000  # of GB a petabyte


def default_home(name: str) -> Path:
    """Where a peer keeps its things unless --home says otherwise; $BARNRAISE_HOME replaces ~/.barnraise.
    ConfigError where that is nowhere."""
    place = os.environ.get("BARNRAISE_HOME", "~/.barnraise")
    try:
        return Path(place).expanduser() / name
    except RuntimeError as error:
        raise ConfigError(f"{place} is in nobody's home directory: set HOME, or give --home.") from error


def read_invite(text: str) -> Invite:
    """An invite as typed, or the path of a file that holds one. Raises ConfigError."""
    path = Path(text)
    try:
        if len(text) < 4096 and path.is_file() and path.stat().st_size <= _INVITE_FILE_MAX:
            text = path.read_text(errors="replace")
    except OSError:
        pass  # too long for a file name, or not ours to look at: then it is meant as an invite
    return Invite.parse(text)


def network_options(listen: str) -> Callable[[Command], Command]:
    """--listen (with this default), --announce, --relay: how others reach this machine."""
    options = (
        click.option(
            "--relay",
            "relays",
            multiple=True,
            metavar="MULTIADDR",
            help="A relay (`peer relay`) to be reachable through; may be given several times.",
        ),
        click.option(
            "--announce",
            multiple=True,
            metavar="MULTIADDR",
            help="Address to tell others instead of those listened on, e.g. /ip4/203.0.113.7/tcp/31337 behind a"
            " forwarded port; may be given several times.",
        ),
        click.option(
            "--listen",
            multiple=True,
            metavar="MULTIADDR",
            default=(listen,),
            show_default=True,
            help="Where to accept connections; port 0 picks a free one. May be given several times.",
        ),
    )

    def add(function: Command) -> Command:
        for option in options:
            function = option(function)
        return function

    return add


def tied_option(function: Command) -> Command:
    """--tied (hidden): leave when standard input ends; for parents such as `peer quickstart`."""
    return click.option("--tied", is_flag=True, hidden=True)(function)


class Amount(click.FloatRange):
    """So many MB/s or GB: above 0 and not infinite."""

    def __init__(self) -> None:
        super().__init__(0, _AMOUNT_MAX, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        amount = float(super().convert(value, param, ctx))
        if math.isnan(amount):  # which is neither below nor above any bound
            self.fail(f"{value} is no number.", param, ctx)
        return amount


def home_option(what: str) -> Callable[[Command], Command]:
    return click.option("--home", type=click.Path(path_type=Path, file_okay=False), help=what)
