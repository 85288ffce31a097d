"""The invariants of a run's history, judged from what its peers have told: the commits of all event streams, merged.

    check_histories([peer.home for peer in swarm.processes()])

It asks no peer and believes no order of the clocks: only the order of one peer's own lines, and the hashes in them.
Which samples are in the weights is judged where commits name them, in pipelines; else by their number of tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cli.progress.event_tail import EventTail
from swarm.protocol.ledger import Range, count, union
from swarm.run.home import Home

COMMITS: Final = ("round_committed", "head_adopted")


@dataclass(frozen=True)
class Stand:
    """One line of a peer: it stands at this head."""

    peer: str
    stage: int
    head: str
    previous: str
    term: int
    round: int
    state_hash: str
    members: int
    tokens: int
    merged: bool
    """Whether the peer took part in the round; else it fetched the state."""
    counted: tuple[Range, ...] = ()
    """In a pipeline, the samples of all contributions, first and end of each range."""

    @property
    def place(self) -> tuple[int, int]:
        return (self.term, self.round)

    @property
    def names(self) -> tuple[int, int, int, str, str, int, int]:
        """All that a head's hash names."""
        return (self.stage, self.term, self.round, self.previous, self.state_hash, self.members, self.tokens)


@dataclass
class Declared:
    """What the coordinator has said of new terms, by (stage, term)."""

    undone: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """How many heads a start takes back, and the last round that the coordinator knew of when it signed it."""
    restored: bool = False
    """Whether its disk was put back from a backup: then it does not know what it takes back."""


