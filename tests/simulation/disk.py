"""One machine's disk: what is synced, and what is still on its way there."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from swarm.protocol.agreement.actions import Persist
from swarm.protocol.agreement.records import BALLOT_KEY, LINK_KEY

STATES_KEPT = 2  # committed states: that of the head and the one before


@dataclass
class Image:
    """What a disk holds: records by key, and states (by hash) that it holds or can rebuild."""

    records: dict[str, bytes] = field(default_factory=dict)
    committed: tuple[bytes, ...] = ()
    voted: bytes = b""
    link: bytes = b""
    """The last record of a link."""

    def copy(self) -> Image:
        return Image(dict(self.records), self.committed, self.voted, self.link)

    def write(self, action: Persist) -> None:
        """Put a record, and the state that must come with it."""
        self.records[action.key] = action.record
        if action.key == BALLOT_KEY:
            self.voted = action.state
        elif action.key.startswith(LINK_KEY):
            self.link = action.record
            if not action.state:
                return
            self.committed = (*(s for s in self.committed if s != action.state), action.state)[-STATES_KEPT:]

    def holds(self, state: bytes) -> bool:
        return state == self.voted or state in self.committed


class Disk:
    """Records reach the platter in order, some time after they were written."""

    def __init__(self) -> None:
        self.synced = Image()
        self.written: deque[Persist] = deque()
        self.backup: Image | None = None
        self.log: list[Persist] | None = None
        """All that was synced, in order, where records may be damaged."""

    def write(self, action: Persist) -> None:
        self.written.append(action)

    def sync(self, id: int) -> bool:
        """Sync all up to that record. Return whether there was any."""
        found = False
        while self.written and self.written[0].id <= id:
            self._put(self.written.popleft())
            found = True
        return found

    def holds(self, state: bytes) -> bool:
        return self.synced.holds(state) or any(action.state == state for action in self.written)

    def crash(self, kind: str, random: Random) -> None:
        """Lose power. `kept`: all that was written is there; `unsynced`: what was not synced is lost; `prefix`: a part
        of that; `wiped`: another disk."""
        if kind == "wiped":
            self.synced, self.backup = Image(), None
            if self.log is not None:
                self.log.clear()
        keep = {"kept": len(self.written), "prefix": random.randint(0, len(self.written))}.get(kind, 0)
        for _ in range(keep):
            self._put(self.written.popleft())
        self.written.clear()

    def _put(self, action: Persist) -> None:
        self.synced.write(action)
        if self.log is not None:
            self.log.append(action)

    def damage(self, at: int) -> None:
        """Flip a bit in the entry of that number: as `swarm.rounds.records`, what was written after it is not read any
        more, and the ballot's record says that votes may be lost. The states are in files of their own."""
        assert self.log is not None
        del self.log[at:]
        committed, self.synced = self.synced.committed, Image()
        for action in self.log:
            self.synced.write(action)
        self.synced.committed, self.synced.voted = committed, b""
        self.synced.records[BALLOT_KEY] = b""

    def save_backup(self) -> None:
        self.backup = self.synced.copy()

    def restore(self) -> bool:
        """Put the backup back. Return whether there is one."""
        if self.backup is None:
            return False
        self.synced = self.backup.copy()
        self.written.clear()
        return True
