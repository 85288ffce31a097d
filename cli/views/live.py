"""Show a `Progress` while work goes on: a redrawn table in a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import click
import msgspec
import trio
from rich.live import Live

from cli.views.event_tail import EventTail
from cli.views.progress import Progress
from cli.views.table import console, live_view

POLL_S: Final = 0.25


def read_tails(progress: Progress, tails: Mapping[str, EventTail], as_json: bool = False) -> None:
    """Apply the new events of each stream to `progress`; with `as_json` also print them to standard output."""
    for name, tail in tails.items():
        for at, event, fields in tail.poll():
            if as_json:
                click.echo(msgspec.json.encode({"at": at, "event": event, **fields}).decode())
            progress.apply(name, event, at, fields)


@contextmanager
def shown(progress: Progress, as_json: bool = False) -> Iterator[Callable[[], None]]:
    """Yield a function that redraws the table. Notes are plain lines where standard error is no terminal."""
    screen = console()
    if as_json:
        yield _nothing
    elif not screen.is_terminal:
        progress.say = _line
        _line(progress.title)
        yield _nothing
    else:
        with Live(live_view(progress), console=screen, auto_refresh=False) as live:
            yield lambda: live.update(live_view(progress), refresh=True)


async def follow(progress: Progress, tails: Mapping[str, EventTail], as_json: bool = False) -> None:
    """Read and redraw until cancelled, and once more at the end."""
    with shown(progress, as_json) as redraw:
        try:
            while True:
                read_tails(progress, tails, as_json)
                redraw()
                await trio.sleep(POLL_S)
        finally:
            read_tails(progress, tails, as_json)
            redraw()


def _line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _nothing() -> None:
    pass


def event_line(event: str, **fields: Any) -> str:
    """Return one JSON line in the format of the event stream."""
    return msgspec.json.encode({"event": event, **fields}).decode()
