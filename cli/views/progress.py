"""What the events of one or several peers add up to; `cli.views.table` shows it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cli.views.facts import CommitRow, Fields, GroupRow, MoveRow, Row, Saved
from cli.views.group_progress import OVERSEEN
from cli.views.micro_batch_audit import Accounts, AuditEntry
from cli.views.pipeline_progress import PIPELINED
from cli.views.table import plain, several

_NOTES: Final = 6
_ROUNDS: Final = 64  # what a run of months remembers of its past
_PEERS: Final = 1024


@dataclass
class Progress:
    """Folds events into rows, groups, commits and notes. Feed it with `apply`.

    Commits, losses and discarded rounds are those of the last rounds only, unless it `keeps_all` for a report.
    """

    title: str
    keeps_all: bool = False
    stages: int = 1
    rows: dict[str, Row] = field(default_factory=dict)
    groups: dict[int | None, GroupRow] = field(default_factory=dict)  # by stage, as the coordinator sees them
    commits: dict[str, dict[int, CommitRow]] = field(default_factory=dict)
    val_losses: dict[int, float] = field(default_factory=dict)  # round -> nats per byte or token, first report wins
    discarded: dict[tuple[int | None, int], str] = field(default_factory=dict)  # (stage, round) -> why
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=_NOTES))
    saved: Saved | None = None
    names: dict[str, str] = field(default_factory=dict)  # peer id -> name
    moves: list[MoveRow] = field(default_factory=list)
    accounts: Accounts = field(default_factory=Accounts)
    reached: dict[int, int] = field(default_factory=dict)  # stage -> newest round
    missed: set[str] = field(default_factory=set)  # peer ids that somebody no longer hears
    say: Callable[[str], None] | None = None
    """Called with each milestone as a plain line, where there is no terminal to redraw."""

    def row(self, name: str) -> Row:
        return self.rows.setdefault(name, Row(name))

    def name_of(self, peer: str) -> str:
        """What the peer of that id is called, or the end of its id."""
        return self.names.get(peer) or peer[-8:]

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

    @property
    def complete(self) -> bool:
        """Whether the coordinator has seen the last round of every group."""
        return bool(self.groups) and all(group.complete for group in self.groups.values())

    def keep_move(self, move: MoveRow) -> None:
        self.moves.append(move)
        if not self.keeps_all:
            del self.moves[:-_ROUNDS]

    def _trim(self, by_round: dict[Any, Any]) -> None:
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
        commits[number] = CommitRow(number, at, row.state_hash, fields)
        self._trim(commits)
        if newest:
            loss = f", loss {row.loss:.3f}" if row.loss is not None else ""
            of = "" if stage is None else f" of stage {stage}"
            who = several(row.members, "member")
            self.note(f"round {number}{of} committed by {who}{loss}, state {row.state_hash[:8]}")

    def _book(self, stage: int, fields: Fields) -> None:
        """What a commit of a stage has merged."""
        if self.keeps_all:
            merged = tuple(_ranges(text) for text in fields.get("counted") or ())
            self.accounts.commit(stage, AuditEntry(str(fields["head"]), str(fields["previous"]), merged))

    def _met(self, row: Row, at: float, fields: Fields) -> None:
        """A round of a gossip run: this peer's own, whoever else is how far."""
        row.round = int(fields["round"])
        row.state_hash = str(fields.get("state_hash", ""))
        row.members = int(fields.get("members") or row.members)
        self._numbers(row, at, fields)
        partner, distance = str(fields.get("partner", "")), fields.get("distance")
        with_whom = f"met {self.name_of(partner)}" if partner else "met nobody"
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
        place, reason = (row.stage, int(fields.get("round", 0))), str(fields.get("reason", ""))
        if place not in self.discarded:
            self.discarded[place] = reason
            self._trim(self.discarded)
            of = "" if row.stage is None else f" of stage {row.stage}"
            self.note(f"round {place[1]}{of} discarded: {reason}")

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

    def _stale(self, row: Row, at: float, fields: Fields) -> None:
        """Told once: where the network is bad it happens over and over."""
        if not row.stale:
            row.stale = True
            self._problem(row, at, fields)

    def _suspect(self, row: Row, at: float, fields: Fields) -> None:
        peer = str(fields.get("peer", ""))
        if peer not in self.missed:
            self.missed.add(peer)
            while len(self.missed) > _PEERS:
                self.missed.pop()
            self.note(f"{self.name_of(peer)} is no longer heard by {row.name}")

    def _recovered(self, row: Row, at: float, fields: Fields) -> None:
        peer = str(fields.get("peer", ""))
        if peer in self.missed:
            self.missed.discard(peer)
            self.note(f"{self.name_of(peer)} is heard again by {row.name}")

    def _joined(self, row: Row, at: float, fields: Fields) -> None:
        self.names[str(fields.get("peer", ""))] = plain(str(fields.get("name", "")))
        while len(self.names) > _PEERS:
            del self.names[next(iter(self.names))]

    def _finished(self, row: Row, at: float, fields: Fields) -> None:
        row.phase = "finished"

    def _saved(self, row: Row, at: float, fields: Fields) -> None:
        path = str(fields["path"])
        if row.stage is None or f"stage-{row.stage}" in Path(path).parts:  # else one that it keeps for another stage
            self.saved = Saved(int(fields["round"]), path, row.stage)


_HANDLERS: Final[dict[str, Callable[[Progress, Row, float, Fields], None]]] = {
    "phase_entered": Progress._phase,
    "inner_step": Progress._step,
    "state_progress": Progress._fetching,
    "contact_failed": Progress._problem,
    "text_missing": Progress._problem,
    "membership_stale": Progress._stale,
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
    "bug": Progress._problem,
    **OVERSEEN,
    **PIPELINED,
}


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    """ "0-8,16-24" as ranges, the end not included."""
    pairs = (piece.split("-") for piece in text.split(",") if piece)
    return tuple((int(first), int(last)) for first, last in pairs)
