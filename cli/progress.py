"""What the events of one or several peers add up to, and the table that shows it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.accounts import Accounts, Entry, Totals
from cli.facts import Commit, Fields, Move, Row, Saved

_NOTES: Final = 6
_ROUNDS: Final = 64  # what a run of months remembers of its past
_PEERS: Final = 1024


@dataclass
class Progress:
    """Folds events into rows, commits and notes. Feed it with `apply`; `render()` is the live view.

    Commits, losses and discarded rounds are those of the last rounds only, unless it `keeps_all` for a report.
    """

    title: str
    keeps_all: bool = False
    stages: int = 1
    rows: dict[str, Row] = field(default_factory=dict)
    commits: dict[str, dict[int, Commit]] = field(default_factory=dict)
    val_losses: dict[int, float] = field(default_factory=dict)  # round -> nats per byte or token, first report wins
    discarded: dict[int, str] = field(default_factory=dict)
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=_NOTES))
    saved: Saved | None = None
    names: dict[str, str] = field(default_factory=dict)  # peer id -> name
    moves: list[Move] = field(default_factory=list)
    accounts: Accounts = field(default_factory=Accounts)
    reached: dict[int, int] = field(default_factory=dict)  # stage -> newest round
    missed: set[str] = field(default_factory=set)  # peer ids that somebody no longer hears
    say: Callable[[str], None] | None = None
    """Called with each milestone as a plain line, where there is no terminal to redraw."""

    def row(self, name: str) -> Row:
        return self.rows.setdefault(name, Row(name))

    def note(self, text: str) -> None:
        """Add a line under the table."""
        stamped = f"{time.strftime('%H:%M:%S')}  {text}"
        self.notes.append(stamped)
        if self.say is not None:
            self.say(stamped)

    def apply(self, name: str, event: str, at: float, fields: Fields) -> None:
        """One event of the peer called `name`. Unknown events are none of this view's business."""
        row = self.row(name)
        handler = _HANDLERS.get(event)
        if handler is not None:
            handler(self, row, at, fields)

    @property
    def round(self) -> int:
        """The newest round that any peer has committed or, where `stages` are looked at, that all of them have."""
        if self.stages > 1:
            return min(self.reached.get(stage, 0) for stage in range(self.stages))
        return max((row.round for row in self.rows.values()), default=0)

    def render(self) -> RenderableType:
        pipelined = any(row.stage is not None for row in self.rows.values())
        columns, box = (_PIPELINE, SIMPLE_HEAD) if pipelined else (_WHOLE, HEAVY_HEAD)
        table = Table(title=self.title, title_justify="left", expand=False, box=box)
        for column in columns:
            table.add_column(column, justify="left" if column in ("peer", "phase", "state") else "right")
        for row in self.rows.values():
            cells = _cells(row)
            table.add_row(*(cells[column] for column in columns), style="red" if row.gone else "")
        return Group(table, *(Text(note, style="dim") for note in self.notes))

    def _trim(self, by_round: dict[int, Any]) -> None:
        """Forget the rounds longest in there."""
        while len(by_round) > _ROUNDS and not self.keeps_all:
            del by_round[next(iter(by_round))]

    # -- one method an event -----------------------------------------------------------------------------------------

    def _phase(self, row: Row, at: float, fields: Fields) -> None:
        row.phase = str(fields.get("phase", row.phase))

    def _step(self, row: Row, at: float, fields: Fields) -> None:
        row.phase = f"step {fields.get('step')}"
        row.loss = float(fields["loss"])

    def _fetching(self, row: Row, at: float, fields: Fields) -> None:
        share = int(fields.get("done_bytes", 0)) / max(1, int(fields.get("size_bytes", 1)))
        row.phase = f"fetching state, {share:.0%}"

    def _regrouped(self, row: Row, at: float, fields: Fields) -> None:
        row.round, row.members, row.phase = int(fields["round"]), int(fields["members"]), "coordinating"
        self.note(f"the authority begins term {fields['term']} at round {row.round} with {row.members} members")

    def _majority(self, row: Row, at: float, fields: Fields) -> None:
        self.note(f"only {fields['alive']} of {fields['members']} members of round {fields['round']} are there")

    def _away(self, row: Row, at: float, fields: Fields) -> None:
        self.note(f"nobody who is there may go on from round {fields['round']}: start one of its members again")

    def _committed(self, row: Row, at: float, fields: Fields) -> None:
        number = int(fields["round"])
        row.round = number
        row.state_hash = str(fields.get("state_hash", ""))
        row.members = int(fields.get("members") or row.members)
        self._numbers(row, at, fields)
        stage = fields.get("stage")
        newest = number > max((r for seen in self.commits.values() for r in seen), default=0)
        if stage is not None:
            newest = number > self.reached.get(stage, 0)
            self.reached[stage] = max(number, self.reached.get(stage, 0))
            self._book(stage, fields)
        commits = self.commits.setdefault(row.name, {})
        commits[number] = Commit(number, at, row.state_hash, fields)
        self._trim(commits)
        if newest:
            loss = f", loss {row.loss:.3f}" if row.loss is not None else ""
            of = "" if stage is None else f" of stage {stage}"
            self.note(f"round {number}{of} committed by {row.members} members{loss}, state {row.state_hash[:8]}")

    def _book(self, stage: int, fields: Fields) -> None:
        """What a commit of a stage has merged."""
        if self.keeps_all:
            merged = tuple(_ranges(text) for text in fields.get("counted") or ())
            self.accounts.commit(stage, Entry(str(fields["head"]), str(fields["previous"]), merged))

    def _seated(self, row: Row, at: float, fields: Fields) -> None:
        row.stage = int(fields["stage"])
        row.rate, row.queue = 0.0, 0.0

    def _load(self, row: Row, at: float, fields: Fields) -> None:
        row.queue, row.rate = float(fields["queue"]), float(fields["rate"])
        row.phase = str(fields["phase"])

    def _issued(self, row: Row, at: float, fields: Fields) -> None:
        counters = {name: int(fields[name]) for name in ("issued", "completed", "retried", "abandoned")}
        self.accounts.totals.setdefault(row.name, Totals()).note(counters)

    def _moving(self, row: Row, at: float, fields: Fields) -> None:
        move = Move(
            row.name, at, int(fields["source"]), int(fields["target"]), str(fields["reason"]), float(fields["gain"])
        )
        self.moves.append(move)
        if not self.keeps_all:
            del self.moves[:-_ROUNDS]
        row.phase = f"moving to stage {move.target}"
        self.note(f"{row.name} moves from stage {move.source} to {move.target}: {move.reason}")

    def _moved(self, row: Row, at: float, fields: Fields) -> None:
        self.note(f"{row.name} is at work in stage {fields['target']} after {float(fields['seconds']):.0f} s")

    def _missing(self, row: Row, at: float, fields: Fields) -> None:
        stages = ", ".join(fields["stages"])
        self.note(f"{row.name} waits for stage {stages}" if stages else f"{row.name} sees all stages served")

    def _met(self, row: Row, at: float, fields: Fields) -> None:
        """A round of a gossip run: this peer's own, whoever else is how far."""
        row.round = int(fields["round"])
        row.state_hash = str(fields.get("state_hash", ""))
        row.members = int(fields.get("members") or row.members)
        self._numbers(row, at, fields)
        partner, distance = str(fields.get("partner", "")), fields.get("distance")
        with_whom = f"met {self.names.get(partner, partner[-8:])}" if partner else "met nobody"
        apart = "" if distance is None else f", {float(distance):.1%} apart"
        loss = "" if row.loss is None else f", loss {row.loss:.3f}"
        self.note(f"{row.name} {with_whom} for round {row.round}{apart}{loss}")

    def _adopted(self, row: Row, at: float, fields: Fields) -> None:
        if fields.get("stage") is not None:
            self._book(fields["stage"], fields)
        row.round = int(fields["round"])
        row.state_hash = str(fields.get("state_hash", ""))
        row.members = int(fields.get("members") or row.members)
        self._numbers(row, at, fields)
        self.note(f"{row.name} caught up with round {row.round}, state {row.state_hash[:8]}")

    def _discarded(self, row: Row, at: float, fields: Fields) -> None:
        number, reason = int(fields.get("round", 0)), str(fields.get("reason", ""))
        if number not in self.discarded:
            self.discarded[number] = reason
            self._trim(self.discarded)
            self.note(f"round {number} discarded: {reason}")

    def _evaluated(self, row: Row, at: float, fields: Fields) -> None:
        row.val_loss = float(fields["loss"])
        self.val_losses.setdefault(int(fields["round"]), row.val_loss)
        self._trim(self.val_losses)

    def _numbers(self, row: Row, at: float, fields: Fields) -> None:
        if fields.get("loss") is not None:
            row.loss = float(fields["loss"])
        row.bytes_up = int(fields.get("bytes_up", row.bytes_up))
        row.bytes_down = int(fields.get("bytes_down", row.bytes_down))

    def _problem(self, row: Row, at: float, fields: Fields) -> None:
        self.note(f"{row.name}: {fields.get('reason') or fields.get('cause') or fields.get('error') or 'trouble'}")

    def _suspect(self, row: Row, at: float, fields: Fields) -> None:
        peer = str(fields.get("peer", ""))
        if peer not in self.missed:
            self.missed.add(peer)
            while len(self.missed) > _PEERS:
                self.missed.pop()
            self.note(f"{self.names.get(peer, peer[-8:])} is no longer heard by {row.name}")

    def _recovered(self, row: Row, at: float, fields: Fields) -> None:
        peer = str(fields.get("peer", ""))
        if peer in self.missed:
            self.missed.discard(peer)
            self.note(f"{self.names.get(peer, peer[-8:])} is heard again by {row.name}")

    def _joined(self, row: Row, at: float, fields: Fields) -> None:
        self.names[str(fields.get("peer", ""))] = str(fields.get("name", ""))
        while len(self.names) > _PEERS:
            del self.names[next(iter(self.names))]

    def _finished(self, row: Row, at: float, fields: Fields) -> None:
        row.phase = "finished"

    def _saved(self, row: Row, at: float, fields: Fields) -> None:
        self.saved = Saved(int(fields["round"]), str(fields["path"]))


