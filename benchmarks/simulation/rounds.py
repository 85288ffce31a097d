"""The duration of a merge among the replicas of a stage, each of which owns an equal part."""

from __future__ import annotations

from collections.abc import Sequence


def merge_s(payload_bytes: float, links_bytes_s: Sequence[float], latency_s: float = 0.0) -> float:
    """Return the seconds of one butterfly all-reduce of updates of `payload_bytes`: every member sends each slice to
    its owner, and owners send the merged slice to all. Uplinks are the limit (downlinks are seldom slower); 0 for a
    single replica."""
    count = len(links_bytes_s)
    if count < 2:
        return 0.0
    sent = payload_bytes * (count - 1) / count  # in each of the two phases
    return 2 * (sent / min(links_bytes_s) + latency_s)
