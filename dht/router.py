"""Calls to other nodes, and the view of the network that their outcomes build up.

A peer that answers enters the routing table. A peer that refuses or breaks a connection leaves it at once and is not
asked again for a while (back-off). A slow peer is skipped and probed in the background with a longer deadline; the
probe decides.

In a run, trust comes first (`peer.net.admissions`). Only members enter the table, which in an open run are all that
have entered it. A stranger is asked while it is connected; it is named to others, and dialled, only once a dial of
ours has found it at the address that it claims. So it cannot have us or others dial a third party. Two of the trusted
peers make that dial; the others learn of it from them, so that a claim costs a third party two dials, not one a member.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, TypeVar

import msgspec
import trio

from dht.clock import SwarmClock
from dht.config import DhtConfig, NodeConfig
from dht.key import as_bytes, as_int, nearest, node_key, record_key
from dht.lookup import Lookup
from dht.origin import TRUSTED, Origin, seen_at
from dht.partition import SplitWatch
from dht.protocol import ADDRESSES_MAX, FIND, NODES_MAX, Contact, FindReply, FindRequest, WrongNamespace
from dht.records import CLOCK_TOLERANCE_S
from dht.routing_table import BUCKET_SIZE, RoutingTable
from peer.bounds import Latest
from peer.errors import DeadlineExceeded, DialError, NetworkError, ProtocolViolation, RemoteError
from peer.net.backoff import Backoff
from peer.net.host import Host
from peer.net.rpc import Method, Reply
from peer.notifier import Notifier

Req = TypeVar("Req", bound=msgspec.Struct)
Rep = TypeVar("Rep", bound=msgspec.Struct)

REMEMBERED_MAX: Final = 1024
PROBES_MAX: Final = 16
NAMED_MAX: Final = 256
GREETINGS_AT_ONCE: Final = 8
VERIFY_AFTER_S: Final = 5.0  # a stranger that stays connected for so long is dialled back
VERIFIERS: Final = 2  # trusted peers that dial a stranger back
BAN_S: Final = 600.0
REDIAL_JITTER: Final = 0.25
GOODBYE_S: Final = 1.0  # a call that arrives so soon after its caller's goodbye was sent before it
ADDRESSES_FRESH_S: Final = 2.0  # how old our view of our own addresses may be: a relay may add one

PeerFault = (NetworkError, ProtocolViolation)
"""Exceptions of a call that are the called peer's fault."""


