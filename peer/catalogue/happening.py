"""The base of the events in the catalogue, and the small texts that their sentences share."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from string import Formatter
from typing import Any, ClassVar, Final

import msgspec

from peer.figures import number_text, several

Who = Callable[[str], str]
"""Returns the name of the peer with an id."""

LOWER_RATE: Final = "lower [inner] lr in a new run"
"""The remedy for losses that are no numbers."""
_MEASURES: Final = frozenset({"loss", "val_loss", "distance", "gain", "own_gain"})


class Happening(msgspec.Struct, frozen=True):
    """An event that has readers. The stream has its `event_name` and its fields, without those that are None by
    default and no measure.

    A field that other peers are not told has a default: a told event is read into the same struct.
    """

    stream_name: ClassVar[str] = ""
    """The name in the stream, where another class has the name that follows from it."""
    told: ClassVar[tuple[str, ...] | None] = None
    """The fields that other peers are told: no address, path or text of an error. None: not even its name."""
    said: ClassVar[str] = ""
    """The sentence for a user: fields and properties by name, `{peer!p}` for a peer's name, `{members:member}` for
    "3 members", `{teller}` for the peer that tells. Without the last, several peers tell of the same thing."""

    @classmethod
    @cache
    def event_name(cls) -> str:
        """Return the name in the stream: `RoundCommitted` is `round_committed`."""
        return cls.stream_name or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def as_fields(self) -> dict[str, Any]:
        """Return the fields for the stream, tuples as lists."""
        values, left_out = msgspec.structs.asdict(self).items(), self._left_out()
        told = ((name, value) for name, value in values if value is not None or name not in left_out)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in told}

    @classmethod
    @cache  # to look fields up takes 200 us, as it evaluates the annotations
    def _left_out(cls) -> frozenset[str]:
        """Return the fields that the stream lacks where they are None."""
        fields = msgspec.structs.fields(cls)
        return frozenset(field.name for field in fields if field.default is None) - _MEASURES

    def stream_form(self) -> tuple[str, dict[str, Any]]:
        """Return the name and fields as a log has them."""
        return self.event_name(), self.as_fields()

    @property
    def of(self) -> str:
        """ " of stage 2", of a group of a pipeline."""
        return of_stage(getattr(self, "stage", None))

    @property
    def group(self) -> str:
        """ "stage 2", or "the run"."""
        stage = getattr(self, "stage", None)
        return "the run" if stage is None else f"stage {stage}"

    @property
    def why(self) -> str:
        """The reason after a colon, where it is known."""
        return because(getattr(self, "reason", ""))

    def sentence(self, teller: str, who: Who) -> str:
        """Return what it `said`, as far as the fields are known; empty where the event has no words."""
        return _Sentence(self, teller, who).format(self.said)


class OwnRound(Happening, frozen=True):
    """What commits and pair exchanges say alike: where this peer stands, and its own work in the round."""

    round: int
    state_hash: str = ""
    members: int = 0
    tokens: int = 0
    """That the run has trained on so far."""
    loss: float | None = None
    """Of this peer's own steps, nats a token."""
    steps: int = 0
    skipped: int = 0
    overflows: int = 0
    """Steps without effect, in a pipeline backward passes made again, since fp16 could not hold a gradient."""
    bytes_up: int = 0
    """Of this process so far, as `bytes_down`."""
    bytes_down: int = 0
    seconds: float = 0.0

    @property
    def short_hash(self) -> str:
        return self.state_hash[:8]


class Trouble(Happening, frozen=True):
    """An event whose words are its reason."""

    said: ClassVar = "{teller}{why}"
    reason: str = ""


class _Sentence(Formatter):
    """Fills in what an event said, for one teller."""

    def __init__(self, event: Happening, teller: str, who: Who) -> None:
        self._event, self._teller, self._who = event, teller, who

    def get_value(self, key: Any, args: Any, kwargs: Any) -> Any:
        return self._teller if key == "teller" else getattr(self._event, key)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return self._who(value) if conversion == "p" else super().convert_field(value, conversion)

    def format_field(self, value: Any, spec: str) -> Any:
        return several(value, spec) if len(spec) > 1 and spec.isalpha() else super().format_field(value, spec)


def because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def of_stage(stage: int | None) -> str:
    return "" if stage is None else f" of stage {stage}"


def own_steps(event: OwnRound) -> str:
    """Return what a round's event says of this peer's own steps, as the end of a sentence."""
    lost = [f"{event.skipped} of {several(event.steps, 'step')} skipped"] if event.steps and event.skipped else []
    if event.overflows:
        lost.append(f"{several(event.overflows, 'overflow')} of fp16")
    return f", loss {number_text(event.loss)}" + (f" ({', '.join(lost)})" if lost else "")
