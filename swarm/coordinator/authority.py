"""The authority's part in a run: it begins each group, and it regroups what is left where a majority was lost.

It holds no vote and no weights in training, so the run goes on without it. Whoever holds its key could fork the run;
nobody else can. It never regroups while a majority of the last commit is alive, and it waits before it believes that
members are gone, so that two halves do not both go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import trio

from peer.errors import BarnraiseError, ProtocolViolation
from peer.identity import sign_body
from peer.net.host import Host
from swarm.coordinator.durable_state import DurableState
from swarm.pipeline.config import STALENESS
from swarm.protocol import messages as say
from swarm.protocol.head import MEMBERS_MAX, Head, Member
from swarm.protocol.quorum import (
    ASKED_MAX,
    HeadCandidate,
    ask_head_reports,
    majority_speaks,
    open_regroup,
    rank_heads,
)

ROUND_TRIP_S: Final = 1.0
JOIN_REQUEST_LASTS_S: Final = 6.0
GONE_AFTER_S: Final = 6.0  # a majority must be missing this long: a frozen machine may thaw, a link may come back
DEAD_AFTER_S: Final = 0.5  # but who has hung up, cannot go on without the others, and is missed by them: only this long
LOST_AFTER_S: Final = 20.0  # before an earlier round is gone on from: somebody may come back with a later one
STRANGERS_AFTER_S: Final = 600.0  # nobody known must have answered this long before a stage is what strangers say it is
BACK_S_MAX: Final = 120.0  # further than this no run is taken back for peers that were no members at the end
STAGE_BACK_S_MAX: Final = 3600.0  # a stage may be: whoever kept its commits is a member of another one


class Authority:
    """Of one group: of the whole run, or of the replicas of one stage. `head` is the last head it signed or saw.

    It begins the group once that has a peer and the run has `min_peers`, those that take part `elsewhere`, in other
    groups, included; a run of `rounds` (0: for ever) that is complete, in the `others` too, stays so, whoever comes
    back to it. `completed` is set once this group is. It regroups `max_peers` at most. `swarm.coordinator.handlers`
    answers calls on its behalf.

    In a pipeline a stage may lose all of its replicas, and a peer of another one go on from a commit that it has kept.
    `fast_forward` then brings that commit to the place in the run where the other stages are: what the stage has
    learned since is lost, but its weights are of the same epoch as theirs. Its events name the `stage`. `others` are
    the authorities of the other stages.
    """

    def __init__(
        self,
        host: Host,
        genesis: Head,
        min_peers: int,
        known_peers: Callable[[], Iterable[str]],
        durable: DurableState,
        rounds: int = 0,
        elsewhere: Callable[[], int] = lambda: 0,
        fast_forward: Callable[[Head], Head] | None = None,
        stage: int | None = None,
        others: Callable[[], Iterable[Authority]] = tuple,
        max_peers: int = MEMBERS_MAX,
    ) -> None:
        self.head = open_regroup(durable.signed, host.peer_id, genesis.run_id) if durable.signed else genesis
        if durable.seen is not None and durable.seen.head.position > self.head.position:
            self.head = durable.seen.head
        self.me = Member(host.peer_id, "authority")
        self._genesis = genesis
        self._host, self._identity, self._events = host, host.identity, host.events
        self._place = {} if stage is None else {"stage": stage}  # what its events say besides
        self._min_peers, self._rounds, self._elsewhere, self._fast_forward = min_peers, rounds, elsewhere, fast_forward
        self._others, self._max_peers = others, max_peers
        self.completed = trio.Event()
        self._known_peers = known_peers
        self._durable = durable
        self._requests: dict[str, tuple[say.JoinRequest, float]] = {}
        self._asked = trio.Event()
        self._known_seen_at = 0.0  # in trio's time: when a peer last answered that we know as a member
        self._unheard_since: float | None = None  # a majority of the head's members, whatever they go on from
        self._missing_since: float | None = None
        self._said_missing = -1

    @property
    def begun(self) -> bool:
        return self._durable.signed is not None

    @property
    def group(self) -> str:
        """The group's id."""
        return self._genesis.run_id

    @property
    def peers(self) -> int:
        """How many take part, or (before it has begun) wait to."""
        return len(self.head.members) if self.begun else len(self._joining_for(self.head))

    def report(self) -> say.HeadReport:
        """What the authority signed last: for peers that know nobody else yet."""
        signed = self._durable.signed
        if signed is None:
            return say.HeadReport(self.head, self.me, "waiting for peers", None)
        head = open_regroup(signed, self._identity.peer_id, self.head.run_id)
        return say.HeadReport(head, self.me, "coordinating", signed)

    async def run(self) -> None:
        """Watch over the run for ever."""
        self._known_seen_at = trio.current_time()
        if self.begun:
            self._tell_head()
        self._note_completion()
        while True:
            with trio.move_on_after(ROUND_TRIP_S):
                await self._asked.wait()
            self._asked = trio.Event()
            if not self.begun:
                await self._begin()
            else:
                await self._watch()

    async def _begin(self) -> None:
        waiting = self._joining_for(self.head)
        if waiting and len(waiting) + self._elsewhere() >= self._min_peers:
            await self._regroup(self.head, waiting)

    async def _watch(self) -> None:
        """Follow the run's head; where its majority is gone for `GONE_AFTER_S`, begin a new term with what is left."""
        peers, most = self._whom_to_ask(), len(self.head.members) + ASKED_MAX
        answers = await ask_head_reports(self._host.rpc, peers, timeout_s=3.0, group=self.group, most=most)
        head_reports = [(peer, report) for peer, report in answers if report.member.peer == peer]
        if any(self._knows(peer) for peer, _ in head_reports):
            self._known_seen_at = trio.current_time()
        candidates = rank_heads(head_reports, self.me.peer, self._genesis, self.me, self.head)
        counting = [s for s in candidates if s.head.members and self._is_credible(s)]
        may_follow = self._may_follow(head_reports)
        if may_follow and counting and counting[0].head.position > self.head.position:
            self._see(counting[0].head)
            self._tell_head()
        if counting and _gathered(counting[0].head, head_reports):
            self._missing_since = None
            return
        best = self._latest(head_reports)
        if best is None or (self.completed.is_set() and all(other.completed.is_set() for other in self._others())):
            self._missing_since = None  # whoever was missing is not counted as such while nobody can be asked
            self._say_who_is_missing()
            return
        alive = {s.member for _, s in head_reports if best.has(s.member)}  # who is a commit behind is about to catch up
        if len(alive) >= best.quorum:
            self._missing_since = None
            return
        now = trio.current_time()
        if self._missing_since is None:
            self._missing_since = now
            members = len(best.members)
            self._events.emit("majority_missing", round=best.round, alive=len(alive), members=members, **self._place)
        elif now - self._missing_since >= self._regroup_wait_s(best, head_reports):
            # Whoever stands at that head goes on: members first, and those that knock with its state.
            joining = {member.peer: member for member in self._joining_for(best)}
            here = joining | {peer: s.member for peer, s in head_reports if s.head.hash == best.hash}
            group = sorted(here.values(), key=lambda m: (not best.has(m), not self._knows(m.peer), m))
            if group:
                self._missing_since = None
                await self._regroup(best, group)

    def _may_follow(self, head_reports: Sequence[tuple[str, say.HeadReport]]) -> bool:
        """Whether to go where a later head counts. Where few members of our own answer, heads count by theirs, whom a
        liar names as it likes: one bad poll must not take us away from the others for ever. They must be missing for
        `GONE_AFTER_S`, while somebody answers; then it is as when we were away, and all others have been replaced."""
        if self._fast_forward is not None:
            return True
        if not head_reports or majority_speaks(head_reports, self.me.peer, self._genesis, self.head):
            self._unheard_since = None
            return True
        now = trio.current_time()
        if self._unheard_since is None:
            self._unheard_since = now
        return now - self._unheard_since >= GONE_AFTER_S

    def _whom_to_ask(self) -> list[str]:
        """The members of the last head first, then those that were members lately, then strangers by lot: anybody may
        knock, or publish that it takes part."""
        members = [member.peer for member in self.head.members]
        others = {*self._known_peers(), *self._joining()} - {*members, self.me.peer}
        return members + sorted(others, key=lambda peer: (not self._knows(peer), random.random()))

    def _regroup_wait_s(self, best: Head, head_reports: Sequence[tuple[str, say.HeadReport]]) -> float:
        """How long a majority must be missing before the rest goes on from `best`.

        Where the missing ones are too few to go on by themselves nothing can fork. If they have hung up on us, and some
        member says that it waits for them too, they are dead and not just slow, or out of our sight."""
        if best.round < self.head.round:
            return LOST_AFTER_S
        members = {s.member: s.phase for _, s in head_reports if best.has(s.member)}
        missing = [member.peer for member in best.members if member not in members]
        hung_up = not self._host.connected.intersection(missing)
        missed = say.NO_MAJORITY in members.values()
        return DEAD_AFTER_S if len(missing) < best.quorum and hung_up and missed else GONE_AFTER_S

    def _see(self, head: Head) -> None:
        self.head, self._unheard_since = head, None  # another group has all of its time
        self._note_completion()
        self._durable.see(head, BACK_S_MAX if self._fast_forward is None else STAGE_BACK_S_MAX)

    def _tell_head(self) -> None:
        """For who looks on."""
        self._events.emit("head_seen", round=self.head.round, members=len(self.head.members), **self._place)

    def _note_completion(self) -> None:
        if self._rounds and self.head.round >= self._rounds and not self.completed.is_set():
            self.completed.set()
            self._events.emit("run_completed", round=self.head.round, **self._place)

    def believes(self, peer: str, head: bytes, round: int) -> bool:
        """Whether `peer`, standing at the head of that hash and round, may be gone on from.

        Members of the head seen last may, wherever they stand: they come back from a checkpoint, or committed what we
        did not see. Of an earlier round others may if they were members, and stand where the run stood, within the last
        minutes. The only ones to hold the last commit may be gone for good with it; but a stranger, or somebody from
        long ago, cannot undo what others did. Of a pipeline's stage others keep a commit, and whoever stands where the
        stage stood within the last hour may go on from there. Nobody stands beyond the end of the run."""
        if self._rounds and round > self._rounds:
            return False
        if any(member.peer == peer for member in self.head.members):
            return True
        ahead, knew = round > self.head.round, self._knows(peer)
        if self._fast_forward is None:
            return round >= self.head.round or (knew and self._durable.saw(head))
        return (ahead and knew) or self.vouches(head, round)

    def vouches(self, head: bytes, round: int) -> bool:
        """Of a pipeline's stage, whether that is one of its commits as far as we know, whoever keeps it: we saw it; or
        the other stages are so far on that we cannot have seen all, and they can have come no further without it."""
        if head == self.head.hash or self._durable.saw(head):
            return True
        furthest = max((other.head.round for other in self._others()), default=0)
        return furthest - self.head.round > STALENESS and self.head.round < round <= furthest + STALENESS

    def _is_credible(self, candidate: HeadCandidate) -> bool:
        """A majority of a head's own members says little where a stage has lost all of its replicas: who makes a head
        up names its members. Somebody must stand there who may be gone on from; but where nobody of those that we know
        is left, as everybody may have come and gone while we were away, strangers are the run in the end. Nothing is
        committed beyond the end of the run."""
        head = candidate.head
        if self._rounds and head.round > self._rounds:
            return False
        if self._fast_forward is None or trio.current_time() - self._known_seen_at > STRANGERS_AFTER_S:
            return True
        return any(self.believes(peer, head.hash, head.round) for peer in candidate.holders)

    def _knows(self, peer: str) -> bool:
        """Whether it is a member of the head seen last, or was one in the time that is remembered."""
        return any(member.peer == peer for member in self.head.members) or self._durable.knew(peer)

    def _say_who_is_missing(self) -> None:
        """Newcomers wait, and nobody is there who could hand them the last commit."""
        if self._joining() and self._said_missing != self.head.round:
            self._said_missing = self.head.round
            members = [member.peer for member in self.head.members]
            self._events.emit("members_away", round=self.head.round, members=members, **self._place)

    def _latest(self, head_reports: Sequence[tuple[str, say.HeadReport]]) -> Head | None:
        """The head to go on from: of the latest signed term; among its heads the one that most members of the head seen
        last have committed, so that no single boast counts, and from there on to what one of them committed next; else
        the latest of all. Of earlier rounds only those to which somebody may take the run back."""
        heads: dict[bytes, Head] = {}
        known: dict[bytes, set[str]] = {}
        for _, report in head_reports:
            if not report.head.members or report.regroup is None:
                continue
            try:
                start = open_regroup(report.regroup, self.me.peer, self.head.run_id)
            except ProtocolViolation:
                continue
            if start.term != report.head.term or start.round > report.head.round:
                continue
            if not self.believes(report.member.peer, report.head.hash, report.head.round):
                continue
            heads[report.head.hash] = report.head
            if self.head.has(report.member):
                for committed in (report.head.hash, report.head.previous):
                    known.setdefault(committed, set()).add(report.member.peer)
        best = max(heads.values(), key=lambda h: (h.term, len(known.get(h.hash, ())), h.round), default=None)
        while best is not None:
            following = [h for name, h in heads.items() if h.previous == best.hash and name in known]
            if not following:
                break
            best = max(following, key=lambda h: len(known[h.hash]))
        return best

    async def _regroup(self, head: Head, members: Sequence[Member]) -> None:
        """Sign a head of a new term over the same state, keep it, and tell its members: the first of these."""
        term = max(head.term, self.head.term)
        fresh = head.regrouped(tuple(members[: self._max_peers]), term + 1)
        if self._fast_forward is not None and self.begun:
            fresh = self._fast_forward(fresh)
            if fresh.round != head.round:
                self._events.emit("stage_set_back", round=head.round, goes_on_at=fresh.round, **self._place)
        signed = sign_body(self._identity, say.REGROUP_KIND, fresh)
        self._durable.keep(signed)
        self._see(fresh)
        self._events.emit("regrouped", term=fresh.term, round=fresh.round, members=len(fresh.members), **self._place)
        order = say.Regroup(signed, {m.peer: self._host.book.get(m.peer) for m in fresh.members})
        async with trio.open_nursery() as nursery:
            for member in fresh.members:
                nursery.start_soon(self._tell, member.peer, order)

    async def _tell(self, peer: str, order: say.Regroup) -> None:
        try:
            await self._host.rpc.call(peer, say.REGROUP, order, timeout_s=5.0)
        except BarnraiseError as error:
            self._events.emit("regroup_untold", peer=peer, reason=str(error))  # it will ask by itself

    def _joining(self) -> list[str]:
        now = trio.current_time()
        self._requests = {peer: entry for peer, entry in self._requests.items() if entry[1] > now}
        return list(self._requests)

    def _joining_for(self, head: Head) -> list[Member]:
        name = head.hash
        self._joining()
        return sorted(request_join.member for request_join, _ in self._requests.values() if request_join.head == name)

    def request_join(self, request_join: say.JoinRequest) -> None:
        """A peer asks to take part."""
        if len(self._requests) < 1024:
            self._requests[request_join.member.peer] = (request_join, trio.current_time() + JOIN_REQUEST_LASTS_S)

    def look(self) -> None:
        """A member asks for a regroup: look at once."""
        self._asked.set()


def _gathered(head: Head, head_reports: Sequence[tuple[str, say.HeadReport]]) -> bool:
    """Whether a majority of its members stand at that head, so that they can go on from it."""
    return len({s.member for _, s in head_reports if s.head == head and head.has(s.member)}) >= head.quorum
