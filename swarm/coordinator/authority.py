"""The authority of one group: begins it, and regroups the remaining peers when a majority is lost.

The authority has no vote and no weights in training, so the run continues without it. Its key could fork the run; no
other key can. It never regroups while a majority of the last commit's members is alive. It waits before it believes
that members are gone, so that two halves do not both continue.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import trio

from peer.errors import BarnraiseError
from peer.events import Field
from peer.identity import sign_body
from peer.net.address_prefix import prefix_of
from peer.net.host import Host
from swarm.coordinator.durable_state import DurableState
from swarm.coordinator.history import GroupHistory
from swarm.coordinator.majority_watch import MajorityWatch
from swarm.coordinator.rules import GroupRules, RegroupTimeouts
from swarm.coordinator.run_progress import RunProgress
from swarm.coordinator.waiting_peers import WaitingPeers
from swarm.protocol import messages as say
from swarm.protocol.head import Head, Member
from swarm.protocol.prefix_cap import FullPrefixes, Newcomers, admit
from swarm.protocol.quorum import (
    ASKED_MAX,
    ask_head_reports,
    majority_speaks,
    rank_heads,
)

ANSWER_S: Final = 3.0
TELL_S: Final = 5.0

HeadReports = Sequence[tuple[str, say.HeadReport]]
"""What peers report, by peer id."""


class Authority:
    """Begins and regroups one group: the whole run, or the replicas of one stage.

    The group begins once it has a peer and the run has `min_peers` in all groups. It stays complete once all groups
    are. In a pipeline a stage may lose all of its replicas, and a peer of another stage restore it from a commit that
    it kept. `RunProgress.fast_forward` then brings that commit to the position of the other stages: what the stage
    learned since is lost, but its weights are of the same epoch as theirs.

    `swarm.coordinator.handlers` serves the calls of peers.
    """

    def __init__(
        self,
        host: Host,
        rules: GroupRules,
        durable: DurableState,
        known_peers: Callable[[], Iterable[str]],
        progress: RunProgress | None = None,
        timeouts: RegroupTimeouts | None = None,
    ) -> None:
        """`known_peers`: those whose records say that they belong to the group."""
        self.me = Member(host.peer_id, "authority")
        self.completed = trio.Event()
        self._host, self.rules, self._known_peers = host, rules, known_peers
        self._progress = progress or RunProgress()
        self._progress.add(self)
        self._timeouts = timeouts or RegroupTimeouts()
        self.history = GroupHistory(rules, durable, host.peer_id, self._progress)
        self._watch = MajorityWatch(self._timeouts)
        self._waiting = WaitingPeers(self._timeouts.join_request_s, rules.members_per_prefix)
        self._full_prefixes = FullPrefixes()
        self._wanted = trio.Event()
        self._away_told_of = -1

    @property
    def head(self) -> Head:
        """The last head that the authority signed or saw."""
        return self.history.head

    @property
    def begun(self) -> bool:
        return self.history.signed is not None

    @property
    def group(self) -> str:
        """The group's id."""
        return self.rules.genesis.run_id

    @property
    def peers(self) -> int:
        """How many peers take part or, before the group has begun, wait to."""
        return len(self.head.members) if self.begun else len(self._first_members().admitted)

    def report(self) -> say.HeadReport:
        """Return what the authority signed last, for peers that know no member yet."""
        head = self.history.signed_head
        if head is None:
            return say.HeadReport(self.head, self.me, "waiting for peers")
        return say.HeadReport(head, self.me, "coordinating", regroup=self.history.signed)

    def request_join(self, request: say.JoinRequest, prefix: str) -> None:
        """Note that a peer, seen at an address of that prefix, asks to take part."""
        self._waiting.add(request, prefix, trio.current_time())

    def look(self) -> None:
        """Look at the group at once: a member asks for a regroup."""
        self._wanted.set()

    async def run(self) -> None:
        """Watch the group until cancelled."""
        self._watch.known_answered(trio.current_time())
        if self.begun:
            self._emit_head()
        self._note_completion()
        while True:
            with trio.move_on_after(self._timeouts.poll_s):
                await self._wanted.wait()
            self._wanted = trio.Event()
            if not self.begun:
                await self._begin()
            else:
                await self._poll()

    async def _begin(self) -> None:
        admission = self._first_members()
        self._tell_full(admission)
        if admission.admitted and self._progress.peers >= self.rules.min_peers:
            await self._regroup(self.head, admission.admitted)

    def _first_members(self) -> Newcomers:
        """Choose the members that would begin now."""
        return self._admit(self._waiting_at(self.head), ())

    def _admit(self, newcomers: Iterable[tuple[Member, str]], staying: Sequence[Member]) -> Newcomers:
        prefixes = [self._prefix(member.peer) for member in staying]
        return admit(newcomers, prefixes, self.rules.members_per_prefix, self.rules.max_peers - len(staying))

    def _prefix(self, peer: str) -> str:
        return prefix_of(self._host.remote_ip(peer))

    async def _poll(self) -> None:
        """Follow the group's head. Where its majority has been gone long enough, regroup the rest."""
        peers, most = self._peers_to_ask(), len(self.head.members) + ASKED_MAX
        answers = await ask_head_reports(self._host.rpc, peers, timeout_s=ANSWER_S, group=self.group, most=most)
        reports = [(peer, report) for peer, report in answers if report.member.peer == peer]
        now = trio.current_time()
        if self._follow(reports, now):
            self._watch.gathered()
            return
        best = self.history.choose_start(reports)
        if best is None or self._progress.completed:
            self._watch.gathered()
            self._emit_members_away(now)
            return
        # Reports of any head count: a member that is a commit behind is about to catch up.
        alive = {report.member for _, report in reports if best.has(report.member)}
        if len(alive) >= best.quorum:
            self._watch.gathered()
            return
        missing_s = self._watch.missing_s(now)
        if missing_s is None:
            self._emit("majority_missing", round=best.round, alive=len(alive), members=len(best.members))
        elif missing_s >= self._regroup_wait_s(best, reports):
            await self._regroup_rest(best, reports)

    def _follow(self, reports: HeadReports, now: float) -> bool:
        """Take over a later head that counts. Return whether a majority of the best one can continue from it."""
        if any(self.history.knows(peer) for peer, _ in reports):
            self._watch.known_answered(now)
        ranked = rank_heads(reports, self.me.peer, self.rules.genesis, self.me, self.head)
        trust_strangers = self._watch.trusts_strangers(now)
        heads = [c.head for c in ranked if c.head.members and self.history.is_credible(c, trust_strangers)]
        if self._may_follow(reports, now) and heads and heads[0].position > self.head.position:
            self._see(heads[0])
            self._emit_head()
        return bool(heads) and _is_gathered(heads[0], reports)

    def _may_follow(self, reports: HeadReports, now: float) -> bool:
        """Return whether a later head that counts may be followed.

        Where no majority of the last head's members answers, a head counts by the members that it names itself, and a
        liar names them as it likes. One bad poll must not lead the authority away from the other peers. The majority
        must be silent for `gone_s` while other peers answer; then all of its members may have been replaced.
        """
        if self.rules.stage is not None:
            return True
        if not reports or majority_speaks(reports, self.me.peer, self.rules.genesis, self.head):
            self._watch.heard()
            return True
        return self._watch.may_leave(now)

    def _peers_to_ask(self) -> list[str]:
        """Return members of the last head, then former members, then strangers in random order.

        The order matters: any peer may ask to join, or publish that it takes part.
        """
        members = [member.peer for member in self.head.members]
        others = {*self._known_peers(), *self._waiting.peers(trio.current_time())} - {*members, self.me.peer}
        return members + sorted(others, key=lambda peer: (not self.history.knows(peer), random.random()))

    def _regroup_wait_s(self, best: Head, reports: HeadReports) -> float:
        """Return how long a majority must be missing before the rest continues from `best`.

        Where the missing members are too few to continue alone, nothing can fork. If they also closed their
        connections, and a member reports that it waits for them, they are dead and not just slow or out of reach.
        """
        if best.round < self.head.round:
            return self._timeouts.lost_s
        phases = {report.member: report.phase for _, report in reports if best.has(report.member)}
        missing = [member.peer for member in best.members if member not in phases]
        hung_up = not self._host.connected.intersection(missing)
        missed = say.NO_MAJORITY in phases.values()
        dead = len(missing) < best.quorum and hung_up and missed
        return self._timeouts.dead_s if dead else self._timeouts.gone_s

    async def _regroup_rest(self, best: Head, reports: HeadReports) -> None:
        """Regroup the peers that hold the state of `best`: its members first, then known peers, then others."""
        waiting = {member.peer: (member, prefix) for member, prefix in self._waiting_at(best)}
        holders = {peer: member for peer, (member, _) in waiting.items()}
        holders |= {peer: report.member for peer, report in reports if report.head.hash == best.hash}
        group = sorted(holders.values(), key=lambda m: (not best.has(m), not self.history.knows(m.peer), m))
        staying = [member for member in group if best.has(member)][: self.rules.max_peers]
        newcomers = [(m, waiting[m.peer][1] if m.peer in waiting else self._prefix(m.peer)) for m in group]
        admission = self._admit(newcomers[len(staying) :], staying)
        self._tell_full(admission)
        if group:
            self._watch.gathered()
            await self._regroup(best, [*staying, *admission.admitted])

    async def _regroup(self, head: Head, members: Sequence[Member]) -> None:
        """Sign a head of a new term over the state of `head`, keep it, and send it to its members."""
        term = max(head.term, self.head.term)
        fresh = head.regrouped(tuple(members), term + 1)
        if self.rules.stage is not None and self.begun:
            fresh = self._progress.fast_forward(fresh)
            if fresh.round != head.round:
                self._emit("stage_set_back", round=head.round, goes_on_at=fresh.round)
        signed = sign_body(self._host.identity, say.REGROUP_KIND, fresh)
        self.history.sign(signed)
        self._see(fresh)
        self._emit("regrouped", term=fresh.term, round=fresh.round, members=len(fresh.members))
        message = say.Regroup(signed, {m.peer: self._host.book.get(m.peer) for m in fresh.members})
        async with trio.open_nursery() as nursery:
            for member in fresh.members:
                nursery.start_soon(self._tell, member.peer, message)

    async def _tell(self, peer: str, message: say.Regroup) -> None:
        try:
            await self._host.rpc.call(peer, say.REGROUP, message, timeout_s=TELL_S)
        except BarnraiseError as error:
            self._host.events.emit("regroup_untold", peer=peer, reason=str(error))  # the peer will ask

    def _see(self, head: Head) -> None:
        self._watch.heard()  # the new group has all of its time
        self.history.see(head)
        self._note_completion()

    def _waiting_at(self, head: Head) -> list[tuple[Member, str]]:
        return self._waiting.members_at(head.hash, trio.current_time())

    # -- events --------------------------------------------------------------------------------------------------------

    def _emit(self, name: str, **fields: Field) -> None:
        stage = {} if self.rules.stage is None else {"stage": self.rules.stage}
        self._host.events.emit(name, **fields, **stage)

    def _emit_head(self) -> None:
        self._emit("head_seen", round=self.head.round, members=len(self.head.members))

    def _note_completion(self) -> None:
        if self.rules.rounds and self.head.round >= self.rules.rounds and not self.completed.is_set():
            self.completed.set()
            self._emit("run_completed", round=self.head.round)

    def _tell_full(self, admission: Newcomers) -> None:
        """Tell, once for each address prefix, that peers wait because too many of it take part."""
        for prefix, waiting in self._full_prefixes.fresh(admission).items():
            most = self.rules.members_per_prefix
            self._emit("prefix_full", round=self.head.round, prefix=prefix, waiting=waiting, most=most)

    def _emit_members_away(self, now: float) -> None:
        """Tell, once for each round, that joiners wait while no peer can send them the last commit."""
        if self._waiting.peers(now) and self._away_told_of != self.head.round:
            self._away_told_of = self.head.round
            self._emit("members_away", round=self.head.round, members=[member.peer for member in self.head.members])


def _is_gathered(head: Head, reports: HeadReports) -> bool:
    """Return whether a majority of the members of `head` is at it, so that they can continue."""
    return len({r.member for _, r in reports if r.head == head and head.has(r.member)}) >= head.quorum
