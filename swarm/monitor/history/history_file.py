"""The file of a monitor's history: SQLite with one writer. All of it blocks; `memory` calls it in a thread.

It holds samples of the whole, one in `FINE_S` for two days and one a minute for thirty; the commits, permanently; and
the losses that were claimed for these. Nothing in it grows with the number of peers.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from peer.errors import ConfigError
from swarm.status.state import LossPoint

VERSION: Final = 1
_APPLICATION: Final = 0x42524D48
FINE_S: Final = 10
MINUTE_S: Final = 60
FINE_KEPT_S: Final = 2 * 86400
MINUTES_KEPT_S: Final = 30 * 86400
GAP_S: Final = 60
"""Samples further apart are not joined: the monitor did not look."""

VALUES: Final = ("peers", "members", "answering", "up", "down", "loss", "sessions", "unserved")
"""Of a sample, which is of the whole at one time: the peers that publish a record; the members of the proved heads, and
those that answer; bytes a second of all peers and the median of their losses, as they claim; sessions and blocks
without a server of a served model. What does not apply is None."""
HEAD: Final = (
    "stage", "term", "boot", "round", "starts", "hash", "at", "seconds", "tokens", "members", "merged", "absent",
    "discarded",
)  # fmt: skip
"""Of one commit of a stage's group. `starts`: it begins a term, without a round; `at`: when it came, if the monitor
looked then; `seconds`: how long its round took, if the monitor saw it begin and end; `tokens`: of its round, None where
the head before is not known."""
_LOSS: Final = ("round", "train", "peers", "held_out")

_TABLES: Final = (
    "CREATE TABLE run (id TEXT NOT NULL)",
    "CREATE TABLE sample (step INTEGER, at INTEGER, peers REAL, members REAL, answering REAL, up REAL, down REAL,"
    " loss REAL, sessions REAL, unserved REAL, PRIMARY KEY (step, at)) WITHOUT ROWID",
    "CREATE TABLE head (stage INTEGER, term INTEGER, boot INTEGER, round INTEGER, starts INTEGER, hash BLOB, at REAL,"
    " seconds REAL, tokens INTEGER, members INTEGER, merged INTEGER, absent INTEGER, discarded INTEGER,"
    " PRIMARY KEY (stage, round, term, boot, starts)) WITHOUT ROWID",
    "CREATE TABLE loss (round INTEGER PRIMARY KEY, train REAL, peers INTEGER, held_out REAL)",
)

Values = Mapping[str, float | bytes | None]
Rows = list[tuple[float | None, ...]]


class HistoryFile:
    """The open file. What fails in it raises sqlite3.Error or OSError."""

    def __init__(self, path: Path, run_id: str) -> None:
        self._path, self._run_id = path, run_id
        self._lock: int | None = None
        self._database: sqlite3.Connection | None = None
        self._pruned_at = 0.0

    def open(self) -> None:
        """Open the file, or make it. Raises ConfigError for a file that is another's; it stays as it is."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(f"{self._path}-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another monitor writes its history to {self._path}: name another file with --db"
            ) from None
        self._database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        if not self._is_known():
            with self._transaction():
                for table in _TABLES:
                    self._ask(table)
                self._ask("INSERT INTO run VALUES (?)", self._run_id)
                self._ask(f"PRAGMA application_id = {_APPLICATION}")
                self._ask(f"PRAGMA user_version = {VERSION}")
        self._ask("PRAGMA journal_mode = WAL")
        self._ask("PRAGMA wal_autocheckpoint = 100")  # pages: what waits beside the file stays small
        self._ask("PRAGMA synchronous = NORMAL")  # a power cut may take the last samples, and leaves a whole file

    def close(self) -> None:
        """Close the file, and let another monitor have it."""
        try:
            if self._database is not None:
                self._database.close()
        finally:
            if self._lock is not None:
                os.close(self._lock)
            self._database = self._lock = None

    def write(self, at: float, sample: Values, heads: Sequence[Values], losses: Sequence[LossPoint]) -> None:
        """Add what one reading at that Unix time brought, all of it or nothing: `VALUES`, and a `HEAD` a commit."""
        with self._transaction():
            self._add_sample(at, sample)
            for head in heads:
                if head["starts"]:  # of the terms before, later rounds were undone
                    earlier = "(term, boot) < (?, ?)"
                    undone = f"DELETE FROM head WHERE stage = ? AND round > ? AND {earlier}"
                    self._ask(undone, *(head[name] for name in ("stage", "round", "term", "boot")))
                self._ask(f"INSERT OR IGNORE INTO head VALUES ({_marks(HEAD)})", *(head[name] for name in HEAD))
            for loss in losses:
                self._ask(
                    f"INSERT INTO loss VALUES ({_marks(_LOSS)}) ON CONFLICT (round) DO UPDATE SET"
                    " train = iif(excluded.peers >= peers, excluded.train, train), peers = max(peers, excluded.peers),"
                    " held_out = coalesce(excluded.held_out, held_out)",
                    *(getattr(loss, name) for name in _LOSS),
                )
            if abs(at - self._pruned_at) >= MINUTE_S:
                for step, kept_s in ((FINE_S, FINE_KEPT_S), (MINUTE_S, MINUTES_KEPT_S)):
                    self._ask("DELETE FROM sample WHERE step = ? AND at < ?", step, at - kept_s)
                self._pruned_at = at

    def samples(self, since: float, until: float, points: int) -> Rows:
        """Return some `points` samples, each the mean of a bucket, and a row of None where the monitor did not look."""
        step = FINE_S if until - since <= FINE_KEPT_S else MINUTE_S
        bucket = step * max(1, -int(-(until - since) // (points * step)))
        means = ", ".join(f"avg({name})" for name in VALUES)
        found = self._ask(
            f"SELECT at / ? * ? AS slot, {means} FROM sample WHERE step = ? AND at > ? AND at <= ? GROUP BY slot",
            bucket, bucket, step, since, until,
        )  # fmt: skip
        return with_gaps(found, max(GAP_S, bucket))

    def oldest(self) -> float | None:
        """Return when the first sample that is kept was taken."""
        at: float | None
        [(at,)] = self._ask("SELECT min(at) FROM sample")
        return at

    def rounds(self, stage: int, since: float | None, points: int) -> Rows:
        """Return round, time, seconds, tokens a second, contributions merged and missed of the rounds that came since
        then (None: of all), each row the mean of rounds in a row, and a row of None where rounds are not known."""
        first = self._first_round(stage, since)
        [(last,)] = self._ask("SELECT max(round) FROM head WHERE stage = ? AND NOT starts", stage)
        if first is None or last is None:
            return []
        bucket = _bucket(first, last, points)
        found = self._ask(
            "SELECT max(round), max(at), avg(seconds),"
            " sum(iif(seconds, tokens, NULL)) / sum(iif(tokens, seconds, NULL)), avg(merged), avg(absent)"
            " FROM head WHERE stage = ? AND NOT starts AND round >= ?"
            " GROUP BY (round - ?) / ?",
            stage, first, first, bucket,
        )  # fmt: skip
        return with_gaps(found, bucket)

    def losses(self, since: float | None, points: int) -> Rows:
        """Return round, training loss and held-out loss, in the same way."""
        [(last,)] = self._ask("SELECT max(round) FROM loss")
        first = self._first_round(0, since)
        if last is None:
            return []
        first = min(last, first if first is not None and since is not None else 0)
        bucket = _bucket(first, last, points)
        columns = "max(round), avg(train), avg(held_out)"
        found = self._ask(f"SELECT {columns} FROM loss WHERE round >= ? GROUP BY (round - ?) / ?", first, first, bucket)
        return with_gaps(found, bucket)

    def _first_round(self, stage: int, since: float | None) -> int | None:
        """Return the first round that came since then; if none did, the last one."""
        first: int | None
        where = "stage = ? AND NOT starts" + ("" if since is None else " AND at >= ?")
        [(first,)] = self._ask(
            f"SELECT min(round) FROM head WHERE {where}", stage, *(() if since is None else (since,))
        )
        if first is None:
            [(first,)] = self._ask("SELECT max(round) FROM head WHERE stage = ? AND NOT starts", stage)
        return first

    def _add_sample(self, at: float, sample: Values) -> None:
        fine_at, minute_at = (int(at // step) * step for step in (FINE_S, MINUTE_S))
        marks = _marks(("step", "at", *VALUES))
        self._ask(f"INSERT OR REPLACE INTO sample VALUES ({marks})", FINE_S, fine_at, *(sample[v] for v in VALUES))
        means = ", ".join(f"avg({name})" for name in VALUES)
        self._ask(
            f"INSERT OR REPLACE INTO sample SELECT ?, ?, {means} FROM sample WHERE step = ? AND at BETWEEN ? AND ?",
            MINUTE_S, minute_at, FINE_S, minute_at, minute_at + MINUTE_S - 1,
        )  # fmt: skip

    def _is_known(self) -> bool:
        """Return whether the file has this run's history; False for an empty one. Raises ConfigError for any other."""
        [(application,)], [(version,)] = self._ask("PRAGMA application_id"), self._ask("PRAGMA user_version")
        [(tables,)] = self._ask("SELECT count(*) FROM sqlite_master")
        if not (application or version or tables):
            return False
        if application != _APPLICATION:
            raise ConfigError(
                f"{self._path} holds something else than a monitor's history: name another file with --db"
            )
        if version > VERSION:
            raise ConfigError(
                f"{self._path} is a history of version {version}, and this program knows up to {VERSION}: update it, or"
                " name another file with --db"
            )
        [(run_id,)] = self._ask("SELECT id FROM run")
        if run_id != self._run_id:
            raise ConfigError(f"{self._path} holds the history of {run_id!r}: name another file with --db")
        return True

    def _ask(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        assert self._database is not None, "the file is not open"
        return self._database.execute(statement, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Begin, inside the block, as the only writer, so that nothing ever has to be tried again."""
        self._ask("BEGIN IMMEDIATE")
        try:
            yield
            self._ask("COMMIT")
        finally:
            assert self._database is not None, "the file is not open"
            if self._database.in_transaction:  # it failed; a full disk may have ended it
                self._ask("ROLLBACK")


def with_gaps(rows: Sequence[tuple[Any, ...]], apart: float) -> Rows:
    """Return the rows with one of None between those whose first columns are further apart than that."""
    found: Rows = []
    for row in rows:
        if found and row[0] - (before := found[-1][0] or 0) > apart:
            found.append((before + apart, *[None] * (len(row) - 1)))
        found.append(row)
    return found


def _bucket(first: int, last: int, points: int) -> int:
    return max(1, -((first - last - 1) // points))


def _marks(names: Sequence[str]) -> str:
    return ", ".join("?" * len(names))
