"""A peer's folder as the power cut would leave it, looked at as the invariants look at a simulated disk."""

from __future__ import annotations

import os
import shutil
from functools import lru_cache
from pathlib import Path

import msgspec
import pytest

from peer.decoding import MALFORMED
from swarm.protocol.agreement.records import LINK_KEY, LinkRecord
from swarm.rounds.records import LOG_NAME, entries_in
from tests.support.disk.shadow_disk import ShadowDisk, put_back


@lru_cache(maxsize=4096)
def _number(record: bytes) -> int:
    return msgspec.msgpack.decode(record, type=LinkRecord).number if record else -1


class PeerDisk(ShadowDisk):
    """The folder of one peer."""

    def __init__(self, root: Path, patches: pytest.MonkeyPatch) -> None:
        root.mkdir(parents=True)
        super().__init__(root, patches)
        self.root = root.resolve()

    def crash(self, kind: str) -> None:
        """Lose power. `kept`: all that was written is there; `wiped`: another disk; else what was synced."""
        if kind == "wiped":
            shutil.rmtree(self.root)
            self.root.mkdir()
        elif kind != "kept":
            put_back(self.files(), self.root)
        self._settle()

    def _settle(self) -> None:
        """What is there now stays there."""
        self._files.clear()
        self._entries.clear()
        for folder in (self.root, *(path for path in self.root.rglob("*") if path.is_dir())):
            self._entries[folder] = {}
            for entry in os.scandir(folder):
                self._entries[folder][entry.name] = entry.inode()
                if entry.is_file():
                    self._files[entry.inode()] = Path(entry.path).read_bytes()

    # -- as `tests.simulation.disk.Disk` -------------------------------------------------------------------------------

    @property
    def synced(self) -> PeerDisk:
        return self

    @property
    def records(self) -> dict[str, bytes]:
        inode = self._entries.get(self.root / "agreement", {}).get(LOG_NAME)
        return {key: record for key, record, _ in entries_in(self._files.get(inode or 0, b""))}

    @property
    def link(self) -> bytes:
        """The last record of a link."""
        links = [record for key, record in self.records.items() if key.startswith(LINK_KEY)]
        return max(links, key=_number, default=b"")

    def holds(self, state: bytes) -> bool:
        """Return whether the results that lead to a state are there, or itself, fetched whole."""
        if f"{state.hex()}.state" in self._entries.get(self.root / "fetched", {}):
            return True
        inodes = self._entries.get(self.root / "results", {}).values()
        return any(_leads_to(self._files.get(inode, b"")) == state for inode in inodes)


def _leads_to(result: bytes) -> bytes:
    """Return the state that a result's file names in its footer; nothing if it has none."""
    length = int.from_bytes(result[-4:], "big")
    try:
        footer = msgspec.msgpack.decode(result[-4 - length : -4])
    except MALFORMED:
        return b""
    return bytes(footer.get("leads_to", b"")) if isinstance(footer, dict) else b""
