"""`peer monitor`: watch a run or a served model on a web page."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import trio

from cli.combinations import check_one_source
from cli.homes import default_home
from cli.options import home_option, invite_argument, read_invite, tied_option
from cli.packages import check_web_packages
from cli.run import run_until_stopped
from cli.terminal.lines import say, say_json
from peer.errors import ConfigError
from peer.plain_text import plain

if TYPE_CHECKING:
    from swarm.monitor.collector import MonitorCollector
    from swarm.monitor.history.memory import History
    from swarm.run.invite import Invite
    from swarm.status.head_chain import HeadChain
    from swarm.status.state import KeptHome, MonitorState
    from swarm.web.listening import ListenAddress

TOKEN_VARIABLE: Final = "PEER_MONITOR_TOKEN"
_TOKEN_BYTES: Final = 18


@click.command()
@invite_argument(required=False)
@home_option("Watch the run of the peer that has this home (it need not be running).")
@click.option(
    "--listen", metavar="HOST:PORT", default="127.0.0.1:8081", show_default=True, help="An IP address; port 0: any."
)
@click.option(
    "--token",
    envvar=TOKEN_VARIABLE,
    help="Required bearer token. Other users of this machine can read it here: better set"
    f" {TOKEN_VARIABLE}.  [default: none on loopback; beyond it a new one]",
)
@click.option(
    "--db",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file of the history.  [default: monitor.db in --home, else ~/.barnraise/monitor/RUN_ID.db]",
)
@click.option(
    "--publish",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Also write the page to DIR, as files that need no server, at most every 30 s.",
)
@click.option("--notify", metavar="URL", help="POST each change of the verdict, and alerts, there as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the address, and each new verdict, as JSON lines.")
@tied_option
def monitor(
    invite: str | None,
    home: Path | None,
    listen: str,
    token: str | None,
    db: Path | None,
    publish: Path | None,
    notify: str | None,
    as_json: bool,
    tied: bool,
) -> None:
    """Watch the run or served model of INVITE on a web page, until Ctrl-C.

    It joins nothing and has no vote. /api/v1/state has the same as JSON, /metrics for Prometheus. Without a token only
    this machine can look.
    """
    check_one_source("run", "invite", "home")
    if token is not None and not (token.strip() and token.isascii() and token.isprintable()):
        raise ConfigError(
            f"--token (or {TOKEN_VARIABLE}) is empty or has other letters than ASCII: leave it out to have one made"
        )
    check_web_packages("peer monitor", metrics=True)
    from swarm.run.invite import read_saved_invite
    from swarm.web.listening import ListenAddress
    from swarm.web.webhook import check_url

    if notify is not None:
        check_url(notify)
    address = ListenAddress.parse(listen)
    opened = read_invite(invite) if invite is not None else read_saved_invite(home or Path())
    if token is None:
        token = "" if address.is_loopback else secrets.token_urlsafe(_TOKEN_BYTES)
    if db is None:
        db = home / "monitor.db" if home is not None else default_home("monitor") / f"{opened.run_id}.db"
    work = _Monitor(opened, home, address, token.strip(), db, publish, notify, as_json)
    run_until_stopped(work.run, tied)


@dataclass
class _Monitor:
    """The monitor of one command."""

    invite: Invite
    home: Path | None
    address: ListenAddress
    token: str
    db: Path
    folder: Path | None
    """Of the published page."""
    notify: str | None
    as_json: bool
    _said: str = ""
    _trouble: str = ""

    async def run(self) -> None:
        from swarm.monitor.app import monitor_app
        from swarm.monitor.collector import MonitorCollector
        from swarm.monitor.history.memory import open_history
        from swarm.monitor.history.publish import publish
        from swarm.monitor.notices import MonitorNotices
        from swarm.web.listening import serve_http

        async with open_history(self.db, self.invite.run_id) as history, trio.open_nursery() as nursery:
            remember = partial(self._remember, history)
            collector = MonitorCollector(self.invite, self.home, remember=remember, read_home=self._read_home)
            app = monitor_app(collector, history, self.token, self.address.name)
            nursery.start_soon(collector.run)
            if self.folder is not None:
                nursery.start_soon(publish, self.folder, collector, history, self._say_once)
            if self.as_json:
                nursery.start_soon(_tell_verdicts, collector)
            if self.notify is not None:
                nursery.start_soon(MonitorNotices(self.notify, collector, self._not_told).run)
            await serve_http(app, self.address, self._listening)

    def _read_home(self) -> KeptHome | None:
        from cli.progress.kept_home import kept_home

        run_id = self.invite.run_id
        return kept_home(self.home or default_home(run_id[:12]), run_id, time.time())

    async def _remember(self, history: History, state: MonitorState, chains: Sequence[HeadChain]) -> None:
        """Write a reading to the history, and say once what keeps it from that."""
        await history.note(state, chains)
        if history.trouble != self._trouble:
            self._trouble = history.trouble
            say(f"History ({self.db}): {self._trouble or 'written again'}.", err=True)

    def _say_once(self, why: str) -> None:
        if why != self._said:
            self._said = why
            say(f"{why}.", err=True)

    def _not_told(self, event: str, reason: str) -> None:
        if self.as_json:
            say_json({"event": "notify_failed", "about": event, "reason": plain(reason, 200)})
        else:
            say(f"--notify did not receive {event}: {plain(reason, 200)}", err=True)

    def _listening(self, url: str) -> None:
        page = f"{url}/?token={self.token}" if self.token else f"{url}/"
        if self.as_json:
            say_json({"event": "listening", "url": url, "page": page})
            return
        say(f"Monitor: {page}", f"Metrics: {url}/metrics", err=True)
        if not self.address.is_loopback:
            say("The token and the page cross this network unencrypted: put a proxy with TLS before it.", err=True)


async def _tell_verdicts(collector: MonitorCollector) -> None:
    """Print each verdict that differs from the one before in level or word."""
    told = ("", "")
    while True:
        state = await collector.changed()
        verdict = state.verdict
        if (verdict.level, verdict.word) != told:
            told = (verdict.level, verdict.word)
            words = {"word": verdict.word, "reason": verdict.reason, "remedy": verdict.remedy}
            say_json({"event": "verdict", "at": state.at, "level": verdict.level, **words})
