"""The end of a gossip run at its coordinator: each peer makes its own last round, and leaves with its own weights.

There is no common state to keep. The coordinator only remembers that the run is over, so that it can inform later
peers. It goes by the peers' records: none of them is proved, and only that answer depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from peer.catalogue.machine import RecordsUnsaved
from peer.catalogue.rounds import RunCompleted
from peer.errors import ResourceError
from peer.events import EventLog
from peer.files import write_atomically
from swarm.membership.member_record import MemberRecord, MemberView
from swarm.membership.membership import REFRESH_S
from swarm.run.home import Home


class GossipEnd:
    """Whether a gossip run of that many `rounds` (0: no end) is over."""

    def __init__(self, home: Home, rounds: int, events: EventLog) -> None:
        self._home, self._rounds, self._events = home, rounds, events
        self._done = False
        self.is_over = rounds > 0 and home.complete.exists()

    async def run(self, view: MemberView) -> None:
        """Watch the records until the run is over. Event: run_completed."""
        while self._rounds and not self.is_over:
            if self.sees(view().values()):
                try:
                    write_atomically(self._home.complete, str(self._rounds).encode())
                except ResourceError as error:
                    self._events.emit(RecordsUnsaved(reason=str(error)))
            await trio.sleep(REFRESH_S / 2)
        if self._rounds:
            self._events.emit(RunCompleted(round=self._rounds))

    def sees(self, records: Iterable[MemberRecord]) -> bool:
        """Return whether the run is over, by these records of it: a peer has made its last round, and no present peer
        has yet to."""
        rounds = [record.round for record in records if record.role == "full"]
        self._done |= any(number >= self._rounds for number in rounds)
        self.is_over = self._done and all(number >= self._rounds for number in rounds)
        return self.is_over
