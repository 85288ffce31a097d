"""Peers that recently answered the coordinator, and whether its group can continue.

None of this is on disk: an answer before a restart does not show that its sender is up now.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

from peer.catalogue.groups import QuorumLost
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import Chain, position_of
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.coordination.inquiry import REMEMBERED
from swarm.protocol.head import Head, Member

TOLD_AGAIN_S: Final = 600.0  # after which the operator is reminded of a lost quorum
HEARD_MAX: Final = 4096
DOUBLINGS_MAX: Final = 10
ROUNDS_KEPT: Final = 7
ROUNDS_TELL: Final = 3  # rounds to measure: those that a restarted coordinator catches up with seem short
MANY: Final = 3  # members: one that is left of so many, or who comes in their place, may be a liar


class GroupWatch:
    """Answers that one coordinator has received since its process began."""

    def __init__(self, context: AgreementContext, chain: Chain) -> None:
        self._context, self._chain = context, chain
        self.positions: dict[Member, msg.Position] = {}
        """The positions that voters report."""
        self._heard: dict[Member, float] = {}
        self._fresh: set[Member] = set()  # those that have answered since this process began
        self._began_at = 0.0
        self._woke_at = 0.0
        self._committed_at = 0.0
        self._rounds_s: deque[float] = deque(maxlen=ROUNDS_KEPT)
        self._ready = False
        self._starts_in_vain = 0
        self._unheld_since: float | None = None
        self._last_round = -1
        self._told_lost_head = b""  # its hash
        self._told_lost: dict[str, tuple[float, frozenset[str]]] = {}  # of that head: when and who, by reason

    def begin(self) -> None:
        """Begin to wait."""
        self._began_at = self._committed_at = self._context.now

    def woke(self) -> None:
        """Note that this process was frozen: messages that arrived meanwhile may still wait to be read."""
        self._woke_at = self._context.now

    @property
    def up_s(self) -> float:
        """Seconds since this process began."""
        return self._context.now - self._began_at

    # -- what it receives ----------------------------------------------------------------------------------------------

    @property
    def peers(self) -> list[str]:
        """All peers that have sent a status or an answer."""
        return [member.peer for member in self._heard]

    def heard(self, voter: Member, position: msg.Position) -> None:
        """Note the status of a voter."""
        if voter in self._heard or len(self._heard) < HEARD_MAX:
            self._heard[voter] = self._context.now
            self.positions[voter] = position

    def answered(self, voter: Member, fresh: bool) -> None:
        """Note an answer to an inquiry; `fresh`: one of this process."""
        self._heard[voter] = self._context.now
        if fresh:
            self._fresh.add(voter)

    def committed(self) -> None:
        """Note that this node is at a new head."""
        now, head = self._context.now, self._chain.head
        if head.attempt >= 0:  # the time until a start is no round's
            self._rounds_s.append(now - self._committed_at)
        self._committed_at, self._unheld_since = now, None
        if head.round > self._last_round:
            self._last_round, self._starts_in_vain = head.round, 0

    def started(self) -> None:
        """Note that this node starts a term, which counts as in vain until it ends a round."""
        self._ready = True
        self._starts_in_vain += 1

    # -- can the group go on -------------------------------------------------------------------------------------------

    @property
    def _round_s(self) -> float:
        """The usual length of a round; 0 while none was seen. A median, as a liar or a cut may have held up some."""
        return statistics.median_low(self._rounds_s) if self._rounds_s else 0.0

    @property
    def patient_s(self) -> float:
        """Seconds without answers after which voters count as lost: three rounds, or the configured time if that is
        less."""
        config = self._context.config
        return min(config.lost_s, max(3.0 * self._round_s, 4.0 * config.poll_s))

    @property
    def _doubled(self) -> float:
        return float(2 ** min(self._starts_in_vain, DOUBLINGS_MAX))

    @property
    def has_seen_commits(self) -> bool:
        """Whether this process has seen a commit."""
        return self._committed_at > self._began_at

    @property
    def goes_on(self) -> bool:
        """Whether this process has seen a commit within three rounds."""
        lately = self.has_seen_commits and self._context.now - self._committed_at < self.patient_s
        return lately and not self._starts_in_vain and self._ready

    @property
    def is_ready(self) -> bool:
        """Whether enough members of the newest head have answered this process that each quorum includes one of them:
        so a disk restored from a backup is noticed before it starts a term."""
        head = self._chain.head
        needed = len(head.members) - self._context.electorate.members_needed(len(head.members)) + 1
        self._ready = self._ready or sum(member in self._fresh for member in head.members) >= needed
        return self._ready

    def lost(self, barred: Collection[str]) -> str:
        """Return why the group cannot continue; empty while it may. `barred`: peers that no start takes in."""
        stood_s = self._stood_s
        if stood_s < self.patient_s:
            return ""
        alive = self._heard_within(self.patient_s) | {self._context.me}
        if not self._context.electorate.enough(self._chain.head, alive):
            return "too few members answer"
        acts = self._context.config.mode == "required"
        if not acts and not self._is_held(alive):
            return "no peer that answers has the state of the last head"
        stalled_s = max(self._context.config.stalled_s, 10.0 * self._round_s) * self._doubled
        came_back = stood_s > self.patient_s * self._doubled and self._leaves_out(alive, barred)
        if stood_s > stalled_s or (acts and came_back):
            return "nothing was committed for long"
        return ""

    @property
    def stands(self) -> bool:
        """Whether this process has seen no commit for ten rounds and `lost_s`; for `stalled_s`, if it has seen too few
        rounds to measure their length."""
        config = self._context.config
        known = len(self._rounds_s) >= ROUNDS_TELL
        usual_s = max(config.lost_s, 10.0 * self._round_s) if known else config.stalled_s
        return self._stood_s > usual_s

    @property
    def _stood_s(self) -> float:
        """Seconds without a commit in which this process was awake."""
        return self._context.now - max(self._began_at, self._woke_at, self._committed_at)

    def _leaves_out(self, heard: set[Member], barred: Collection[str]) -> bool:
        """Return whether former members without a place in this term have reached its first head before its first
        round: another start takes them in. The present members may be too few, or liars, to end a round."""
        head = self._chain.head
        if head.attempt >= 0:
            return False
        before = {member for one in self._chain.ancestors()[:REMEMBERED] for member in one.members}
        absent = (before - set(head.members)) & heard
        return any(self._is_held((member,)) for member in absent if member.peer not in barred)

    def _heard_within(self, seconds: float) -> set[Member]:
        return {member for member, at in self._heard.items() if self._context.now - at <= seconds}

    def _is_held(self, voters: Collection[Member]) -> bool:
        """Return whether one of these reports this node's head or a later one."""
        return any(self.positions.get(voter, (0, 0, 0)) >= position_of(self._chain.head) for voter in voters)

    def tell_lost(self, reason: str) -> None:
        """Warn the operator that the group cannot continue: each reason once a head, again once further members are
        away or after `TOLD_AGAIN_S`. `alone`: no member answers, so perhaps this machine's own connection is lost."""
        head, now = self._chain.head, self._context.now
        if self._told_lost_head != self._chain.hash:
            self._told_lost_head, self._told_lost = self._chain.hash, {}
        away = [m.peer for m in head.members if m not in self._heard_within(self.patient_s)]
        told_at, named = self._told_lost.get(reason, (now - TOLD_AGAIN_S, frozenset()))
        if now - told_at >= TOLD_AGAIN_S:
            named = frozenset()
        elif named.issuperset(away):
            return
        self._told_lost[reason] = (now, named.union(away))
        alone = len(away) == len(head.members)
        self._context.out.emit(QuorumLost(round=head.round, reason=reason, away=tuple(away), alone=alone))

    # -- what a start may do without the operator ----------------------------------------------------------------------

    def held(self) -> None:
        """Note that a peer has brought the state of the last head."""
        self._unheld_since = None

    def may_undo(self, base: Head) -> bool:
        """Return whether certified heads may be taken back whose state no peer has brought for a long time."""
        if base.round <= 0:
            self.tell_lost("no peer that answers has weights of the run")
            return False
        if self._unheld_since is None:
            self._unheld_since = self._context.now
        return self._context.now - self._unheld_since >= self._context.config.undo_s * self._doubled

    def trusts_few(self, heads: Iterable[Head]) -> bool:
        """Return whether a single member, or newcomers alone, may continue without the operator after those heads
        (newest first). Not if the group was larger recently: one or two cuts that leave the coordinator with a liar, or
        with newcomers, would give the run to them."""
        lately = itertools.islice(heads, REMEMBERED)
        return self._context.config.lone_survivor or all(len(head.members) < MANY for head in lately)
