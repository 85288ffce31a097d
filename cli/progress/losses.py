"""The losses by round that events tell of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from cli.progress.event_tail import events_kept
from peer.catalogue.groups import MembersTold, RunEntered
from peer.catalogue.happening import Happening
from peer.catalogue.reading import heard
from peer.catalogue.rounds import GossipAlone, RoundCommitted, ValEvaluated


def finite(value: float | None) -> float | None:
    """Return a number; None for one that is none: the log has null for NaN."""
    return value if value is not None and math.isfinite(value) else None


@dataclass
class Losses:
    """Losses by round, as one process has seen them."""

    training: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)
    run: str = ""
    """The run's name, which its owner wrote."""
    in_bytes: bool = True
    """Whether the run reads text as bytes, so that both are in the same unit."""

    def take(self, event: Happening) -> None:
        """Take in an event."""
        if isinstance(event, RunEntered):
            self.run, self.in_bytes = event.name, event.tokenizer in ("", "bytes")
        if isinstance(event, RoundCommitted | GossipAlone | MembersTold) and (loss := finite(event.loss)) is not None:
            self.training[event.round] = loss
        if isinstance(event, ValEvaluated) and (loss := finite(event.loss)) is not None:
            self.held_out[event.round] = loss
        if isinstance(event, MembersTold) and (loss := finite(event.val_loss)) is not None:
            of = event.round if event.val_round is None else event.val_round  # it may be of an earlier round
            self.held_out[of] = loss

    def __bool__(self) -> bool:
        return bool(self.training or self.held_out)


def losses_in(home: Path) -> Losses:
    """Return what the event log in `home` tells of the losses, in all sessions that it still holds."""
    losses = Losses()
    for at, name, fields in events_kept(home):
        if (found := heard(at, name, fields)) is not None:
            losses.take(found.event)
    return losses
