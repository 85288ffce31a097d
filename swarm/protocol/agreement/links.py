"""Links in memory, bounded by number and bytes: those of a group of 256 are 64 kilobytes each."""

from __future__ import annotations

from typing import Final

from swarm.protocol.agreement import records
from swarm.protocol.agreement.messages import ChainLink
from swarm.protocol.agreement.output import encode

LINKS_BYTES_MAX: Final = 20 << 20  # as encoded: 4,096 links of 16 members, 1,300 of 64, 320 of 256


class KeptLinks(dict[bytes, ChainLink]):
    """Links by the hash of their head, in the order in which they came. `keep` adds one; the oldest go where they are
    too many or too long together, but for the last one."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[bytes, int] = {}
        self._bytes = 0

    def keep(self, name: bytes, link: ChainLink) -> list[ChainLink]:
        """Add a link, and return those that had to go."""
        self[name], size = link, len(encode(link))
        self._bytes += size - self._sizes.get(name, 0)
        self._sizes[name] = size
        dropped = []
        while len(self) > records.LINKS_KEPT or (self._bytes > LINKS_BYTES_MAX and len(self) > 1):
            dropped.append(self.drop(next(iter(self))))
        return dropped

    def drop(self, name: bytes) -> ChainLink:
        """Remove the link of that head and return it."""
        self._bytes -= self._sizes.pop(name)
        return self.pop(name)
