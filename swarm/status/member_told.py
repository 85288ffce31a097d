"""What was told of each peer lately, by itself and by others. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from peer.catalogue.groups import PeerPenalized, RosterFull
from peer.catalogue.machine import CheckpointFailed, CheckpointSaved, WorkerDied
from peer.catalogue.reading import Heard
from peer.plain_text import plain
from swarm.status.state import MemberTold

TOLD_S: Final = 600.0
_REASON_MAX: Final = 120

Told = Mapping[str, Sequence[Heard]]
"""What each peer has told, oldest first."""


def members_told(told: Told, now: float) -> dict[str, MemberTold]:
    """Return what was told in the last `TOLD_S` seconds, of those peers of which something was."""
    refusing: dict[str, dict[str, str]] = {}  # the reasons, by who refuses, of each refused peer
    saves, workers, left_out = Counter[str](), Counter[str](), Counter[str]()
    for teller, events in told.items():
        for event in (event for at, event in events if at >= now - TOLD_S):
            match event:
                case PeerPenalized():
                    refusing.setdefault(event.peer, {})[teller] = plain(event.reason, _REASON_MAX)
                case CheckpointFailed():
                    saves[teller] += 1
                case CheckpointSaved():
                    saves.pop(teller, None)
                case WorkerDied():
                    workers[teller] += 1
                case RosterFull():
                    left_out[teller] = max(left_out[teller], event.left_out)
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
