"""Finding peers of one run on the local networks of this machine, and being found there.

Other machines may announce anything: the addresses of a name with the right tag (`peer.net.lan.announcement`) are
dialled, one at a time, as claims are, but with failures of their own: no machine here can use up those of the run. A
peer that answers proves its id by Noise and its membership by the run's gate, as everywhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeVar

import trio

from peer.bounds import Latest
from peer.catalogue.machine import LanUnusable
from peer.errors import DialError, NetworkError
from peer.net.backoff import Backoff
from peer.net.host import Host
from peer.net.lan.announcement import announced_peer, dialled, instance_name, local_addresses
from peer.net.lan.responder import MulticastResponder
from peer.net.strangers.claims import UnprovenDials
from peer.notifier import beside_block

PEERS_MAX: Final = 64
"""Of those that are remembered; of more, the one seen least recently is forgotten."""
OPEN_S: Final = 10.0
CLOSE_S: Final = 2.0
_DIAL_S: Final = 5.0
_LOOK_S: Final = 2.0  # how often it is looked who has connected, and who is to be tried again
_PACE_S: Final = 0.2  # between two dials
_RETRY_S: Final = (5.0, 600.0)
_FOUND_MAX: Final = 4
_Result = TypeVar("_Result")


class Lan:
    """The peers of one run on the local networks. Runs in `on_lan`. Events: lan_announced, lan_unusable, lan_met."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._tell, self.met = trio.open_memory_channel[str](PEERS_MAX)
        """Receives each peer that was announced here once it is connected."""
        self._known = Latest[str, None](PEERS_MAX)
        self._told = set[str]()
        self._news = trio.Event()
        self._retries = Backoff(*_RETRY_S, jitter=0.2, peers_max=PEERS_MAX)
        self._dials = UnprovenDials(lambda: True)

    def found(self) -> tuple[str, ...]:
        """Return some of the peers that were announced here and are connected: they know the run's id, and have proved
        their own."""
        return tuple(self._told)[:_FOUND_MAX]

    def note(self, name: str) -> None:
        """Remember the peer of that name, if it is one of this run."""
        if (peer := announced_peer(name, self._run_id)) is not None:
            self._known[peer] = None
            self._news.set()

    async def run(self, host: Host) -> None:
        """Announce the host and dial others until cancelled; returns if this machine has no local network."""
        ips, port = local_addresses(host.listening())
        if not ips:
            host.events.emit(LanUnusable(reason="this machine has no address in a private network: leave --lan out"))
            return
        responder = MulticastResponder(instance_name(self._run_id, host.peer_id), ips, port)
        token = trio.lowlevel.current_trio_token()

        def on_name(name: str) -> None:
            if announced_peer(name, self._run_id) not in (None, host.peer_id):
                with suppress(trio.RunFinishedError):
                    token.run_sync_soon(self.note, name, idempotent=True)

        try:
            await _in_thread(partial(responder.open, on_name), OPEN_S)
            host.events.emit("lan_announced", addresses=list(ips), port=port)
            await self.meet(host, ips, responder.resolve)
        except NetworkError as error:
            host.events.emit(LanUnusable(reason=str(error)))
        finally:
            with trio.CancelScope(shield=True), suppress(NetworkError):
                await _in_thread(responder.close, CLOSE_S)

    async def meet(self, host: Host, own: tuple[str, ...], resolve: Callable[[str], tuple[list[str], int]]) -> None:
        """Connect to the known peers, and report each, until cancelled."""
        while True:
            self._news = trio.Event()
            for peer in tuple(self._known):
                if not host.is_connected(peer) and not self._retries.paused(peer):
                    ips, port = await _in_thread(partial(resolve, instance_name(self._run_id, peer)), OPEN_S)
                    await self._dial(host, peer, dialled(ips, port, own))
                self._tell_of(host, peer)
            self._told &= self._known.keys()
            await trio.sleep(_PACE_S)
            with trio.move_on_after(_LOOK_S):
                await self._news.wait()

    async def _dial(self, host: Host, peer: str, addresses: tuple[str, ...]) -> None:
        """Connect to a peer at the first address where it is."""
        self._retries.failed(peer)  # also one that answers and leaves at once
        for address in addresses:
            with suppress(DialError):
                async with self._dials.permit(address):
                    if not host.is_connected(peer):  # else the address would be believed undialled
                        await host.connect_address(f"{address}/p2p/{peer}", timeout_s=_DIAL_S)
                return
            await trio.sleep(_PACE_S)

    def _tell_of(self, host: Host, peer: str) -> None:
        """Tell once of a peer that is connected, by its dial or ours."""
        if not host.is_connected(peer):
            self._told.discard(peer)
        elif peer not in self._told:
            self._told.add(peer)
            self._retries.reset(peer)
            host.events.emit("lan_met", peer=peer, ip=host.remote_ip(peer))
            with suppress(trio.WouldBlock):
                self._tell.send_nowait(peer)


@asynccontextmanager
async def on_lan(lan: Lan | None, host: Host) -> AsyncIterator[None]:
    """Find peers on the local networks inside the block; None finds none."""
    if lan is None:
        yield
        return
    async with beside_block() as nursery:
        nursery.start_soon(lan.run, host)
        yield


async def _in_thread(work: Callable[[], _Result], limit_s: float) -> _Result:
    """Raises NetworkError where the library takes too long, and what `work` raises."""
    with trio.move_on_after(limit_s):
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True)  # type: ignore[call-arg]
    raise NetworkError(f"multicast DNS did not answer within {limit_s:.0f} s: leave --lan out")
