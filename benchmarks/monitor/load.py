"""What a monitor costs: processor time and bytes of history for a run of many peers, and with records of strangers.

    python benchmarks/monitor/load.py [--peers 50] [--minutes 60] [--strangers 10000] [--json [FILE]]

Records, heads and events are made, not read: a reading each 5 s, a round each 20 s, and of each peer five events a
round. From them the monitor's own code makes the state, its alerts, the history, the page's stream and published files,
and `/metrics`, each as often as it does beside a run. Not in it: connections, and the proof of signatures, which is
done once for a record and a head.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results
from peer.catalogue.machine import CheckpointSaved
from peer.catalogue.reading import Heard
from peer.catalogue.rounds import AttemptBegun, PhaseEntered, RoundPlanned, RoundTrained
from swarm.membership.member_record import MemberRecord
from swarm.monitor.app import encoded
from swarm.monitor.collector import EVERY_S
from swarm.monitor.history.memory import SPANS, History, open_history
from swarm.monitor.history.publish import EVERY_S as PUBLISHED_S
from swarm.monitor.history.publish import Published, Site
from swarm.monitor.member_events import KEPT_MAX
from swarm.monitor.metrics import metrics_text
from swarm.monitor.told_counts import ToldCounts
from swarm.status.alerts import Alerts
from swarm.status.help_wanted import help_wanted
from swarm.status.reading import RunReading
from swarm.status.record_history import RecordHistory
from swarm.status.run_state import run_state
from swarm.status.state import MonitorState
from tests.swarm.status.scenes import NOW, WATCH, chain_of, finite, heads_of, peer, proven

ROUND_S, SCRAPE_S = 20.0, 15.0
PARTS = ("records", "state", "history", "stream", "metrics", "publish")


class Load:
    """A monitor without its connections, and what each part of it has cost."""

    def __init__(self, peers: int, strangers: int, rounds: int, history: History, site: Site) -> None:
        self.names = [f"12D3KooW{place:044d}" for place in range(peers)]
        self._strangers = [f"12D3KooX{place:044d}" for place in range(strangers)]
        self._history, self._site = history, site
        self._manifest = finite(rounds=0)
        first, begun, *self._heads = heads_of(self._manifest, self.names, rounds)
        self._chain = chain_of([first, begun])
        self._told: dict[str, list[Heard]] = {name: [] for name in self.names}
        self._records, self._alerts, self._counts = RecordHistory(), Alerts(), ToldCounts(NOW)
        self.cpu_s = dict.fromkeys(PARTS, 0.0)
        self.sizes: dict[str, int] = {}
        self.members_shown = 0

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        before = time.process_time()
        yield
        self.cpu_s[part] += time.process_time() - before

    async def read(self, number: int) -> None:
        """Do what follows on a reading."""
        at = NOW + EVERY_S * number
        if at % ROUND_S < EVERY_S:
            self._commit(at)
        records = self._records_at(at)
        with self._timed("records"):
            self._records.note(records)
            self._records.note_losses(records, self._chain.last.round if self._chain.last else 0)
        with self._timed("state"):
            state = self._state(records, at)
        with self._timed("history"):
            await self._history.note(state, [self._chain])
        with self._timed("stream"):
            self.sizes["state"] = len(encoded(state))
        if at % SCRAPE_S < EVERY_S:
            with self._timed("metrics"):
                self.sizes["metrics"] = len(metrics_text(state, [self._chain], self._counts))
        if at % PUBLISHED_S < EVERY_S:
            with self._timed("publish"):
                views = {str(span): await self._history.view(span) for span in SPANS}
                self._site.write(Published(at=at, state=state, views=views))
        self.members_shown = len(state.members)

    def _commit(self, at: float) -> None:
        self._chain.advance(self._heads.pop(0), [], at)
        number = self._chain.heads[-1].round
        for name in self.names:
            events = (
                RoundPlanned(round=number, members=9),
                AttemptBegun(round=number, attempt=0),
                PhaseEntered(round=number, phase="compute"),
                RoundTrained(round=number, steps=50, loss=2.0),
                CheckpointSaved(round=number),
            )
            told = [Heard(at, event) for event in events]
            self._told[name] = [*self._told[name], *told][-KEPT_MAX:]
            for event in told:
                self._counts.take(name, event)

    def _records_at(self, at: float) -> dict[str, MemberRecord]:
        head = self._chain.heads[-1]
        sent = int(1e5 * (at - NOW))
        return {
            name: peer(
                name=f"peer {place}", at=at - 1, round=head.round, loss=2.0, bytes_up=sent, bytes_down=sent,
            )
            for place, name in enumerate([*self.names, *self._strangers])
        }  # fmt: skip

    def _state(self, records: dict[str, MemberRecord], at: float) -> MonitorState:
        head = self._chain.last
        assert head is not None
        best = (proven(head, self.names),)
        reading = RunReading(self._manifest, at, records, best)
        state = run_state(reading, [self._chain], self._told, {}, self._records, WATCH)
        return self._alerts.on(msgspec.structs.replace(state, help_wanted=help_wanted(state)), at)


async def measure(peers: int, strangers: int, readings: int) -> dict[str, Any]:
    """Return the figures of a monitor that looks so often."""
    rounds = math.ceil(readings * EVERY_S / ROUND_S) + 1
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "monitor.db"
        async with open_history(database, "r" * 32) as history:
            site = Site(Path(folder) / "page")
            site.begin()
            load = Load(peers, strangers, rounds, history, site)
            for number in range(readings):
                await load.read(number)
        size = database.stat().st_size
        published = bytes_in(Path(folder) / "page")
    hours = readings * EVERY_S / 3600
    return {
        "peers": peers,
        "strangers": strangers,
        "hours": hours,
        "cpu_s": load.cpu_s,
        "cpu_share": sum(load.cpu_s.values()) / (3600 * hours),
        "history_bytes_a_day": size * 24 / hours,
        "state_bytes": load.sizes["state"],
        "metrics_bytes": load.sizes["metrics"],
        "published_bytes": published,
        "members_shown": load.members_shown,
    }


def bytes_in(folder: Path) -> int:
    """Return the size of a folder's files."""
    return sum(file.stat().st_size for file in folder.iterdir())


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures, one column a setting."""
    lines = [("peers + strangers", [f"{row['peers']} + {row['strangers']:,}" for row in rows])]
    for part in PARTS:
        lines.append((f"{part}, CPU ms a reading", [f"{a_reading(row, part):.2f}" for row in rows]))
    lines.append(("one core, %", [f"{100 * row['cpu_share']:.2f}" for row in rows]))
    lines.append(("history, MB a day", [f"{row['history_bytes_a_day'] / 1e6:.2f}" for row in rows]))
    for name in ("state", "metrics", "published"):
        lines.append((f"{name}, kB", [f"{row[f'{name}_bytes'] / 1e3:.0f}" for row in rows]))
    lines.append(("members shown", [str(row["members_shown"]) for row in rows]))
    return "\n".join(f"{label:28}" + "".join(f"{cell:>16}" for cell in cells) for label, cells in lines)


def a_reading(row: dict[str, Any], part: str) -> float:
    """Return the CPU milliseconds of a part, spread over all readings."""
    return 1000 * float(row["cpu_s"][part]) / (float(row["hours"]) * 3600 / EVERY_S)


def main() -> None:
    """Measure with and without strangers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=60, help="80 at most: the heads are of 254 rounds")
    parser.add_argument("--strangers", type=int, default=10_000)
    add_json(parser, "monitor/load")
    options = parser.parse_args()
    readings = max(12, round(options.minutes * 60 / EVERY_S))
    rows = [trio.run(measure, options.peers, strangers, readings) for strangers in (0, options.strangers)]
    print(table(rows))
    if options.json:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
