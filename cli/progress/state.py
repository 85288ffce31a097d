"""What the events of one or several peers add up to. Handlers of events write it, tables read it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from msgspec.structs import replace

from cli.progress.curve import LossCurve
from cli.progress.live_peer import LivePeer
from cli.progress.micro_batch_audit import AuditTrail
from peer.catalogue.machine import CheckpointSaved
from peer.catalogue.rounds import RoundCommitted
from peer.catalogue.stages import MoveStarted
from swarm.run.home import Home
from swarm.status.state import StageClaims, StageFacts, StageSeen, StageState

NOTES_MAX: Final = 6
ROUNDS_MAX: Final = 64  # of a run that may last months
PEERS_MAX: Final = 1024
_REMEMBERED: Final = 8  # rounds
COMPLETE: Final = "complete"
"""The phase of a group whose last round is committed."""
WAITING: Final = "waiting for peers"
"""The phase of one that has not begun."""


@dataclass(frozen=True)
class _Commit:
    round: int
    at: float
    tokens: int
    seen: bool


class RoundPace:
    """How long a round takes and how much it gets done. Rounds that were caught up with count for nothing."""

    def __init__(self) -> None:
        self._last: _Commit | None = None
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._tokens: deque[int] = deque(maxlen=_REMEMBERED)

    def note(self, number: int, at: float, tokens: int = 0, seen: bool = True) -> None:
        """Note that round `number` was committed at that Unix time, once for all peers of a view. `tokens`: that the
        run has trained on so far; 0: not known. `seen`: else it was committed some time before."""
        last = self._last
        if last is not None and number <= last.round:
            return
        if last is not None and number == last.round + 1 and seen and last.seen:
            self._took_s.append(max(0.0, at - last.at))
            self._tokens.append(max(0, tokens - last.tokens))
        self._last = _Commit(number, at, tokens, seen)

    @property
    def round_s(self) -> float | None:
        """Seconds a round, the median of the last ones; None before one was seen from its begin to its end."""
        return median(self._took_s) if self._took_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """What all members together trained on in the last rounds; None where that is not known."""
        seconds, tokens = sum(self._took_s), sum(self._tokens)
        return tokens / seconds if seconds > 0 and tokens > 0 else None

    def elapsed_s(self, now: float) -> float | None:
        """Return the seconds since the last commit; None before one was seen."""
        return None if self._last is None else max(0.0, now - self._last.at)

    def left_s(self, rounds: int, now: float) -> float | None:
        """Return the seconds to the end of a run of so many rounds; None where that is not known."""
        if self._last is None or self.round_s is None or rounds <= self._last.round:
            return None
        return max(0.0, (rounds - self._last.round) * self.round_s - max(0.0, now - self._last.at))


@dataclass
class ViewState:
    """Peers, groups, commits and notes of a run.

    Only the last rounds are kept, unless `keeps_all` asks for all of them, as a report needs.
    """

    title: str
    keeps_all: bool = False
    stages: int = 1
    rounds: int = 0
    """How many the run has; 0: no end, or not known yet."""
    peers: dict[str, LivePeer] = field(default_factory=dict)
    """By name."""
    groups: dict[int | None, StageState] = field(default_factory=dict)
    """By stage, None for a group of the whole model: as the coordinator sees them."""
    commits: dict[str, dict[int, RoundCommitted]] = field(default_factory=dict)
    """By peer name and round."""
    val_losses: dict[int, float] = field(default_factory=dict)
    """Held-out loss by round, nats per byte or token; NaN where it was no number. The first report of a round
    is kept."""
    discarded: dict[tuple[int | None, int], str] = field(default_factory=dict)
    """Reasons by (stage, round)."""
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=NOTES_MAX))
    saved: tuple[CheckpointSaved, int | None] | None = None
    """The last checkpoint on disk, and the stage that it is of."""
    left_unsaved: bool = False
    """Whether a peer that no other peer could stand in for left without a checkpoint of its last commit."""
    told_complete: bool = False
    """Whether a note has said that the run is complete."""
    left_complete: bool = False
    """Whether this command's peer ended with the run's last round."""
    left_for_good: bool = False
    """Whether this command's peer ended for a reason that joining again does not change."""
    min_peers: int = 0
    """How many peers the first round waits for; 0: not known yet."""
    here: set[str] = field(default_factory=set)
    """Ids of the peers that train and are there, as their records say."""
    pace: RoundPace = field(default_factory=RoundPace)
    loss_curve: LossCurve = field(default_factory=LossCurve)
    """Of the training loss by round, of the peer that told of it first."""
    homes: dict[str, Path] = field(default_factory=dict)
    """Of peers by name, as far as they are of this machine and known."""
    names: dict[str, str] = field(default_factory=dict)
    """Names by peer id."""
    moves: list[tuple[str, float, MoveStarted]] = field(default_factory=list)
    """Who moves, and since when, Unix time."""
    audit_trail: AuditTrail = field(default_factory=AuditTrail)
    reached: dict[int, int] = field(default_factory=dict)
    """Newest round by stage."""
    missed: set[str] = field(default_factory=set)
    """Ids of peers that another peer no longer hears."""
    fullest: dict[int | None, int] = field(default_factory=dict)
    """By group: contributions for which the fullest roster so far had no room."""
    pinned: str = ""
    """A line that stands above the table, where the view is never cut."""
    now: Callable[[], float] = time.time
    """Unix time, from which what is left of a round is counted."""
    say: Callable[[str], None] | None = None
    """Called with each note as a plain line where there is no terminal to redraw."""

    def peer(self, name: str) -> LivePeer:
        if name not in self.peers:
            self.peers[name] = LivePeer(name)
        return self.peers[name]

    def name_of(self, peer: str) -> str:
        """Return the peer's name, or the end of its id."""
        return self.names.get(peer) or peer[-8:]

    def home_option(self, peer: LivePeer) -> str:
        """Return what names the peer's home in a command."""
        home = self.homes.get(peer.name)
        return "--home DIR" if home is None else Home(home).option

    def group(self, stage: int | None, phase: str = "", **facts: int) -> StageState:
        """Return the group of a stage, after changes to its phase and facts."""
        group = self.groups.get(stage) or _not_begun(stage)
        if phase:
            group = replace(group, claims=replace(group.claims, phase=phase))
        if facts:
            group = replace(group, facts=replace(group.facts or _NO_FACTS, **facts))
        self.groups[stage] = group
        return group

    def note(self, text: str) -> None:
        """Add a line under the table."""
        stamped = f"{time.strftime('%H:%M:%S')}  {text}"
        self.notes.append(stamped)
        if self.say is not None:
            self.say(stamped)

    def pin(self, text: str) -> None:
        """Keep a line in sight, above the table. Where there is no terminal to redraw it is said once."""
        self.pinned = text
        if self.say is not None:
            self.say(text)

    @property
    def round(self) -> int:
        """The newest round of any peer; with several `stages`, the newest that every stage has committed."""
        if self.stages > 1:
            return min(self.reached.get(stage, 0) for stage in range(self.stages))
        return max((peer.round for peer in self.peers.values()), default=0)

    @property
    def complete(self) -> bool:
        """Whether the coordinator has seen the last round of every group."""
        return bool(self.groups) and all(group.claims.phase == COMPLETE for group in self.groups.values())

    def keep_move(self, name: str, at: float, move: MoveStarted) -> None:
        self.moves.append((name, at, move))
        if not self.keeps_all:
            del self.moves[:-ROUNDS_MAX]

    def trim(self, by_round: dict[Any, Any]) -> None:
        """Drop the oldest rounds."""
        while len(by_round) > ROUNDS_MAX and not self.keeps_all:
            del by_round[next(iter(by_round))]


_NO_FACTS: Final = StageFacts(round=0, term=0, tokens=0, state_hash="", members=0, quorum=0, absent=0, learners=0)


def _not_begun(stage: int | None) -> StageState:
    return StageState(
        stage=stage or 0,
        first=0,
        end=0,
        facts=None,
        seen=StageSeen(answering=0, margin=None, commit_age_s=None, round_s=None),
        claims=StageClaims(replicas=0, arriving=0, rate=0.0, queue=None, phase=WAITING),
    )
