"""The duration of a merge among the replicas of a stage, with the shares of `swarm.protocol.plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from swarm.protocol.plan import share_slices

SLICES: Final = 256


def merge_s(payload_bytes: float, links_bytes_s: Sequence[float], latency_s: float = 0.0) -> float:
    """Return the seconds of one butterfly all-reduce of updates of `payload_bytes`: every member sends each slice to
    its owner, and owners send the merged slice to all. Uplinks are the limit (downlinks are seldom slower); 0 for a
    single replica."""
    count = len(links_bytes_s)
    if count < 2:
        return 0.0
    owners = share_slices(SLICES, links_bytes_s)
    slowest_s = 0.0
    for phase in ("scatter", "gather"):
        longest_s = 0.0
        for member, link_bytes_s in enumerate(links_bytes_s):
            own = owners.count(member) / SLICES
            sent = payload_bytes * ((1 - own) if phase == "scatter" else own * (count - 1))
            longest_s = max(longest_s, sent / link_bytes_s)
        slowest_s += longest_s + latency_s
    return slowest_s
