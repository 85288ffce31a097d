"""Show what goes on, as a `Progress`: a redrawn table in a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import trio
from rich.console import RenderableType
from rich.text import Text

from cli.terminal.lines import say, say_json
from cli.terminal.screen import live, screen
from cli.views.table import live_view
from peer.plain_text import plain

POLL_S: Final = 0.25


class Shown(Protocol):
    """What events add up to: a `Progress`, or another that is drawn by a function of its own."""

    title: str
    say: Callable[[str], None] | None
    """Called with notes as plain lines where there is no terminal to redraw."""

    def apply(self, name: str, event: str, at: float, fields: Mapping[str, Any]) -> None:
        """Take in one event of the peer called `name`."""
        ...


Draw = Callable[[Any, int], RenderableType]
"""Draws what is shown for a terminal of so many columns."""


class EventSource(Protocol):
    """Where a view reads events: `EventFeed` for those of this process, `EventTail` for those of another."""

    def poll(self) -> Iterator[tuple[float, str, dict[str, Any]]]:
        """Yield (Unix time, name, fields) of each event since the last call."""


def read_tails(progress: Shown, tails: Mapping[str, EventSource], as_json: bool = False) -> None:
    """Apply the new events of each stream to `progress`; with `as_json` also print them to standard output."""
    for name, tail in tails.items():
        for at, event, fields in tail.poll():
            if as_json:
                say_json({"at": at, "event": event, **fields})
            progress.apply(name, event, at, fields)


@contextmanager
def shown(progress: Shown, as_json: bool = False, draw: Draw = live_view) -> Iterator[Callable[[], None]]:
    """Yield a function that redraws the view. Notes are plain lines where standard error is no terminal."""
    console = screen(err=True)
    if as_json:
        yield _nothing
    elif not console.is_terminal:
        progress.say = _line
        _line(progress.title)
        yield _nothing
    else:
        with live(_drawn(progress, console.width, draw), console) as display:
            yield lambda: display.update(_drawn(progress, console.width, draw), refresh=True)


async def follow(
    progress: Shown, tails: Mapping[str, EventSource], as_json: bool = False, draw: Draw = live_view
) -> None:
    """Read and redraw until cancelled, and once more at the end."""
    with shown(progress, as_json, draw) as redraw:
        try:
            while True:
                read_tails(progress, tails, as_json)
                redraw()
                await trio.sleep(POLL_S)
        finally:
            read_tails(progress, tails, as_json)
            redraw()


async def follow_to_the_end(show: Callable[[], Awaitable[None]], work: Awaitable[None]) -> None:
    """Do this work beside a view, which outlasts its cancellation: who leaves sees what is waited for."""
    view = trio.CancelScope(shield=True)

    async def shielded() -> None:
        with view:
            await show()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shielded)
        try:
            await work
        finally:
            view.cancel()


def _drawn(progress: Shown, width: int, draw: Draw) -> RenderableType:
    """Return the view, or a sentence in its place: a table that cannot be drawn must not end the peer."""
    try:
        return draw(progress, width)
    except Exception as error:  # noqa: BLE001  whatever the events held
        return Text(plain(f"the table cannot be drawn ({type(error).__name__}: {error})"))


def _line(text: str) -> None:
    say(text, err=True)


def _nothing() -> None:
    pass