_WHOLE: Final = ("peer", "round", "members", "phase", "loss", "held-out", "up", "down", "state")
_PIPELINE: Final = ("peer", "stage", "round", "mb/s", "queue", "phase", "loss", "held-out")  # 80 columns wide

_HANDLERS: Final[dict[str, Callable[[Progress, Row, float, Fields], None]]] = {
    "phase_entered": Progress._phase,
    "inner_step": Progress._step,
    "state_progress": Progress._fetching,
    "regrouped": Progress._regrouped,
    "majority_missing": Progress._majority,
    "members_away": Progress._away,
    "contact_failed": Progress._problem,
    "round_committed": Progress._committed,
    "round_discarded": Progress._discarded,
    "head_adopted": Progress._adopted,
    "gossip_met": Progress._met,
    "gossip_alone": Progress._met,
    "val_evaluated": Progress._evaluated,
    "progress": Progress._numbers,
    "majority_lost": Progress._problem,
    "worker_died": Progress._problem,
    "worker_failed": Progress._problem,
    "checkpoint_failed": Progress._problem,
    "checkpoint_saved": Progress._saved,
    "peer_suspect": Progress._suspect,
    "peer_recovered": Progress._recovered,
    "member_joined": Progress._joined,
    "run_finished": Progress._finished,
    "seat_taken": Progress._seated,
    "stage_load": Progress._load,
    "pipeline_progress": Progress._issued,
    "move_started": Progress._moving,
    "move_finished": Progress._moved,
    "stages_missing": Progress._missing,
    "bug": Progress._problem,
}


def size_text(size_bytes: float) -> str:
    """1536 -> "1.5 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000 or unit == "GB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    raise AssertionError("unreachable")


def console() -> Console:
    """Where people look: standard error, so that standard output stays for what scripts read."""
    return Console(stderr=True)


def _cells(row: Row) -> dict[str, str]:
    """Each column's text."""
    return {
        "peer": row.name,
        "stage": "" if row.stage is None else str(row.stage),
        "mb/s": "" if row.stage is None else f"{row.rate:.1f}",
        "queue": "" if row.stage is None else f"{row.queue:.0f}",
        "round": str(row.round),
        "members": str(row.members or ""),
        "phase": row.gone or row.phase,
        "loss": _number(row.loss),
        "held-out": _number(row.val_loss),
        "up": size_text(row.bytes_up),
        "down": size_text(row.bytes_down),
        "state": row.state_hash[:8],
    }


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    """ "0-8,16-24" as ranges, the end not included."""
    pairs = (piece.split("-") for piece in text.split(",") if piece)
    return tuple((int(first), int(last)) for first, last in pairs)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