class Router:
    """The view one node has of the others. Background probes run in `nursery`."""

    def __init__(self, host: Host, config: NodeConfig, clock: SwarmClock, nursery: trio.Nursery) -> None:
        self.host = host
        self.namespace = config.namespace
        self.events = host.events
        self.tuning: DhtConfig = config.tuning
        self.anchors = frozenset(address.rpartition("/p2p/")[2] for address in config.bootstrap) - {host.peer_id}
        """The bootstrap peers, which the user has named: every read asks them, every record is stored at them."""
        self.clock = clock
        self.table = RoutingTable(host.peer_id)
        self.split = SplitWatch()
        self.own_key = node_key(host.peer_id)
        self._nursery = nursery
        self._down = Backoff(self.tuning.redial_min_s, self.tuning.redial_max_s, jitter=REDIAL_JITTER)
        self._bans = Backoff(BAN_S, BAN_S, factor=1)
        self._left_at = Latest[str, float](REMEMBERED_MAX)
        self._probing: set[str] = set()
        self._told = Latest[str, tuple[bool, tuple[str, ...]]](REMEMBERED_MAX)  # (trusted, addresses as last told)
        self._named = Latest[str, None](NAMED_MAX)  # peers named by others and not met yet
        self._verify_at = Latest[str, float](NAMED_MAX)  # strangers, and when to dial them back
        self._addresses: tuple[str, ...] = ()
        self._addresses_until = -float("inf")
        self.merged_at = -float("inf")
        """When two networks were last merged (trio's time)."""
        self._clock_reported = False

    # -- the view ------------------------------------------------------------------------------------------------

    def addresses(self) -> tuple[str, ...]:
        """Return our own addresses, as sent to others. A node without any cannot be dialled, and no peer lists it."""
        now = trio.current_time()
        if now >= self._addresses_until:
            self._addresses = self.host.addresses[:ADDRESSES_MAX]
            self._addresses_until = now + ADDRESSES_FRESH_S
        return self._addresses

    def called(self, peer: str, addresses: Iterable[str]) -> None:
        """Note that a peer has called us, and the addresses that it sent."""
        if not self.left_since(peer, trio.current_time() - GOODBYE_S):
            self._learn_own_claim(peer, tuple(addresses))
            self._heard(peer)

    def _heard(self, peer: str) -> None:
        self._left_at.pop(peer, None)
        self._down.reset(peer)
        self._named.pop(peer, None)
        if not self.host.book.get(peer) or self._bans.paused(peer):
            return  # without an address it can be reached only by its connection to us: no use to others
        if not self.host.admissions.allows(peer, "member"):
            return  # a client reads, and keeps nothing for others
        self.split.peer_back(peer)
        origin = self.table.origin(peer)
        if origin is None or origin.trusted != self.is_trusted(peer):
            origin = self.origin(peer)
        if self.table.heard(peer, trio.current_time(), origin):
            if not self._is_known(peer):
                self._verify_at[peer] = trio.current_time() + VERIFY_AFTER_S
            self.events.emit("dht_peer_found", peer=peer, peers=len(self.table))
            self.judge_split()

    def is_trusted(self, peer: str) -> bool:
        """Return whether strangers give way to a peer: never at a host of no run."""
        admissions = self.host.admissions
        return admissions.is_trusted(peer) or (peer in self.anchors and admissions.guarded)

    def origin(self, peer: str) -> Origin:
        """Return where a peer that calls us, or has answered, is seen."""
        return TRUSTED if self.is_trusted(peer) else seen_at(self.host.remote_ip(peer))

    def _is_known(self, peer: str) -> bool:
        """Return whether we may dial a peer and name it to others: not for a stranger's claim alone."""
        if not self.host.admissions.guarded:
            return True
        return bool(self.host.book.vouched(peer)) or self.is_trusted(peer)

    def lost(self, peer: str, why: str) -> None:
        """Note that a peer is dead or cannot be reached."""
        now = trio.current_time()
        self._down.failed(peer)
        self._named.pop(peer, None)
        self.clock.forget(peer)
        if self.table.remove(peer):
            if self._is_known(peer):
                self.split.peer_lost(peer, now)
            self.events.emit("dht_peer_lost", peer=peer, why=why, peers=len(self.table))
            self.judge_split()

    def has_left(self, peer: str) -> bool:
        """Return whether a peer has said goodbye and sent nothing since."""
        return peer in self._left_at

    def left_since(self, peer: str, time_s: float) -> bool:
        """Return whether a peer has said goodbye after `time_s` (trio's time)."""
        return self._left_at.get(peer, -float("inf")) >= time_s

    def left(self, peer: str) -> None:
        """Note that a peer has said goodbye."""
        self._left_at[peer] = trio.current_time()
        self.split.peer_back(peer)
        if self.table.remove(peer):
            self.events.emit("dht_peer_left", peer=peer, peers=len(self.table))
        self.judge_split()

    def ban(self, peer: str, why: str) -> None:
        """Do not ask a peer for ten minutes, because it has proved to be hostile."""
        self._bans.failed(peer)
        self.table.remove(peer)
        self.events.emit("dht_peer_banned", peer=peer, why=why, seconds=BAN_S)

    def available(self, peer: str) -> bool:
        """Return whether a peer may be asked now: it is not us, not down, not banned and not being probed."""
        if peer == self.host.peer_id or peer in self._probing or self._bans.paused(peer):
            return False
        return not self._down.paused(peer)

    def is_probing(self, peer: str) -> bool:
        """Return whether a peer was too slow, and a probe is under way."""
        return peer in self._probing

    def judge_split(self) -> None:
        """Emit an event when the number of lost peers begins or ceases to look like a split."""
        change = self.split.judge(len(self.table), trio.current_time())
        if change is not None:
            self.events.emit(f"dht_split_{change}", why="peers lost", lost=len(self.split.lost), alive=len(self.table))
        if change == "healed":
            self.merged()

    def merged(self) -> None:
        """Note that two networks have merged: other nodes may be nearest to a key, and reads ask more stores."""
        self.merged_at = trio.current_time()

    # -- asking --------------------------------------------------------------------------------------------------

    async def ask(self, peer: str, method: Method[Req, Rep], body: Req, timeout_s: float) -> Reply[Rep]:
        """Make one call and update the view by its outcome. Raises what `rpc.call` raises."""
        sent = trio.current_time()
        if not self._is_known(peer) and not self.host.is_connected(peer):
            self.lost(peer, "left before its address was verified")
            raise DialError(f"{peer} is not connected, and its address is only claimed: wait until it calls", "refused")
        try:
            reply = await self.host.rpc.call(peer, method, body, timeout_s=timeout_s)
        except RemoteError as error:
            if error.code == WrongNamespace.__name__:
                self.lost(peer, "belongs to another run")
            raise
        except DeadlineExceeded:
            if timeout_s < self.tuning.probe_timeout_s:
                self.suspect(peer)
            else:
                self.lost(peer, f"no answer in {timeout_s:g} s")
            raise
        except PeerFault as error:
            self.lost(peer, str(error))
            raise
        if not self.left_since(peer, sent):
            self._heard(peer)
        clock_s = getattr(reply.body, "clock_s", None)
        if clock_s is not None:
            self._watch_clock(peer, clock_s, trio.current_time() - sent)
        return reply

    async def ask_nearest(self, peer: str, target: int, timeout_s: float) -> FindReply:
        """Ask `peer` for the peers that it knows near a point, and note their addresses."""
        request = FindRequest(self.namespace, self.addresses(), as_bytes(target))
        reply = (await self.ask(peer, FIND, request, timeout_s)).body
        for contact in reply.nodes:
            if contact.peer == self.host.peer_id:
                continue
            if self._wants_address(contact.peer):
                self._learn(contact.peer, contact.addresses, told_by=peer)
            if contact.peer not in self.table and self._is_known(contact.peer):
                self._named[contact.peer] = None
        return reply

    def reply_timeout_s(self, peer: str) -> float:
        """Return how long to wait for a peer before skipping it: longer for a new one, which must be dialled first."""
        return self.tuning.reply_timeout_s * (1 if peer in self.table else 2)

    def suspect(self, peer: str) -> None:
        """Skip a peer that was too slow, and probe it in the background."""
        if peer not in self._probing and len(self._probing) < PROBES_MAX:
            self._probing.add(peer)
            self._nursery.start_soon(self._probe, peer)

    async def _probe(self, peer: str) -> None:
        try:
            await self.ask_nearest(peer, self.own_key, self.tuning.probe_timeout_s)
        except PeerFault:
            pass  # `ask` has updated the view
        finally:
            self._probing.discard(peer)

    # -- finding -------------------------------------------------------------------------------------------------

    async def find(self, target: int, seeds: Iterable[str] | None = None) -> list[str]:
        """Return the live peers nearest to a point, nearest first, at most k, without us.

        Starts from the routing table, or from `seeds` alone. Takes at most `lookup_budget_s`.
        """
        starts = self.table.nearest(target, NODES_MAX) if seeds is None else seeds
        lookup = Lookup(
            target,
            self.tuning.stores,
            self.tuning.parallel,
            [peer for peer in starts if self.available(peer)],
            exclude=[self.host.peer_id],
        )
        with trio.move_on_after(self.tuning.lookup_budget_s):
            await self._drive(lookup, target)
        for peer in lookup.pending():
            self.suspect(peer)
        return lookup.result()

    async def _drive(self, lookup: Lookup, target: int) -> None:
        progress = Notifier()

        async def step(peer: str) -> None:
            try:
                reply = await self.ask_nearest(peer, target, self.reply_timeout_s(peer))
            except PeerFault:
                lookup.failed(peer)
            else:
                lookup.answered(peer, [contact.peer for contact in reply.nodes if self.available(contact.peer)])
            progress.notify()

        silences = 0
        async with trio.open_nursery() as nursery:
            while not lookup.finished:
                for peer in lookup.take(extra=silences * self.tuning.parallel):
                    nursery.start_soon(step, peer)
                silences = 0 if await progress.wait(self.tuning.hedge_s) else silences + 1
            nursery.cancel_scope.cancel()

    async def refresh(self) -> None:
        """Look up our own neighbourhood and random far points, and probe peers that have long been silent.

        In a network small enough to keep every record everywhere, meet all its nodes."""
        await self.find(self.own_key)
        if len(self.table) >= NODES_MAX:  # in a smaller network every answer names all peers
            small = len(self.table) < self.tuning.replicas
            for bucket in self.table.occupied() if small else [random.choice(self.table.occupied())]:
                # A random point of one bucket: peers in bucket b differ from us in bit b-1 and agree above it.
                bit = bucket - 1
                await self.find(self.own_key ^ (1 << bit) ^ random.getrandbits(bit))
        await self._greet_named()
        for peer in self.table.silent_since(trio.current_time() - self.tuning.refresh_max_s)[:PROBES_MAX]:
            self.suspect(peer)

    async def _greet_named(self) -> None:
        """Ask peers that others have named, until we know as many as keep every record."""
        limit = trio.CapacityLimiter(GREETINGS_AT_ONCE)

        async def greet(peer: str) -> None:
            async with limit:
                if len(self.table) < self.tuning.replicas and peer not in self.table and self.available(peer):
                    with suppress(*PeerFault):
                        await self.ask_nearest(peer, self.own_key, self.reply_timeout_s(peer))

        async with trio.open_nursery() as nursery:
            for peer in tuple(self._named):
                nursery.start_soon(greet, peer)
        self._named.clear()

    async def verify_strangers(self) -> None:
        """Dial back strangers that stay, one after another, so that others may learn of them. Runs until cancelled.

        Most identities of a flood do not stay that long, and a failure closes their address (`UnprovenDials`)."""
        while True:
            await trio.sleep(VERIFY_AFTER_S / 5)
            now = trio.current_time()
            while self._verify_at and next(iter(self._verify_at.values())) <= now:
                peer, _ = self._verify_at.popitem(last=False)
                waits = peer in self.table and not self._is_known(peer) and self.host.is_connected(peer)
                if waits and self._is_verifier(self.host.remote_ip(peer) or peer):
                    await self.host.verify(peer)
                elif waits:  # unless it is told to us meanwhile, it may be our turn when another verifier has left
                    self._verify_at[peer] = now + VERIFY_AFTER_S

    def _is_verifier(self, place: str) -> bool:
        """Return whether we are to dial what is claimed of an IP address: each address has its own verifiers."""
        own = self.host.peer_id
        others = [peer for peer in self.table if self.is_trusted(peer) and self.available(peer)]
        if len(others) >= VERIFIERS and not self.host.admissions.is_trusted(own):
            return False  # others would not believe us
        point = as_int(record_key(self.namespace, "verify", place))
        return own in nearest(point, [*others, own], VERIFIERS)

    def contacts(self, target: int, asker: str) -> tuple[Contact, ...]:
        """Return the answer to a peer's `ask_nearest`."""
        known = (peer for peer in self.table if peer != asker and self.available(peer) and self._is_known(peer))
        peers = sorted(nearest(target, known, BUCKET_SIZE), key=lambda peer: not self.is_trusted(peer))[:NODES_MAX]
        addresses = self.host.book.vouched if self.host.admissions.guarded else self.host.book.get
        return tuple(Contact(peer, found[:ADDRESSES_MAX]) for peer in peers if (found := addresses(peer)))

    def _wants_address(self, peer: str) -> bool:
        """Return whether to note addresses sent by a third peer: only if the book has none, or only claims, or those it
        has do not work. So no peer can crowd out good addresses.
        """
        return not self.host.book.get(peer) or peer in self._down or not self._is_known(peer)

    def _learn(self, peer: str, addresses: tuple[str, ...], *, told_by: str) -> None:
        if told_by in self.anchors:
            self.host.book.add(peer, addresses)
        else:
            self.host.learn(peer, addresses, told_by=told_by)

    def _learn_own_claim(self, peer: str, addresses: tuple[str, ...]) -> None:
        told = (self.host.admissions.is_anchor(peer), addresses)
        if self._told.get(peer) != told:
            self._learn(peer, addresses, told_by=peer)
        self._told[peer] = told

    def _watch_clock(self, peer: str, clock_s: float, round_trip_s: float) -> None:
        guarded = self.host.admissions.guarded
        if guarded and not self.is_trusted(peer):
            return
        self.clock.bounded = guarded
        seen = seen_at(self.host.remote_ip(peer)) if guarded else Origin()
        prefix = seen.prefix if seen.is_public else ""
        self.clock.observe(peer, clock_s, round_trip_s, prefix=prefix, is_anchor=peer in self.anchors)
        ahead_s = self.clock.disagreement_s
        wrong = abs(ahead_s) > CLOCK_TOLERANCE_S / 2
        if wrong and not self._clock_reported:
            self.events.emit(
                "dht_clock_wrong",
                peers_ahead_s=round(ahead_s, 3),
                corrected_s=round(self.clock.correction_s, 3),
                remedy="set this machine's clock (for instance by NTP)",
            )
        self._clock_reported = wrong
