"""A node of the agreement with a clock, a network and a disk: events in, actions out. It has no rule of its own.

calls, timers, files, threads --events--> AgreementNode.step --actions--> sends, timers, records
                                                                      `--> the actor: trainer and weights
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

import msgspec
import trio

from peer.bounds import MEMBERS_MAX
from peer.catalogue.groups import PeerPenalized, PrefixFull
from peer.catalogue.machine import RecordsUnsaved
from peer.catalogue.rounds import RunCompleted
from peer.errors import BarnraiseError, ProtocolViolation, RoundError
from peer.events import Field
from peer.net.host import Host
from peer.net.wire import LARGE_HEADER_BYTES
from peer.notifier import Notifier
from swarm.protocol.agreement import actions, events
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.messages import (
    LINKS_MAX,
    ChainLink,
    ChainMessage,
    JoinMessage,
    Message,
    PromiseMessage,
    VoteMessage,
)
from swarm.protocol.agreement.node import AgreementNode
from swarm.protocol.agreement.rules.evidence import signed_in
from swarm.protocol.agreement.work import Work
from swarm.protocol.head import Head, Member
from swarm.protocol.messages import HEADS_MAX, HeadReport
from swarm.protocol.signer import KeySigner, check_all
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.newcomers import NewcomerFilter
from swarm.rounds.records import RecordFiles
from swarm.rounds.sending import MessageSender
from swarm.rounds.timers import Timers

LOOK_S: Final = 0.25  # between two looks at the failure detector
KNOWN_S: Final = 2.0  # between two looks at who publishes that it takes part
UNSAVED: Final = "cannot write its disk"
"""The phase of a peer that can promise nothing, up to its reason."""
PAUSED_GRACES: Final = 2.0  # times `grace_s`, after which a paused voter answers
RETRY_S: Final = 1.0  # after the disk has refused a record
CHECKED_HERE_MAX: Final = 64  # signatures, 4 ms; more at once are checked in a thread
CHECKED_AHEAD_MAX: Final = 8192  # there, of one call; beyond, the node checks them itself
PAGE_BYTES: Final = 64 << 10  # of heads in one answer
REPORT_BYTES_MAX: Final = LARGE_HEADER_BYTES - (4 << 10)  # room for the rest of a header


Tell = Callable[[str, dict[str, Field]], None]
"""Reports an event, by name and fields, to the operator and the logs."""


@dataclass(frozen=True, kw_only=True)
class DriverOptions:
    """Options that only some groups need."""

    states: Sequence[bytes] = ()
    """At a replica: the hashes of the states that the disk holds."""
    proof: Sequence[ChainLink] = ()
    """Of a state which did not come by this node's own records: a backup's."""
    restored: bool = False
    """As `events.Started`."""
    per_prefix: int = MEMBERS_MAX
    """Members of one address prefix in a head at most: further newcomers are ignored."""
    tell: Tell | None = None
    """In place of the host's event log."""
    keeps: Callable[[bytes], bool] = lambda state_hash: False
    """At the coordinator: whether it serves the state with that hash."""


NO_OPTIONS: Final = DriverOptions()


class Actor(Protocol):
    """Carries out what needs a trainer or weights. Actions come in order, one at a time."""

    async def perform(self, action: actions.Action, tasks: trio.Nursery) -> None:
        """Carry out an action other than sends, timers, records and words, or begin to, in `tasks`."""

    async def save(self, state_hash: bytes) -> None:
        """Put on disk what leads to the state with that hash. Raises ResourceError."""


