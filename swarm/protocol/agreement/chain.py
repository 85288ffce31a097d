"""The certified heads at a node, and how it moves along them: fetch the state first, then leave the old head.

A head counts only along an unbroken chain of certificates from the head where this node stands, or from one that the
coordinator signed (a start of term, an endorsement). Positions and reports of other peers never count.

The keys of members that have left can still sign a second history after an old head. So a node without a head begins
where the coordinator is, if that answers, and at one node no head has two successors by votes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from peer.bounds import Latest
from peer.identity import Signed
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement import records as disk
from swarm.protocol.agreement.actions import Fetch
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.links import KeptLinks
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.proof import prove
from swarm.protocol.agreement.records import LINK_KEY, LinkRecord, links_in
from swarm.protocol.agreement.rules.shown_heads import ShownHeads
from swarm.protocol.head import Head, Member

HOLDERS_MAX: Final = 64
ALONE_POLLS: Final = 4.0  # without a message of the coordinator, until a newcomer goes by other peers
SPLITS_MAX: Final = 8
FAILED_MAX: Final = 64  # states that no peer brought, to remember
PAGE_BYTES: Final = 64 << 10  # of links in one message, so that checking their votes takes its reader some milliseconds


def position_of(head: Head) -> msg.Position:
    """Return the position of a head, by which heads of one run compare."""
    return (head.term, head.boot, head.round)


class Chain:
    """This node's head, the links that led to it, and certified heads beyond it."""

    def __init__(self, context: AgreementContext) -> None:
        self._context = context
        self.head: Head = context.config.genesis
        self.hash: bytes = self.head.hash
        self.holds: set[bytes] = set()
        """Hashes of the states that this node holds."""
        self.kept = b""
        """The hash of the state that this node has voted for."""
        self._links = KeptLinks()  # up to this node's head, by hash of their head, oldest first
        self._number = 0
        self._ahead = KeptLinks()  # certified heads beyond this one, each after the one before
        self._next: dict[bytes, bytes] = {}  # of these, by votes: hash of the head before each
        self.shown = ShownHeads()
        self._coordinator_at = 0.0  # of its last message, or when this process began
        self._goal = b""  # the last of these
        self._boots: dict[int, int] = {}  # of its term, and of those beyond, as first seen
        self._fetching = b""
        # States that no peer brought: how often, when to ask again.
        self._failed: Latest[bytes, tuple[int, float]] = Latest(FAILED_MAX)

    # -- start ---------------------------------------------------------------------------------------------------------

    def load(self, records: dict[str, bytes], states: Iterable[bytes]) -> None:
        """Take over what the disk holds."""
        found = links_in(records)
        for record in found:
            self._links.keep(record.link.head.hash, record.link)
        if found:
            self._number = found[-1].number + 1
            self.head, self.hash = found[-1].link.head, found[-1].link.head.hash
            self._boots = {self.head.term: self.head.boot}
        self.holds = set(states)
        self._coordinator_at = self._context.now

    # -- states --------------------------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Whether this node holds the state of its head. A coordinator needs none."""
        return self._context.config.is_coordinator or self.head.state_hash in self.holds

    def hold(self, state_hash: bytes) -> None:
        """Note that this node holds a state. It has room for the committed one, the one of its vote, and one more."""
        self.drop_candidates()
        self.holds.add(state_hash)

    def drop_candidates(self) -> None:
        """Note that the room for one more state is used again."""
        self.holds &= {self.head.state_hash, self.kept}

    def keep(self, state_hash: bytes) -> None:
        """Note that this node votes for a state that it holds, in the place of the one for which it voted before."""
        self.kept = state_hash
        self.drop_candidates()

    def fetched(self, state_hash: bytes, ok: bool) -> None:
        """Note the end of a `Fetch`, or that a state from disk is damaged."""
        if ok:
            self.hold(state_hash)
        else:
            self.holds.discard(state_hash)
        if state_hash == self._fetching:
            self._fetching = b""
            failures = self._failed.pop(state_hash, (0, 0.0))[0] + 1
            if not ok:
                again_at = self._context.now + self._context.config.poll_s * min(failures, 8)
                self._failed[state_hash] = (failures, again_at)

    # -- what others send ----------------------------------------------------------------------------------------------

    @property
    def known(self) -> tuple[bytes, ...]:
        """Hashes of heads from which others may continue the chain, for `AskChainMessage`."""
        return tuple(dict.fromkeys(name for name in (self._goal, self.hash) if name))

    @property
    def goal(self) -> Head:
        """The last head that is certified to this node, which may be on its way to it."""
        goal = self._ahead.get(self._goal)
        return goal.head if goal is not None else self.head

    @property
    def highest(self) -> msg.Position:
        """The position of that head."""
        return position_of(self.goal)

    def is_past(self, head_hash: bytes) -> bool:
        """Return whether this node was at that head before."""
        return head_hash != self.hash and (head_hash in self._links or head_hash == self._context.config.genesis.hash)

    def link(self, head_hash: bytes) -> msg.ChainLink | None:
        """Return the link of that head, on the chain to this node's head or beyond."""
        return self._links.get(head_hash) or self._ahead.get(head_hash)

    def following(self, head_hash: bytes) -> bytes:
        """Return the hash of the head that followed that one by votes, on the chain or beyond; empty if none did."""
        ways = itertools.chain(self._links.items(), self._ahead.items())
        return next((name for name, link in ways if link.start is None and link.head.previous == head_hash), b"")

    def ancestors(self) -> list[Head]:
        """Return this node's head and those before it, the last one first, as far as they are kept."""
        found, name = [self.head], self.head.previous
        while name in self._links:
            found.append(self._links[name].head)
            name = self._links[name].head.previous
        if name == self._context.config.genesis.hash and found[-1].round:
            found.append(self._context.config.genesis)
        return found

    def splits(self) -> list[Head]:
        """Return this node's head, and the bases of starts on its chain, from which another branch may continue."""
        names = [link.head.previous for link in self._links.values() if link.start is not None]
        return [self.head, *(self._links[name].head for name in names[-SPLITS_MAX:] if name in self._links)]

    def led_to(self, head_hash: bytes, after: bytes) -> Iterator[Head]:
        """Return a head at which this node has been and those before it, that one first, as far as they are kept and
        until the head `after`."""
        name = head_hash
        while name != after and (link := self._links.get(name)) is not None:
            yield link.head
            name = link.head.previous

    def takes_back(self, start: msg.StartBody) -> bool:
        """Return whether a start undoes a round of this node's chain without listing it: its round is not above this
        node's last one, and its base is another head. Whether that is known here says nothing: where the coordinator
        had lost sight of this node, it often is not."""
        here, name = set[bytes](), self.hash
        while (link := self._links.get(name)) is not None and link.head.attempt < 0:
            here.add(name)  # a start over this node's last round is none
            name = link.head.previous
        if link is None or start.head.round > link.head.round or len(start.undoes) == msg.LINKS_MAX:
            return False  # a full list has no room for all
        here.add(name)
        return here.isdisjoint((*start.undoes, start.head.previous))

    def after(self, known: Sequence[bytes]) -> tuple[msg.ChainLink, ...]:
        """Return the links that follow the latest of these heads, oldest first; else those from the last one that
        counts by itself. Long chains come in pages: the asker asks again."""
        chain = list(self._links.items())
        first = next((i + 1 for i in range(len(chain) - 1, -1, -1) if chain[i][0] in known), None)
        if first is None:
            first = max((i for i, (_, link) in enumerate(chain) if link.start or link.endorsement), default=0)
        page: list[msg.ChainLink] = []
        size = 0
        for _, link in chain[first : first + msg.LINKS_MAX]:
            size += len(encode(link))
            if page and size > PAGE_BYTES:
                break
            page.append(link)
        return tuple(page)

    def proof_of(self, head_hash: bytes) -> tuple[msg.ChainLink, ...]:
        """Return the proof that a head of this node's chain counts (`proof.prove`)."""
        return prove(self._links, head_hash, self._context.evidence)

    def heard_coordinator(self) -> None:
        """Note that the coordinator is up: it shows a newcomer where to begin."""
        self._coordinator_at = self._context.now

    def learn(self, links: Iterable[msg.ChainLink], source: str = "") -> None:
        """Take certified heads into account that the peer `source` (empty: this node itself) sends. Raises
        `ProtocolViolation` at the first one that is not certified; those before it count."""
        for link in links:
            name = link.head.hash
            if name in self._links or name in self._ahead or name == self.hash:
                if link.endorsement is not None and name in self._links:
                    self._endorse(name, link)
                continue
            if position_of(link.head) <= position_of(self.head) or link.head.run_id != self.head.run_id:
                continue
            if self._boots.get(link.head.term, link.head.boot) != link.head.boot:
                continue  # a second start of that number, by a coordinator that has lost the first one
            if not self._may_begin_at(link, source) or not self._counts(link):
                if self._context.config.is_coordinator:
                    continue  # a later one may count by itself
                return
            if link.start is None and self._next.setdefault(link.head.previous, name) != name:
                return
            for oldest in self._ahead.keep(name, link):
                self._next.pop(oldest.head.previous, None)
            self._boots.setdefault(link.head.term, link.head.boot)
            goal = self._ahead.get(self._goal)
            further = goal is None or position_of(link.head) > position_of(goal.head)
            if further and not self._is_overtaken(link):
                self._goal = name

    def _may_begin_at(self, link: msg.ChainLink, source: str) -> bool:
        """Return whether a node without a head may follow that link of that peer: the coordinator shows where to begin,
        and any peer may prove what follows. While the coordinator is silent, any peer may do both."""
        config = self._context.config
        if self.head.members or config.is_coordinator or config.mode == "required":
            return True
        if source in ("", config.peer, config.coordinator) or link.head.previous in self._ahead:
            return True
        return self._context.now - self._coordinator_at >= ALONE_POLLS * config.poll_s

    def _is_overtaken(self, link: msg.ChainLink) -> bool:
        """Return whether this node does not follow a start, which came too late. It does follow a round that was
        committed after that start. The coordinator follows whatever it has signed."""
        if link.start is None or self._context.config.is_coordinator:
            return False
        return self.takes_back(self._context.evidence.start(link.start))

    def overtaken(self) -> tuple[msg.ChainLink, ...]:
        """Return what the coordinator did not have when it signed the last start: the links from its base to this
        node's head. Empty if this node follows that start, or has none."""
        starts = [link for link in self._ahead.values() if link.start is not None]
        last = max(starts, key=lambda link: position_of(link.head), default=None)
        if last is None or self.highest >= position_of(last.head) or not self._is_overtaken(last):
            return ()
        return self.after((last.head.previous,))

    def _set_goal(self) -> None:
        self._next = {before: name for before, name in self._next.items() if name in self._ahead}
        if self._goal not in self._ahead or self._is_overtaken(self._ahead[self._goal]):
            leads = {name: link for name, link in self._ahead.items() if not self._is_overtaken(link)}
            self._goal = max(leads, key=lambda name: position_of(leads[name].head), default=b"")

    def _counts(self, link: msg.ChainLink) -> bool:
        """Return whether the head is proved to count; raise `ProtocolViolation` if it does not."""
        before = self.head if link.head.previous == self.hash else None
        if before is None and (known := self._ahead.get(link.head.previous)) is not None:
            before = known.head
        if before is None and self._context.config.is_coordinator:
            # It asks for the links before, even if the link has its own vote: it may have to go back to them.
            return self._context.evidence.is_signed_for(link) or self.shown.by_most(link.head.hash, (self.head,))
        return self._context.evidence.link_counts(link, before)

    def endorse(self, head_hash: bytes, signed: Signed) -> None:
        """Note the coordinator's endorsement of a head of the chain, so that newcomers may begin at it."""
        link = self._links.get(head_hash)
        if link is not None:
            self._endorse(head_hash, msgspec.structs.replace(link, endorsement=signed))

    def _endorse(self, name: bytes, link: msg.ChainLink) -> None:
        mine = self._links[name]
        signed = link.endorsement
        if mine.endorsement is None and signed is not None and self._context.evidence.endorsed(signed) == name:
            self._links[name] = msgspec.structs.replace(mine, endorsement=signed)

    # -- moving on -----------------------------------------------------------------------------------------------------

    def next_stop(self, is_building: Callable[[Head], bool]) -> list[msg.ChainLink] | None:
        """Return the path to the highest certified head whose state this node holds; None if it holds none.

        While the highest one's state is missing, fetch it unless this node is building it, and meanwhile continue in a
        term that it may follow: perhaps no peer has that state."""
        goal = self._ahead.get(self._goal)
        if goal is None:
            return None
        path = self._path(self._goal)
        while path:
            if self._context.config.is_coordinator or path[-1].head.state_hash in self.holds:
                return path
            path.pop()
        others = self._followed()
        last_of_each_term = {head.term: head for head in others}
        for head in (goal.head, *reversed(last_of_each_term.values())):
            if head.state_hash in self.holds or is_building(head) or self._fetch(head):
                break
        held = [head for head in others if head.state_hash in self.holds]
        return self._path(held[-1].hash) if held else None

    def _followed(self) -> list[Head]:
        """Return the heads to which this node may go while the state of the highest is missing, in order: those that
        continue its own head in its own term; all, if it has no head."""
        followed, reached = [], {self.hash}
        for name, link in sorted(self._ahead.items(), key=lambda item: position_of(item[1].head)):
            mine = link.head.term == self.head.term and link.head.previous in reached
            if mine or not self.head.members:
                reached.add(name)
                followed.append(link.head)
        return followed

    def _path(self, name: bytes) -> list[msg.ChainLink]:
        path: list[msg.ChainLink] = []
        while name in self._ahead:
            path.append(self._ahead[name])
            name = self._ahead[name].head.previous
        return path[::-1]

    def fetch_mine(self) -> None:
        """Fetch the state of this node's own head, if it is gone."""
        if not self.has_state:
            self._fetch(self.head)

    def _fetch(self, head: Head) -> bool:
        """Fetch the state of a head, and return whether that or another one is being fetched. One that no peer brought
        is tried again a while later, without waiting for a newer one."""
        _, again_at = self._failed.get(head.state_hash, (0, 0.0))
        if self._fetching or self._context.now < again_at:
            return bool(self._fetching)
        self._fetching = head.state_hash
        config = self._context.config
        peers = [member.peer for member in (*head.members, *self.head.members)]
        peers += [learner.member.peer for learner in head.learners]
        peers += list(self._context.known)  # newcomers that wait for the next round hold it, too
        holders = [peer for peer in dict.fromkeys(peers) if peer not in (config.peer, config.coordinator)]
        self._context.out.add(Fetch(head.state_hash, head, tuple(holders[:HOLDERS_MAX])))
        return True

    def adopt(self, path: Sequence[msg.ChainLink]) -> None:
        """Move to the last head of the path. The whole path goes to disk first; weights change only then."""
        for link in path:
            name = link.head.hash
            last = link is path[-1]
            state = b"" if self._context.config.is_coordinator or not last else link.head.state_hash
            record = encode(LinkRecord(self._number, link, last))
            self._context.out.persist(f"{LINK_KEY}{self._number % disk.LINKS_KEPT}", record, state)
            self._number += 1
            self._links.keep(name, link)
        self.head, self.hash = path[-1].head, path[-1].head.hash
        done = position_of(self.head)
        for name in [name for name, link in self._ahead.items() if position_of(link.head) <= done]:
            self._ahead.drop(name)
        self._boots = {head.term: head.boot for head in (self.head, *(link.head for link in self._ahead.values()))}
        self._set_goal()
        self.kept = b""
        self.drop_candidates()
        if self._fetching == self.head.state_hash:
            self._fetching = b""

    def is_voter(self, member: Member) -> bool:
        """Return whether that member votes on the next head."""
        return member in self._context.electorate.voters(self.head)
