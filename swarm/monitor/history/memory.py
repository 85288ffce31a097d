"""What a monitor remembers: samples of the whole, the commits and their losses, kept in a file of its own and read back
for the charts. The monitor goes on where the file fails, and says so in a sentence."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Final, Literal, TypeVar, get_args

import msgspec
import trio

from swarm.monitor.history.history_file import VALUES, HistoryFile, Rows, Values
from swarm.status.head_chain import HeadChain, absent_from, took_part
from swarm.status.state import LossPoint, MonitorState

Period = Literal["hour", "day", "all"]
SPANS: Final[tuple[Period, ...]] = get_args(Period)
_SPAN_S: Final = {"hour": 3600.0, "day": 86400.0}
POINTS_MAX: Final = 360
"""Of one column, but for the marks of gaps."""

VIEW_S: Final = 10.0
"""So long a view is shown again."""

Column = list[float | None]
Found = TypeVar("Found")


class HistoryView(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a span, as columns. None in all columns but the first marks a gap."""

    span: Period
    since: float
    until: float
    samples: dict[str, Column] = {}
    rounds: dict[str, Column] = {}
    losses: dict[str, Column] = {}
    trouble: str = ""
    """Why nothing is remembered now; empty where it is."""


class History:
    """The history of one run or served model."""

    def __init__(self, path: Path, run_id: str, clock: Callable[[], float] = time.time) -> None:
        self._file, self._clock = HistoryFile(path, run_id), clock
        self._turn = trio.CapacityLimiter(1)  # SQLite waits for its writer, and has one connection
        self._written: dict[int, set[bytes]] = {}
        self._losses: dict[int, LossPoint] = {}
        self._views: dict[tuple[Period, int], HistoryView] = {}
        self._usable = False
        self.trouble = ""
        """Why nothing is remembered now; empty where it is."""

    async def open(self) -> None:
        """Open the file. Raises ConfigError for one that is another's; one that cannot be used is a trouble."""
        self._usable = await self._tried(self._file.open) is not None

    async def close(self) -> None:
        """Close the file."""
        with trio.CancelScope(shield=True):  # short: it writes back what waits
            await self._tried(self._file.close)
        self._usable = False

    async def note(self, state: MonitorState, chains: Sequence[HeadChain]) -> None:
        """Add a reading. One that was not made leaves a gap."""
        if not self._usable or state.kind == "unknown" or state.monitor.failure:
            return
        heads, hashes = list[Values](), dict[int, set[bytes]]()
        for stage, chain in enumerate(chains):
            found = new_rows(stage, chain, self._written.get(stage, set()))
            heads += found.values()
            hashes[stage] = {*found}
        losses = {row.round: row for row in _losses_of(state)}
        changed = [row for number, row in losses.items() if self._losses.get(number) != row]
        if await self._tried(lambda: self._file.write(state.at, sample_of(state), heads, changed)) is None:
            return
        self.trouble, self._losses = "", losses
        for stage, chain in enumerate(chains):
            self._written[stage] = (self._written.get(stage, set()) | hashes[stage]).intersection(chain.hashes)

    async def view(self, span: Period, stage: int = 0, fresh: bool = False) -> HistoryView:
        """Return what is remembered of the last hour or day, or of all time; the rounds are those of that stage.
        `fresh`: with what was added last, even if there is a view of some seconds ago."""
        now, last = self._clock(), self._views.get((span, stage))
        if last is not None and not fresh and self._usable and abs(now - last.until) < VIEW_S:
            return msgspec.structs.replace(last, trouble=self.trouble)
        empty = HistoryView(span=span, since=now - _SPAN_S.get(span, 3600.0), until=now, trouble=self.trouble)
        if not self._usable:
            return empty
        found = await self._tried(lambda: self._read(span, stage, now))
        if found is None:
            return msgspec.structs.replace(empty, trouble=self.trouble)
        self._views[span, stage] = found[0]
        return found[0]

    def _read(self, span: Period, stage: int, now: float) -> HistoryView:
        since = now - _SPAN_S[span] if span in _SPAN_S else None
        oldest = self._file.oldest()
        known = min(now - 60, oldest - 1 if oldest is not None else now)  # so that a young run fills its chart
        begin = known if since is None else max(since, known)
        samples = self._file.samples(begin, now, POINTS_MAX)
        rounds = self._file.rounds(stage, since, POINTS_MAX)
        losses = self._file.losses(since, POINTS_MAX)
        return HistoryView(
            span=span,
            since=begin,
            until=now,
            samples=columns(("at", *VALUES), samples),
            rounds=columns(("round", "at", "seconds", "tokens_s", "merged", "absent"), rounds),
            losses=columns(("round", "train", "held_out"), losses),
            trouble=self.trouble,
        )

    async def _tried(self, work: Callable[[], Found]) -> tuple[Found] | None:
        """Return what the work in the file's thread comes to, or None where the file failed: then say why."""
        try:
            return (await trio.to_thread.run_sync(work, limiter=self._turn),)
        except (sqlite3.OperationalError, OSError) as error:  # as of a full disk: the next reading tries again
            why = error.strerror or "" if isinstance(error, OSError) else str(error)
            self.trouble = f"nothing is remembered now ({why}): free some space, or name another file with --db"
        except sqlite3.DatabaseError as error:
            self._usable = False
            self.trouble = f"the file of the history is damaged ({error}): remove it, or name another one with --db"
        return None