class GroupDriver:
    """One peer's node in one group. It stands where its records say; with `run` it takes part."""

    def __init__(
        self,
        host: Host,
        config: AgreementConfig,
        work: Work,
        records: RecordFiles,
        timeouts: AdaptiveTimeouts,
        known_peers: Callable[[], Iterable[str]],
        options: DriverOptions = NO_OPTIONS,
    ) -> None:
        """`known_peers`: those that publish that they belong to the group."""
        self.config = config
        self.completed = trio.Event()
        """Set once the run's last round is committed."""
        self.changed = Notifier()
        """Notified after each event."""
        self._paused = False
        self._host, self._records, self._known_peers, self._options = host, records, known_peers, options
        self._tell: Tell = options.tell or (lambda event, fields: host.events.emit(event, **fields))
        self._newcomers = NewcomerFilter(host, options.per_prefix)
        self._signer = KeySigner(host.identity)
        self._node = AgreementNode(config, self._signer, work)
        self._checking = trio.CapacityLimiter(1)
        self._sender = MessageSender(host.rpc, config.genesis.run_id, lambda: timeouts.answer_s, host.events)
        self._timers = Timers(lambda id: self.feed(events.TimerFired(id)))
        self._inbox: deque[events.Event] = deque()
        self._stepping = False
        self._to_do: deque[actions.Action] = deque()
        self._to_write: deque[actions.Persist] = deque()
        self.unsaved = ""  # why the disk takes no records, as a phase
        """Why the disk takes no records, as a phase; empty while it does."""
        self._work_came, self._write_came = Notifier(), Notifier()
        self._accused: dict[str, str] = {}
        self._left_out: set[str] = set()
        started = records.read(), tuple(options.states), secrets.token_hex(8), secrets.token_bytes(32)
        self.feed(events.Started(*started, options.restored))
        self._shown = self._node.head
        if 0 < config.rounds <= self.head.round:  # the node tells of it at a commit
            self.completed.set()
        for first in range(0, len(options.proof), LINKS_MAX):
            shown = ChainMessage(tuple(options.proof[first : first + LINKS_MAX]))
            self.feed(events.Received(config.peer, shown))

    # -- what others may look at ---------------------------------------------------------------------------------------

    @property
    def group(self) -> str:
        return self.config.genesis.run_id

    @property
    def head(self) -> Head:
        """Where the node stands; its weights may be a moment behind."""
        return self._node.head

    @property
    def me(self) -> Member:
        return self._node.me

    @property
    def workers(self) -> list[str]:
        """The peers that a leader asks for their counted samples."""
        return self._node.workers

    @property
    def phase(self) -> str:
        """The peer's activity, for display: it is in the peer's record, so other peers learn of a full disk by it."""
        return self.unsaved or ("finished" if self.completed.is_set() else self._node.phase)

    def report(self) -> HeadReport:
        """Return the last head that is committed here, with its proof. A head that the node has moved to is not shown
        before: its link may not be on disk yet."""
        head = self._shown
        kept = self._options.keeps(head.state_hash)
        report = HeadReport(head, self.me, self.phase, self._node.proof_of(head.hash), kept)
        if len(msgspec.msgpack.encode(report)) <= REPORT_BYTES_MAX:
            return report
        self._host.events.emit("proof_too_large", round=head.round, links=len(report.links))
        return HeadReport(head, self.me, self.phase)

    def page(self, head_hash: bytes, after: bytes) -> tuple[Head, ...]:
        """Return the heads that led to that one, newest first, until the head `after`; the first ones if they are
        many. Empty if that head is not known here."""
        page: list[Head] = []
        room = PAGE_BYTES
        for head in islice(self._node.led_to(head_hash, after), HEADS_MAX):
            room -= len(msgspec.msgpack.encode(head))
            if page and room < 0:
                break
            page.append(head)
        return tuple(page)

    # -- events --------------------------------------------------------------------------------------------------------

    def feed(self, event: events.Event) -> None:
        """Take an event. Its actions are carried out soon."""
        self._inbox.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._inbox:
                for action in self._node.step(trio.current_time(), self._inbox.popleft()):
                    self._sort(action)
        finally:
            self._stepping = False
        self.changed.notify()

    def pause(self, paused: bool) -> None:
        """Note that this machine's owner has paused or resumed the peer's work.

        A paused voter answers so late that leaders plan without it: they wait for one that they can do without for
        `grace_s` only. So it leaves the electorate like any member that contributes nothing, and until then no group
        that needs its vote lacks it."""
        self._paused = paused
        self.feed(events.Paused(paused))

    async def take(self, peer: str, messages: Sequence[Message]) -> None:
        """Take messages, as `receive`. Where they hold many signatures, a thread checks these first: else nothing else
        would happen here meanwhile. Raises `RoundError` if they are of a peer that was left out."""
        if peer in self._left_out:
            raise RoundError("this peer has been found out to merge falsely: it takes no part any more")
        self._sender.elsewhere.discard(peer)
        signed = list(
            islice((entry for message in messages for entry in signed_in(message, self.head)), CHECKED_AHEAD_MAX)
        )
        if len(signed) > CHECKED_HERE_MAX:
            signed = await trio.to_thread.run_sync(check_all, signed, limiter=self._checking)
            with self._signer.knowing(signed):
                self.receive(peer, messages)
        else:
            self.receive(peer, messages)

    def receive(self, peer: str, messages: Sequence[Message]) -> None:
        """Take messages. Raises `ProtocolViolation` if one accuses its sender, which is then penalized."""
        self._accused.pop(peer, None)
        for message in messages:
            if not isinstance(message, JoinMessage) or self._lets_in(peer):
                self.feed(events.Received(peer, message))
        reason = self._accused.pop(peer, None)
        if reason is not None:
            raise ProtocolViolation(reason)

    def _lets_in(self, peer: str) -> bool:
        """Return whether a request to join may reach the node."""
        let_in = self._newcomers.lets_in(peer, self.head)
        for prefix, waiting in self._newcomers.cap.newly_full().items():
            most = self._options.per_prefix
            full = PrefixFull(round=self.head.round, prefix=prefix, waiting=waiting, most=most)
            self._tell(*full.stream_form())
        return let_in

    def _sort(self, action: actions.Action) -> None:
        match action:
            case actions.SetTimer():
                self._timers.set(action.id, action.at)
            case actions.CancelTimer():
                self._timers.cancel(action.id)
            case actions.Persist():
                self._to_write.append(action)
                self._write_came.notify()
            case actions.Accuse():
                self._accused[action.peer] = action.reason
                self._to_do.append(action)
                self._work_came.notify()
            case _:
                self._to_do.append(action)
                self._work_came.notify()

    def leave_out(self, peer: str, reason: str) -> None:
        """Exclude a peer permanently, and ignore its messages: this peer has first-hand proof that it lied."""
        self._left_out.add(peer)
        self._host.rpc.server.penalize(peer, reason)

    # -- actions -------------------------------------------------------------------------------------------------------

    async def run(self, actor: Actor) -> None:
        """Carry out actions and watch the other peers, until cancelled."""
        async with trio.open_nursery() as tasks:
            tasks.start_soon(self._timers.run)
            tasks.start_soon(self._write_all, actor)
            tasks.start_soon(self._do_all, actor, tasks)
            tasks.start_soon(self._watch)
            tasks.start_soon(self._meet)

    async def _do_all(self, actor: Actor, tasks: trio.Nursery) -> None:
        while True:
            while self._to_do:
                await trio.lowlevel.checkpoint_if_cancelled()  # an action before may have had no place to stop
                await self._do(self._to_do.popleft(), actor, tasks)
            self._sender.send(self._node.head.round + 1, tasks)
            await self._work_came.wait()

    async def _do(self, action: actions.Action, actor: Actor, tasks: trio.Nursery) -> None:
        match action:
            case actions.Send():
                if self._paused and isinstance(action.message, VoteMessage | PromiseMessage):
                    tasks.start_soon(self._send_late, action, tasks)
                else:
                    self._sender.add(action.peer, action.message)
            case actions.Emit():
                fields: dict[str, Field] = {
                    name: list(value) if isinstance(value, tuple) else value for name, value in action.fields.items()
                }
                self._tell(action.event, fields)
                if action.event == RunCompleted.event_name():
                    self.completed.set()
                    self.changed.notify()
            case actions.Accuse():
                proved = action.proof is not None
                self._host.events.emit(PeerPenalized(peer=action.peer, reason=action.reason, proved=proved))
            case actions.CommitHead():
                self._sender.send(action.head.round, tasks)  # before what may take long
                await actor.perform(action, tasks)
                self._shown = action.head
                self._follow(action.head)
            case _:
                await actor.perform(action, tasks)

    async def _send_late(self, action: actions.Send, tasks: trio.Nursery) -> None:
        await trio.sleep(PAUSED_GRACES * self.config.grace_s)
        self._sender.add(action.peer, action.message)
        self._sender.send(self._node.head.round + 1, tasks)

    def _follow(self, head: Head) -> None:
        """Watch the peers of a head."""
        peers = [member.peer for member in head.members]
        self._host.admissions.trust("head", peers)
        learners = [learner.member.peer for learner in head.learners]
        self._host.watch((peer for peer in (*peers, *learners) if peer != self._host.peer_id), cause=self.group)
        self.changed.notify()

    async def _write_all(self, actor: Actor) -> None:
        """Write records in order, those that wait together at once; each state before its record."""
        while True:
            while self._to_write:
                batch = list(self._to_write)
                try:
                    for persist in batch:
                        if persist.state:
                            await actor.save(persist.state)
                    records = {persist.key: persist.record for persist in batch}
                    await trio.to_thread.run_sync(self._records.write, records)
                except BarnraiseError as error:  # nothing is promised meanwhile
                    self.unsaved = f"{UNSAVED}: {_why(error)}"
                    self._host.events.emit(RecordsUnsaved(reason=str(error)))
                    await trio.sleep(RETRY_S)
                    continue
                self.unsaved = ""
                for _ in batch:
                    self._to_write.popleft()
                self.feed(events.Persisted(batch[-1].id))
            await self._write_came.wait()

    # -- other peers ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Tell the node whom the failure detector suspects, and who has left the group though it lives."""
        down: frozenset[str] = frozenset()
        while True:
            suspects = self._host.suspects | self._left_out | self._sender.elsewhere
            for peer in sorted(suspects - down):
                self.feed(events.PeerDown(peer))
            for peer in sorted(down - suspects):
                self.feed(events.PeerUp(peer))
            down = suspects
            await trio.sleep(LOOK_S)

    async def _meet(self) -> None:
        """Tell the node of peers of the run that are in no head."""
        known: set[str] = set()
        while True:
            here = set(self._known_peers()) - {self._host.peer_id}
            for peer in sorted(here - known):
                self.feed(events.PeerUp(peer))
            known = here
            await trio.sleep(KNOWN_S if known else LOOK_S)


def _why(error: BarnraiseError) -> str:
    """Return why a write has failed, without a path of this machine: others read it."""
    cause = error.__cause__
    if isinstance(cause, FileNotFoundError):
        return "its home was deleted"
    return (cause.strerror if isinstance(cause, OSError) else None) or "see its log"
