"""The losses by round that events tell of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cli.progress.event_tail import events_kept
from cli.progress.facts import finite

_TRAINED: Final = ("round_committed", "gossip_met", "gossip_alone", "members_told")


@dataclass
class Losses:
    """Losses by round, as one process has seen them."""

    training: dict[int, float] = field(default_factory=dict)
    held_out: dict[int, float] = field(default_factory=dict)
    run: str = ""
    """The run's name, which its owner wrote."""
    in_bytes: bool = True
    """Whether the run reads text as bytes, so that both are in the same unit."""

    def take(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take in an event."""
        if event == "run_entered":
            self.run = str(fields.get("name", ""))
            self.in_bytes = fields.get("tokenizer", "bytes") == "bytes"
        number = fields.get("round")
        if not isinstance(number, int):
            return
        if event in _TRAINED and (loss := finite(fields.get("loss"))) is not None:
            self.training[number] = loss
        held_out = fields.get("loss") if event == "val_evaluated" else fields.get("val_loss")
        measured = fields.get("val_round", number)  # what a coordinator is told may be of an earlier round
        if (loss := finite(held_out)) is not None and isinstance(measured, int):
            self.held_out[measured] = loss

    def __bool__(self) -> bool:
        return bool(self.training or self.held_out)


def losses_in(home: Path) -> Losses:
    """Return what the event log in `home` tells of the losses, in all sessions that it still holds."""
    losses = Losses()
    for _, event, fields in events_kept(home):
        losses.take(event, fields)
    return losses
