"""Joining the network and staying in it: bootstrap peers, the address cache, redialling, healing splits.

Joining tries all bootstrap peers at once and, a moment later, the cached peers. The first answer ends it. After that
the node asks each bootstrap peer for its view from time to time, redials those it cannot reach with back-off, and tries
lost and cached peers again. If one of them lives in another network, the two are merged.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import trio

from dht.partition import views_disjoint
from dht.protocol import ADDRESSES_MAX, FindReply
from dht.router import REDIAL_JITTER, PeerFault, Router
from peer.errors import ConfigError, DeadlineExceeded, DialError, DialReason, ResourceError
from peer.net.address_book import AddressBook
from peer.net.backoff import Backoff

CACHED_PEERS_MAX: Final = 256
CACHE_HEAD_START_S: Final = 0.3  # bootstrap peers get this long before the cached ones are tried too
REDIALS_AT_ONCE: Final = 4

_TELLING: Final[tuple[DialReason, ...]] = ("wrong_peer", "refused", "timeout", "unreachable")


class Bootstrap:
    """The links of one node to the rest of the network. Call `join` once, then `run` in the background."""

    def __init__(
        self,
        router: Router,
        addresses: Sequence[str],
        cache: Path | None,
        met: trio.MemoryReceiveChannel[str] | None = None,
    ) -> None:
        self._router = router
        self._met = met
        self._tuning = router.tuning
        own = f"/p2p/{router.host.peer_id}"
        self._addresses = tuple(dict.fromkeys(address for address in addresses if not address.endswith(own)))
        self._failures: dict[str, tuple[DialReason, str]] = {}
        self._cache = cache
        self._cached = AddressBook(ADDRESSES_MAX)
        self._backoff = Backoff(self._tuning.redial_min_s, self._tuning.redial_max_s, jitter=REDIAL_JITTER)
        self._strangers_backoff = Backoff(
            self._tuning.redial_min_s, self._tuning.redial_strangers_max_s, jitter=REDIAL_JITTER
        )
        if cache is not None:
            self._cached.load(cache)

    # -- joining -------------------------------------------------------------------------------------------------

    async def join(self) -> None:
        """Find the other nodes. Raises DialError if there were addresses and no peer answered."""
        if not self._addresses and not self._cached.peers:
            return
        reached = False
        async with trio.open_nursery() as nursery:

            async def try_address(address: str) -> None:
                nonlocal reached
                if await self._greet_address(address) is not None:
                    reached = True
                    nursery.cancel_scope.cancel()

            async def try_cached() -> None:
                nonlocal reached
                await trio.sleep(CACHE_HEAD_START_S if self._addresses else 0)
                if await self._greet_any(self._strangers()):
                    reached = True
                    nursery.cancel_scope.cancel()

            for address in self._addresses:
                nursery.start_soon(try_address, address)
            nursery.start_soon(try_cached)
        if self._failures:
            self._report()
        if not reached:
            raise self._failure()
        await self._router.find(self._router.own_key)
        self._router.events.emit("dht_joined", peers=len(self._router.table))
        self.save_cache()

    def _failure(self) -> DialError:
        if not self._failures:
            return DialError(
                f"none of the {len(self._cached.peers)} peers in {self._cache} answered: get a fresh invite",
                "unreachable",
            )
        told = "; ".join(f"{address}: {reason} ({why})" for address, (reason, why) in self._failures.items())
        reasons = {reason for reason, _ in self._failures.values()}
        remedy = {
            "wrong_peer": "get a fresh invite",
            "refused": "start the peer there if it is yours, else ask a member for an invite (`peer invite`)",
            "timeout": "check the address and the firewalls on both sides",
            "unreachable": "check this machine's network",
        }
        reason = next(reason for reason in _TELLING if reason in reasons)
        return DialError(f"no bootstrap peer answered ({told}): {remedy[reason]}", reason)

    # -- staying in ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the node connected, until cancelled."""
        async with trio.open_nursery() as nursery:
            for address in self._addresses:
                nursery.start_soon(self._tend_bootstrap, address)
            nursery.start_soon(self._tend_strangers)
            nursery.start_soon(self._tend_neighbourhood)
            nursery.start_soon(self._tend_cache)
            if self._met is not None:
                nursery.start_soon(self._greet_met, self._met)

    async def _tend_bootstrap(self, address: str) -> None:
        while True:
            known = address in self._failures
            reached = await self._greet_address(address)
            if (address in self._failures) != known:
                self._report()
            if reached is not None:
                self._backoff.reset(address)
                await self._compare_views(*reached)
                await trio.sleep(_jittered(self._tuning.checkup_s))
            else:
                self._backoff.failed(address, self._longest_wait_s())
                await trio.sleep_until(self._backoff.next_try(address))

    async def _tend_strangers(self) -> None:
        """Redial lost and cached peers that have not answered since."""
        while True:
            await trio.sleep(_jittered(self._tuning.redial_min_s))
            self._router.judge_split()
            due = [peer for peer in self._strangers() if not self._strangers_backoff.paused(peer)]
            await self._greet_any(due[:REDIALS_AT_ONCE], compare=True)

    async def _greet_met(self, met: trio.MemoryReceiveChannel[str]) -> None:
        """Ask the peers that this host meets elsewhere."""
        async for peer in met:
            await self._greet_any([peer], compare=True)

    async def _tend_neighbourhood(self) -> None:
        interval_s = self._tuning.refresh_s
        await self._router.refresh()
        while True:
            await trio.sleep(_jittered(interval_s))
            before = set(self._router.table)
            await self._router.refresh()
            changed = before != set(self._router.table)
            interval_s = self._tuning.refresh_s if changed else min(2 * interval_s, self._tuning.refresh_max_s)

    async def _tend_cache(self) -> None:
        interval_s = self._tuning.redial_min_s  # at first, so that a node that is killed early finds back too
        while True:
            await trio.sleep(_jittered(interval_s))
            self.save_cache()
            interval_s = min(2 * interval_s, self._tuning.cache_save_s)

    def save_cache(self) -> None:
        """Save the live peers, then those of earlier starts, so that the next start needs no bootstrap peer."""
        if self._cache is None:
            return
        alive = list(self._router.table)[:CACHED_PEERS_MAX]
        earlier = [peer for peer in reversed(self._cached.peers) if peer not in self._router.table]
        fresh = AddressBook(ADDRESSES_MAX)
        for peer in reversed([*alive, *earlier][:CACHED_PEERS_MAX]):  # the latest last, as in every AddressBook
            fresh.add(peer, self._router.host.book.get(peer) or self._cached.get(peer))
        self._cached = fresh
        try:
            fresh.save(self._cache)
        except ResourceError as error:
            self._router.events.emit("dht_cache_unwritable", error=str(error))

    # -- one contact ---------------------------------------------------------------------------------------------

    async def _greet_address(self, address: str) -> tuple[str, FindReply] | None:
        """Contact a bootstrap peer. If that fails, note why and return None."""
        deadline = trio.current_time() + self._tuning.bootstrap_timeout_s
        try:
            peer = await self._router.host.connect_address(address, timeout_s=self._tuning.bootstrap_timeout_s)
            left_s = max(0.1, deadline - trio.current_time())
            reply = await self._router.ask_nearest(peer, self._router.own_key, left_s)
        except (*PeerFault, ConfigError) as error:
            self._failures[address] = (_reason(error), str(error))
            return None
        self._failures.pop(address, None)
        return peer, reply

    async def _greet_any(self, peers: Sequence[str], compare: bool = False) -> bool:
        """Contact peers at their known addresses. Returns whether any answered: with the first answer, or after all of
        them if their views are to be compared."""
        reached = False
        async with trio.open_nursery() as nursery:
            limit = trio.CapacityLimiter(2 * REDIALS_AT_ONCE)

            async def greet(peer: str) -> None:
                nonlocal reached
                async with limit:
                    reply = await self._greet_peer(peer)
                if reply is None:
                    return
                reached = True
                if compare:
                    await self._compare_views(peer, reply)
                else:
                    nursery.cancel_scope.cancel()

            for peer in peers:
                nursery.start_soon(greet, peer)
        return reached

    async def _greet_peer(self, peer: str) -> FindReply | None:
        self._router.host.book.add(peer, self._cached.get(peer))
        try:
            reply = await self._router.ask_nearest(peer, self._router.own_key, self._tuning.bootstrap_timeout_s)
        except PeerFault:
            self._strangers_backoff.failed(peer, self._longest_wait_s())
            return None
        self._strangers_backoff.reset(peer)
        return reply

    async def _compare_views(self, peer: str, reply: FindReply) -> None:
        """Merge the two networks if `peer` lives in another one than we do.

        In a big network two tables may share no peer by chance. So a lookup through theirs alone decides. In one
        network it ends among our neighbours; in a split one it has introduced us to theirs.
        """
        router = self._router
        own = router.host.peer_id
        ours = set(router.table) - {peer}
        theirs = {contact.peer for contact in reply.nodes} - {own, peer}
        if not views_disjoint(ours, theirs, reply.knew_you):
            return
        found = set(await router.find(router.own_key, seeds=sorted(theirs))) - {peer}
        if not found or not ours.isdisjoint(found):
            return
        router.events.emit("dht_split_suspected", why="disjoint views", through=peer, ours=len(ours), theirs=len(found))
        await router.refresh()
        router.merged()
        router.events.emit("dht_split_healed", why="merged", alive=len(router.table))

    def _strangers(self) -> list[str]:
        candidates = dict.fromkeys((*self._router.split.lost, *reversed(self._cached.peers)))
        return [peer for peer in candidates if peer not in self._router.table and peer != self._router.host.peer_id]

    def _longest_wait_s(self) -> float | None:
        return self._tuning.redial_alone_s if len(self._router.table) == 0 else None

    def _report(self) -> None:
        """Emit one event with the state of every bootstrap peer."""
        failed = [f"{address}: {reason}: {why}" for address, (reason, why) in self._failures.items()]
        reached: Iterable[str] = (address for address in self._addresses if address not in self._failures)
        name = "dht_bootstrap_failed" if failed else "dht_bootstrap_reached"
        self._router.events.emit(name, failed=failed, reached=list(reached))


def _reason(error: Exception) -> DialReason:
    if isinstance(error, DialError):
        return error.reason
    return "timeout" if isinstance(error, DeadlineExceeded) else "unreachable"


def _jittered(seconds: float) -> float:
    """Vary a pause by up to 20 %, so that peers started together do not stay in step."""
    return seconds * random.uniform(0.8, 1.2)