@dataclass
class History:
    """What all peers of one run have told."""

    lives: dict[str, list[list[Stand]]] = field(default_factory=dict)
    """By peer, the lines of each of its processes."""
    declared: Declared = field(default_factory=Declared)
    bugs: list[str] = field(default_factory=list)
    wiped: frozenset[str] = frozenset()
    """Peers whose disks were lost or put back: they may begin again."""
    _seen: dict[tuple[str, int], int] = field(default_factory=dict)
    """The last round that a coordinator has seen of each stage."""

    # -- taking in -----------------------------------------------------------------------------------------------------

    def add(self, peer: str, events: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Take the events of one peer, oldest first."""
        lives = self.lives.setdefault(peer, [[]])
        for name, fields in events:
            if name == "run_entered":
                lives.append([])
            elif name in COMMITS:
                lives[-1].append(_stand(peer, name, fields))
            elif name == "regrouped":
                stage = int(fields.get("stage", 0))
                known = self._seen.get((peer, stage), 0)
                self.declared.undone[stage, int(fields["term"])] = (int(fields["undone"]), known)
            elif name == "head_seen":
                self._seen[peer, int(fields.get("stage", 0))] = int(fields["round"])
            elif name == "coordinator_restored":
                self.declared.restored = True
            elif name == "bug":
                self.bugs.append(f"{peer}: {dict(fields)}")

    # -- judging -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError with the first invariant that does not hold, in words."""
        assert not self.bugs, f"a peer tells of a bug: {self.bugs[0]}"
        heads = self._heads()
        for stand in heads.values():
            self._follows(stand, heads.get(stand.previous))
        for peer, lives in self.lives.items():
            for stage in {stand.stage for life in lives for stand in life}:
                self._goes_on(peer, [[s for s in life if s.stage == stage] for life in lives], heads)
        for stage in {stand.stage for stand in heads.values()}:
            self._counts_once(stage, heads)

    def _heads(self) -> dict[str, Stand]:
        """Return one line of each head, one that names its samples if there is any. (1, 5)"""
        heads: dict[str, Stand] = {}
        at: dict[tuple[int, tuple[int, int]], Stand] = {}
        after: dict[tuple[int, str, int], Stand] = {}
        for stand in (stand for lives in self.lives.values() for life in lives for stand in life):
            known = heads.setdefault(stand.head, stand)
            assert known.names == stand.names, f"agreement: one head is two: {known} and {stand}"
            if stand.counted and not known.counted:
                heads[stand.head] = stand
            other = at.setdefault((stand.stage, stand.place), stand)
            assert other.head == stand.head, f"agreement: two heads at (term, round) {stand.place}: {other} and {stand}"
            twin = after.setdefault((stand.stage, stand.previous, stand.term), stand)
            assert twin.head == stand.head, f"agreement: two heads follow one in its term: {twin} and {stand}"
        return heads

    def _follows(self, stand: Stand, before: Stand | None) -> None:
        """Judge what leads from one head to the next. (2, 9, 10)"""
        if before is None:
            return  # no peer stood there: all went past it
        assert stand.stage == before.stage, f"lineage: {stand} follows a head of another stage: {before}"
        assert stand.term >= before.term, f"lineage: {stand} follows a head of a higher term: {before}"
        if stand.term == before.term:
            assert stand.round == before.round + 1, f"lineage: {stand} is not the round after {before}"
            room = max(1, (before.members - 1) // 2)
            assert stand.members <= before.members + room, (
                f"electorate: too many came in at once: {stand} after {before}"
            )
            assert stand.tokens >= before.tokens, f"counted once: a round takes tokens back: {stand} after {before}"
        elif stand.stage == 0 and not self._is_pipeline:
            assert stand.place[1] == before.round, f"lineage: a term begins at another round than its base: {stand}"
            same = (stand.state_hash, stand.tokens) == (before.state_hash, before.tokens)
            assert same, f"lineage: the start of a term changes the state of its base: {stand} after {before}"

    @property
    def _is_pipeline(self) -> bool:
        return any(s.counted or s.stage for lives in self.lives.values() for life in lives for s in life)

    def _goes_on(self, peer: str, lives: list[list[Stand]], heads: Mapping[str, Stand]) -> None:
        """Judge the heads at which one peer stood, one after the other. (3, 4)

        A round of which the coordinator did not hear, since its voters were cut off when the operator regrouped, is
        left without a word: that is not promised."""
        last: Stand | None = None
        for life in lives:
            is_first = True
            for stand in life:
                if last is not None and not (peer in self.wiped and is_first):
                    self._leads_on(last, stand, is_first, heads)
                last, is_first = stand, False

    def _leads_on(self, last: Stand, stand: Stand, restarted: bool, heads: Mapping[str, Stand]) -> None:
        assert stand.place > last.place, f"monotone: {stand.peer} goes back from {last} to {stand}"
        if stand.merged and not restarted and stand.term == last.term:
            assert stand.previous == last.head, f"lineage: {stand.peer} takes part in {stand}, and stood at {last}"
        if stand.term == last.term or self.declared.restored:
            return
        declared = self.declared.undone.items()
        between = [
            entry for (stage, term), entry in declared if stage == stand.stage and last.term < term <= stand.term
        ]
        above: Stand | None = stand
        while above is not None and above.place > last.place:
            above = heads.get(above.previous)
        if above is None or above.head == last.head:  # a head between is known to no peer; or nothing is taken back
            return
        knew = [undone for undone, known in between if known >= last.round]
        assert not knew or any(knew), (
            f"one commit a round: {stand.peer} leaves {last} for {stand}, and no start says so"
        )

    def _counts_once(self, stage: int, heads: Mapping[str, Stand]) -> None:
        """Judge the samples of a stage, along the history of its last head. (9)"""
        at: Stand | None = max((s for s in heads.values() if s.stage == stage), key=lambda s: s.place)
        ranges: list[Range] = []
        while at is not None:
            ranges += at.counted
            at = heads.get(at.previous)
        twice = count(ranges) - count(union(ranges))
        assert not twice, f"counted once: {twice} samples of stage {stage} are merged twice"


def _stand(peer: str, name: str, fields: Mapping[str, Any]) -> Stand:
    ranges = (piece.split("-") for text in fields.get("counted") or () for piece in text.split(",") if piece)
    return Stand(
        peer=peer,
        stage=int(fields.get("stage", 0)),
        head=str(fields["head"]),
        previous=str(fields["previous"]),
        term=int(fields["term"]),
        round=int(fields["round"]),
        state_hash=str(fields["state_hash"]),
        members=int(fields["members"]),
        tokens=int(fields["tokens"]),
        merged=name == "round_committed",
        counted=tuple((int(first), int(end)) for first, end in ranges),
    )


def read_history(homes: Iterable[Path], wiped: Collection[str] = ()) -> History:
    """Read the event streams of these homes. `wiped`: names of those whose disks were lost or put back."""
    history = History(wiped=frozenset(wiped))
    for home in homes:
        path = Home(home).events
        for part in (path.with_suffix(".1.jsonl"), path):  # it rotates once
            tail = EventTail(part)
            history.add(home.name, [(name, fields) for _, name, fields in tail.poll()])
            tail.close()
    return history


def check_histories(homes: Iterable[Path], wiped: Collection[str] = ()) -> None:
    """Raise AssertionError with the first invariant, in words, that the events of these peers break. `wiped`: names of
    the homes whose disks were lost or put back, so that their peers may begin again."""
    read_history(homes, wiped).check()
