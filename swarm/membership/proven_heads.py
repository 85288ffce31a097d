"""Proved heads of a group, and the peers that hold their states: for observers without a vote in the group.

One honest answer is enough, since a head counts by its proof (`swarm.protocol.agreement.proof`) and not by how many
report it. A lie is reported as the event `peer_penalized`, and changes nothing else. No peer can prove that there is no
later head.

The keys of members that have left can still sign a second history after an old head. So the coordinator's last word
counts, which is its answer or its signature in any proof: later heads have to lead on from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import trio

from peer.catalogue.groups import PeerPenalized
from peer.errors import BarnraiseError, ProtocolViolation, RemoteError
from peer.identity import Identity
from peer.net.host import Host
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.messages import ChainLink
from swarm.protocol.agreement.proof import ProofChecker
from swarm.protocol.head import Head, Member
from swarm.protocol.messages import HEAD_REPORT, AskHead, HeadReport
from swarm.protocol.signer import KeySigner

POLL_S: Final = 4.0
CHECKS_S: Final = 10.0  # for all proofs together, after the last answer
ASKED_MAX: Final = 64
AT_ONCE: Final = 64  # calls; an answer has at most 1 MiB


@dataclass(frozen=True)
class ProvenHead:
    """A head that its links prove, and those that answered from near it."""

    head: Head
    links: tuple[ChainLink, ...]
    holders: tuple[str, ...] = ()
    """The peers at this head or the one after it: both hold its state, as they report. The coordinator holds only the
    first state of all and, of a complete run, the last."""
    near: tuple[Member, ...] = ()
    """All peers at this head, the one before or the one after: some learn of a commit a moment later."""

    def leads_from(self, head: Head) -> bool:
        """Return whether the proof shows that this head is, or follows, `head` or a later one that the coordinator has
        signed for. Every head follows the first of all."""
        if self.head == head or not head.members or any(link.head == head for link in self.links):
            return True
        return bool(self.links) and position_of(self.links[0].head) > position_of(head)


async def ask_proven_heads(
    host: Host,
    config: AgreementConfig,
    peers: Iterable[str],
    timeout_s: float = POLL_S,
    most: int = ASKED_MAX,
    *,
    itself: bool = False,
    silent: set[str] | None = None,
) -> list[ProvenHead]:
    """Ask the first `most` peers for their head in the group; return those that are proved, best first.

    Of `config` only the group's facts count (`agreement_config`). Peers that do not answer in `timeout_s` seconds, or
    are in another group, are left out. `itself`: this peer counts as one of them, if it is among `peers`. `silent` gets
    those that did not answer at all."""
    asked = [peer for peer in dict.fromkeys(peers) if itself or peer != host.peer_id][:most]
    poll = _Poll(host, config)
    at_once = trio.CapacityLimiter(AT_ONCE)
    until = trio.current_time() + timeout_s
    each_s = timeout_s / max(1, -(-len(asked) // AT_ONCE))  # so that all are asked, even if the first ones are frozen

    answered = set[str]()

    async def ask(peer: str) -> None:
        async with at_once:
            left_s = min(each_s, until - trio.current_time())
            if left_s <= 0:
                return
            try:
                report = (await host.rpc.call(peer, HEAD_REPORT, AskHead(poll.group), timeout_s=left_s)).body
            except RemoteError:
                answered.add(peer)
                return
            except BarnraiseError:
                return
            answered.add(peer)
            await poll.take(peer, report)

    with trio.move_on_at(until + CHECKS_S):
        async with trio.open_nursery() as nursery:
            for peer in asked:
                nursery.start_soon(ask, peer)
    if silent is not None:
        silent.update(set(asked) - answered)
    return poll.found()


class ProofBook:
    """Proofs of one group's heads, each head checked once."""

    def __init__(self, config: AgreementConfig) -> None:
        genesis = config.genesis
        self._checker = ProofChecker(config, KeySigner(Identity.generate()))  # it signs nothing
        self.proven: dict[bytes, ProvenHead] = {genesis.hash: ProvenHead(genesis, ())}
        """By hash of the head."""

    def add(self, head: Head, links: tuple[ChainLink, ...]) -> None:
        """Check a proof, which may take a second of computing. Raises `ProtocolViolation`."""
        name = head.hash
        if name not in self.proven:
            self._checker.check(head, links)
            self.proven[name] = ProvenHead(head, links)


class _Poll:
    """The answers so far."""

    def __init__(self, host: Host, config: AgreementConfig) -> None:
        self.group, self._genesis = config.genesis.run_id, config.genesis
        self._host, self._coordinator, self._book = host, config.coordinator, ProofBook(config)
        self._said: dict[Member, bytes] = {}  # the hash of the head where each says that it stands
        self._word: Head | None = None  # where the coordinator says that it stands
        self._kept = b""  # the hash of the head whose state the coordinator says that it serves
        self._checking = trio.Lock()

    async def take(self, peer: str, report: HeadReport) -> None:
        """Take what a peer reports. Without a proof it counts only if another peer proves that head."""
        head = report.head
        async with self._checking:
            try:
                if head.run_id != self.group or report.member.peer != peer:
                    raise ProtocolViolation("a report is of another group, or names another peer than its sender")
                if report.links:
                    await trio.to_thread.run_sync(self._book.add, head, report.links)
            except ProtocolViolation as error:
                self._host.events.emit(PeerPenalized(peer=peer, reason=str(error)))
                return
        self._said[report.member] = head.hash
        if peer == self._coordinator:
            self._word = head
            self._kept = head.hash if report.kept else b""

    def found(self) -> list[ProvenHead]:
        """Return the proved heads that peers report, best first."""
        at: dict[bytes, set[Member]] = {}
        word = self._last_word()
        for member, name in self._said.items():
            if name in self._book.proven and self._agrees(self._book.proven[name], word):
                at.setdefault(name, set()).add(member)
        after: dict[bytes, set[Member]] = {}
        for name, members in at.items():
            after.setdefault(self._book.proven[name].head.previous, set()).update(members)
        found = []
        for name in at:
            proven = self._book.proven[name]
            holding = at[name] | after.get(name, set())
            near = holding | at.get(proven.head.previous, set())
            kept = name == self._kept or proven.head.round == 0
            holders = {m.peer for m in holding if m.peer != self._coordinator or kept}
            found.append(replace(proven, holders=tuple(sorted(holders)), near=tuple(sorted(near))))
        return sorted(found, key=lambda proven: position_of(proven.head), reverse=True)

    def _last_word(self) -> Head:
        """Return the furthest head that the coordinator is at, or has signed in a proof."""
        signed = [proven.links[0].head for proven in self._book.proven.values() if proven.links]
        said = [self._genesis, *signed] if self._word is None else [self._genesis, *signed, self._word]
        word: Head = max(said, key=position_of)
        return word

    def _agrees(self, proven: ProvenHead, word: Head) -> bool:
        """Return whether a proved head is of the same history as the coordinator's last word."""
        if position_of(proven.head) >= position_of(word):
            return proven.leads_from(word)
        told = self._book.proven.get(word.hash)  # of heads before, those that led there, as far as that shows them
        way = [link.head for link in told.links] if told else []
        return not way or position_of(proven.head) < position_of(way[0]) or proven.head in way
