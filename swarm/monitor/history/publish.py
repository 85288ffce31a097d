"""A page that needs no server: the monitor's own, with what it shows as a script beside it, in a folder that any web
host can serve and a browser can open as a file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import trio

from peer.errors import ConfigError, ResourceError
from peer.files import read_bounded, set_usual_mode, write_atomically
from swarm.monitor.collector import MonitorCollector
from swarm.monitor.history.memory import SPANS, History, HistoryView
from swarm.status.state import MonitorState

EVERY_S: Final = 30.0
"""The least time between two writes of the page."""
LAST_S: Final = 5.0
_PAGE: Final = Path(__file__).parents[1] / "page"
_INDEX_MAX: Final = 1 << 20
_INDEX: Final = "index.html"
_MARK: Final = b"data-published"
_POLICY: Final = (
    b"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'self'; base-uri 'none'; form-action 'none'\">"
)


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """What a published page shows: the content of `data.json`."""

    at: float
    state: MonitorState
    views: dict[str, HistoryView]
    """By span; the rounds are those of stage 0."""


class Site:
    """The published page in one folder. Its methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self) -> None:
        """Write all but the data. Raises ConfigError for a folder that holds anything but such a page, and
        ResourceError."""
        self._check_own()
        page = (_PAGE / _INDEX).read_bytes()
        page = page.replace(b'<html lang="en">', b'<html lang="en" %s>' % _MARK)
        page = page.replace(b'<meta charset="utf-8">', b'<meta charset="utf-8">\n' + _POLICY)
        self._write(_INDEX, page)  # first: it marks the folder as ours, also if this ends here
        for path in sorted(_PAGE.iterdir()):
            if path.name != _INDEX:
                self._write(path.name, path.read_bytes())

    def _check_own(self) -> None:
        try:
            if not os.listdir(self._folder) or _MARK in read_bounded(self._folder / _INDEX, _INDEX_MAX):
                return
        except (FileNotFoundError, NotADirectoryError):
            if not os.path.isdir(self._folder):  # what writes there makes the folder, or tells why it cannot
                return
        except OSError as error:
            raise ConfigError(f"{self._folder} cannot be read ({error.strerror}): name another --publish") from error
        raise ConfigError(f"{self._folder} holds other files than such a page: name an empty folder with --publish")

    def write(self, published: Published) -> None:
        """Replace the data: as a script for the page, which may fetch nothing from a file, and as JSON for programs.
        Raises ResourceError."""
        content = msgspec.json.encode(published)
        self._write("data.js", b"barnraisePublished(" + content + b");\n")
        self._write("data.json", content)

    def _write(self, name: str, content: bytes) -> None:
        path = self._folder / name
        try:
            write_atomically(path, content)
            set_usual_mode(path)  # so that a web server of another user can read it
        except (ResourceError, OSError) as error:
            why = error if isinstance(error, OSError) else error.__cause__
            reason = why.strerror if isinstance(why, OSError) else str(why)
            raise ResourceError(
                f"the page in {self._folder} cannot be written ({reason}): free some space, or name another folder with"
                " --publish"
            ) from error


async def publish(folder: Path, collector: MonitorCollector, history: History, failed: Callable[[str], None]) -> None:
    """Write the page, and again after each new state, at most once in `EVERY_S` and a last time when cancelled.

    Raises ConfigError or ResourceError if it cannot begin; later it reports errors to `failed`, and tries again.
    """
    site, before = Site(folder), collector.state
    await trio.to_thread.run_sync(site.begin)
    shown: MonitorState | None = None

    async def write() -> None:
        nonlocal shown
        state = collector.state
        views = {span: await history.view(span, fresh=True) for span in SPANS}
        published = Published(at=time.time(), state=state, views={str(span): view for span, view in views.items()})
        try:
            await trio.to_thread.run_sync(site.write, published)
            shown = state
        except ResourceError as error:
            failed(str(error))

    if collector.state is before:
        await collector.changed()  # what was published before stays until something is known
    try:
        while True:
            await write()
            await trio.sleep(EVERY_S)
            if collector.state is shown:
                await collector.changed()
    finally:
        with trio.move_on_after(LAST_S) as last:
            last.shield = True
            if collector.state is not shown:
                await write()
