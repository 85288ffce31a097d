"""What was told of each peer lately, by itself and by others. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from peer.plain_text import plain
from swarm.membership.told_events import ToldEvent
from swarm.status.state import MemberTold

TOLD_S: Final = 600.0
_REASON_MAX: Final = 120

Told = Mapping[str, Sequence[ToldEvent]]
"""What each peer has told, oldest first."""


def members_told(told: Told, now: float) -> dict[str, MemberTold]:
    """Return what was told in the last `TOLD_S` seconds, of those peers of which something was."""
    refusing: dict[str, dict[str, str]] = {}  # the reasons, by who refuses, of each refused peer
    saves, workers, left_out = Counter[str](), Counter[str](), Counter[str]()
    for teller, events in told.items():
        for event in events:
            if event.at < now - TOLD_S:
                continue
            if event.name == "peer_penalized":
                reason = plain(str(event.fields.get("reason", "")), _REASON_MAX)
                refusing.setdefault(str(event.fields.get("peer", "")), {})[teller] = reason
            elif event.name == "checkpoint_failed":
                saves[teller] += 1
            elif event.name == "checkpoint_saved":
                saves.pop(teller, None)
            elif event.name == "worker_died":
                workers[teller] += 1
            elif event.name == "roster_full" and isinstance(count := event.fields.get("left_out"), int):
                left_out[teller] = max(left_out[teller], count)
    return {
        peer: MemberTold(
            refused_by=len(refusing.get(peer, ())),
            refusal=next(iter(refusing.get(peer, {}).values()), ""),
            failed_saves=saves[peer],
            lost_workers=workers[peer],
            left_out=left_out[peer],
        )
        for peer in {*refusing, *saves, *workers, *left_out}
    }
