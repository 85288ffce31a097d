"""The events that peers tell (`swarm.membership.told_events`), followed by cursors: so many of so many peers, in a
bounded time. A peer that answers nothing, or nonsense, is marked and asked less and less often."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from peer.catalogue.groups import PeerPenalized
from peer.catalogue.reading import Heard, heard
from peer.errors import BarnraiseError, ProtocolViolation
from peer.net.host import Host
from swarm.membership.told_events import EVENTS, AskEvents, EventPage
from swarm.monitor.told_counts import ToldCounts
from swarm.status.state import Outcome

KEPT_MAX: Final = 400
"""Events of one peer."""
PEERS_MAX: Final = 128
PAGES_MAX: Final = 8
"""Of one peer at one reading."""
CALL_S: Final = 3.0
POLL_S: Final = 8.0
"""For all peers together."""
AT_ONCE: Final = 16
BACK_OFF_S: Final = 10.0
BACK_OFF_MAX_S: Final = 300.0


@dataclass
class _Followed:
    cursor: AskEvents = field(default_factory=AskEvents)
    kept: deque[Heard] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))
    outcome: Outcome = "not asked"
    failures: int = 0
    again_at: float = 0.0
    """By trio's clock."""


class MemberEvents:
    """The last events of the peers that are followed, and what those from `since` on add up to."""

    def __init__(self, since: float) -> None:
        self.counts = ToldCounts(since)
        self._peers: dict[str, _Followed] = {}

    async def poll(self, host: Host, peers: Sequence[str], now: float) -> None:
        """Ask the first `PEERS_MAX` peers for what is new, at `now`, Unix time. Peers that are away keep what they have
        told until others need the place."""
        wanted = list(dict.fromkeys(peers))[:PEERS_MAX]
        followed = {peer: self._peers.pop(peer) if peer in self._peers else _Followed() for peer in wanted}
        self._peers = dict(list(self._peers.items())[max(0, len(self._peers) + len(followed) - PEERS_MAX) :])
        self._peers |= followed
        at_once = trio.CapacityLimiter(AT_ONCE)

        async def ask(peer: str, state: _Followed) -> None:
            async with at_once:
                await _ask(host, peer, state, now, self.counts)

        with trio.move_on_after(POLL_S):
            async with trio.open_nursery() as nursery:
                for peer, state in followed.items():
                    if state.again_at <= trio.current_time():
                        nursery.start_soon(ask, peer, state)

    def outcomes(self) -> dict[str, Outcome]:
        """Return what came of asking each peer the last time."""
        return {peer: state.outcome for peer, state in self._peers.items()}

    def told(self) -> dict[str, tuple[Heard, ...]]:
        """Return what each peer has told, oldest first."""
        return {peer: tuple(state.kept) for peer, state in self._peers.items()}


async def _ask(host: Host, peer: str, state: _Followed, now: float, counts: ToldCounts) -> None:
    """Read up to `PAGES_MAX` pages of one peer."""
    try:
        for _ in range(PAGES_MAX):
            page = (await host.rpc.call(peer, EVENTS, state.cursor, timeout_s=CALL_S)).body
            _check(page, state.cursor)
            if page.session != state.cursor.session:
                state.kept.clear()  # of the process before: this one's begin again
            state.cursor = AskEvents(page.session, page.last)
            for told in page.events:
                if (found := heard(told.at, told.name, told.fields)) is not None:
                    counts.take(peer, found)
                    # a clock that is ahead would stand on top for ever
                    state.kept.append(found._replace(at=min(now, found.at)))
            if not page.events:
                break
    except ProtocolViolation as error:
        host.events.emit(PeerPenalized(peer=peer, reason=str(error)))
        _failed(state, "garbage")
    except BarnraiseError:
        _failed(state, "silent")
    else:
        state.outcome, state.failures, state.again_at = "told", 0, 0.0


def _check(page: EventPage, cursor: AskEvents) -> None:
    """Raise if a page cannot follow the cursor."""
    if not page.session:
        raise ProtocolViolation("a page of events names no session")
    if page.session == cursor.session and page.last < cursor.after + len(page.events):
        raise ProtocolViolation("a page of events goes back behind its cursor")


def _failed(state: _Followed, outcome: Outcome) -> None:
    state.outcome = outcome
    wait_s = min(BACK_OFF_MAX_S, BACK_OFF_S * 2 ** min(state.failures, 8))
    state.failures += 1
    state.again_at = trio.current_time() + wait_s
