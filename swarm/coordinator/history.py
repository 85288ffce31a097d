"""Which heads an authority accepts as the start of a new term, from what it remembers of the group.

A peer that went back to an earlier commit on a stranger's word would undo what others did. So the authority remembers
the heads of the last minutes, and their members.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.coordinator.durable_state import DurableState
from swarm.coordinator.rules import GroupRules
from swarm.coordinator.run_progress import RunProgress
from swarm.pipeline.config import STALENESS
from swarm.protocol.head import Head
from swarm.protocol.messages import HeadReport
from swarm.protocol.quorum import HeadCandidate, open_regroup

HISTORY_S: Final = 120.0
STAGE_HISTORY_S: Final = 3600.0  # longer: peers that keep a stage's commits are members of another stage


class GroupHistory:
    """The last head that the authority signed or saw, and what was committed before it."""

    def __init__(self, rules: GroupRules, durable: DurableState, authority: str, progress: RunProgress) -> None:
        self._rules, self._durable, self._authority, self._progress = rules, durable, authority, progress
        self.head = rules.genesis if durable.signed is None else self._opened(durable.signed)
        if durable.seen is not None and durable.seen.head.position > self.head.position:
            self.head = durable.seen.head

    @property
    def signed(self) -> Signed | None:
        """The last regroup that the authority signed; None before the group has begun."""
        return self._durable.signed

    @property
    def signed_head(self) -> Head | None:
        """The head of that regroup."""
        return None if self._durable.signed is None else self._opened(self._durable.signed)

    def sign(self, signed: Signed) -> None:
        """Keep a regroup that the authority has signed."""
        self._durable.keep(signed)

    def see(self, head: Head) -> None:
        """Make `head` the last one."""
        self.head = head
        self._durable.see(head, HISTORY_S if self._rules.stage is None else STAGE_HISTORY_S)

    def knows(self, peer: str) -> bool:
        """Return whether `peer` is a member of the last head, or was a member within the remembered time."""
        return any(member.peer == peer for member in self.head.members) or self._durable.knew(peer)

    def believes(self, peer: str, head: bytes, round: int) -> bool:
        """Return whether the run may continue from the head of that hash and round on the word of `peer`.

        - No head lies beyond the end of the run.
        - A member of the last head may name any: it comes back from a checkpoint, or committed what we did not see.
        - Where the group is the whole run, another peer may name a later head. An earlier one only if that peer was a
          member within the last minutes and the head was committed in that time: the only peers that held the last
          commit may be gone for good.
        - In a pipeline, a former member may name a later head. Any peer may name one that `vouches` accepts.
        """
        if self._rules.rounds and round > self._rules.rounds:
            return False
        if any(member.peer == peer for member in self.head.members):
            return True
        ahead, knew = round > self.head.round, self.knows(peer)
        if self._rules.stage is None:
            return round >= self.head.round or (knew and self._durable.saw(head))
        return (ahead and knew) or self.vouches(head, round)

    def vouches(self, head: bytes, round: int) -> bool:
        """Return whether that is a commit of this stage as far as the authority knows, whichever peer keeps it.

        Either the authority saw it, or the other stages are so far on that it cannot have seen all commits of this
        stage. They cannot get more than `STALENESS` rounds ahead of it.
        """
        if head == self.head.hash or self._durable.saw(head):
            return True
        furthest = self._progress.furthest_besides(self._rules.genesis.run_id)
        return furthest - self.head.round > STALENESS and self.head.round < round <= furthest + STALENESS

    def is_credible(self, candidate: HeadCandidate, trust_strangers: bool) -> bool:
        """Return whether the authority may follow a head that a majority of its own members report.

        In a stage that has lost all of its replicas such a majority says little: a liar names the members of the head
        that it makes up. One of the holders must be believed there, unless all known peers have been away so long that
        they may have been replaced.
        """
        head = candidate.head
        if self._rules.rounds and head.round > self._rules.rounds:
            return False
        if self._rules.stage is None or trust_strangers:
            return True
        return any(self.believes(peer, head.hash, head.round) for peer in candidate.holders)

    def choose_start(self, head_reports: Sequence[tuple[str, HeadReport]]) -> Head | None:
        """Return the head to continue from, of those that believed peers report; None if there is none.

        It is of the latest signed term. Among its heads, the choice is the one that most members of the last head have
        committed, so that no single claim counts, and from there on any commit that one of them made next; else the
        latest.
        """
        heads: dict[bytes, Head] = {}
        committed_by: dict[bytes, set[str]] = {}
        for _, report in head_reports:
            if not report.head.members or not self._is_in_signed_term(report):
                continue
            if not self.believes(report.member.peer, report.head.hash, report.head.round):
                continue
            heads[report.head.hash] = report.head
            if self.head.has(report.member):
                for committed in (report.head.hash, report.head.previous):
                    committed_by.setdefault(committed, set()).add(report.member.peer)
        best = max(heads.values(), key=lambda h: (h.term, len(committed_by.get(h.hash, ())), h.round), default=None)
        while best is not None:
            following = [h for name, h in heads.items() if h.previous == best.hash and name in committed_by]
            if not following:
                break
            best = max(following, key=lambda h: len(committed_by[h.hash]))
        return best

    def _is_in_signed_term(self, report: HeadReport) -> bool:
        if report.regroup is None:
            return False
        try:
            start = self._opened(report.regroup)
        except ProtocolViolation:
            return False
        return start.term == report.head.term and start.round <= report.head.round

    def _opened(self, signed: Signed) -> Head:
        return open_regroup(signed, self._authority, self._rules.genesis.run_id)