@asynccontextmanager
async def open_history(path: Path, run_id: str) -> AsyncIterator[History]:
    """Open a history inside the block. Raises ConfigError for a file that is another's."""
    history = History(path, run_id)
    try:
        await history.open()
        yield history
    finally:
        await history.close()


def sample_of(state: MonitorState) -> Values:
    """Return what of a state is remembered."""
    claims = [member.claims for member in state.members if member.claims is not None]
    up = [claim.up_bytes_s for claim in claims if claim.up_bytes_s is not None]
    down = [claim.down_bytes_s for claim in claims if claim.down_bytes_s is not None]
    losses = [claim.loss for claim in claims if claim.loss is not None]
    facts = [stage.facts for stage in state.stages if stage.facts is not None and stage.facts.members]
    model = state.kind == "model"
    served = sum(row.end - row.first for row in state.blocks if row.servers)
    return {
        "peers": len(claims) + state.monitor.members_left_out,
        "members": sum(fact.members for fact in facts) if facts else None,
        "answering": sum(stage.seen.answering for stage in state.stages) if facts else None,
        "up": sum(up) if up else None,
        "down": sum(down) if down else None,
        "loss": median(losses) if losses else None,
        "sessions": sum(claim.sessions or 0 for claim in claims) if model else None,
        "unserved": state.blocks_total - served if model else None,
    }


def new_rows(stage: int, chain: HeadChain, written: set[bytes]) -> dict[bytes, Values]:
    """Return by hash the heads of a chain that are not written yet. The first one waits until no older
    ones are to come."""
    hashes, heads = chain.hashes, chain.heads
    came = [chain.came_at(name) for name in hashes]
    seconds = _seconds(chain, came)
    rows: dict[bytes, Values] = {}
    for place, (name, head) in enumerate(zip(hashes, heads, strict=True)):
        if name in written or (place == 0 and chain.wants_older) or not (head.round or head.members):
            continue
        before = heads[place - 1] if place else None
        rows[name] = {
            "stage": stage,
            "term": head.term,
            "boot": head.boot,
            "round": head.round,
            "starts": head.attempt < 0,
            "hash": name,
            "at": came[place],
            "seconds": None if head.attempt < 0 else seconds[place],
            "tokens": None if before is None else head.tokens - before.tokens,
            "members": len(head.members),
            "merged": len(took_part(head)),
            "absent": len(absent_from(before, head)),
            "discarded": max(0, head.attempt),
        }
    return rows


def _seconds(chain: HeadChain, came: Sequence[float | None]) -> list[float | None]:
    """Return how long the round of each head took. Rounds that came at one reading share the time since the last."""
    found: list[float | None] = []
    before: float | None = None
    for at, places in groupby(range(len(came)), key=came.__getitem__):
        there = list(places)
        rounds = sum(chain.heads[place].attempt >= 0 for place in there)
        each = (at - before) / rounds if at is not None and before is not None and at > before and rounds else None
        found += [each] * len(there)
        before = at
    return found


def columns(names: Sequence[str], rows: Rows) -> dict[str, Column]:
    """Return rows as named columns, without those that have no value at all."""
    turned = [list(column) for column in zip(*rows, strict=True)]
    return {name: column for name, column in zip(names, turned, strict=False) if any(v is not None for v in column)}


def _losses_of(state: MonitorState) -> Iterable[LossPoint]:
    """Yield the losses of rounds that a head can have reached: by gossip peers may claim any."""
    facts = [stage.facts for stage in state.stages if stage.facts and stage.facts.members]
    reached = max((fact.round for fact in facts), default=-2)
    for point in state.loss:
        if point.round <= reached + 1:
            yield point
