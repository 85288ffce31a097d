"""Conditions under which a peer rests by itself, as `peer join --pause-when` names them, by this machine's reports.

Only the owner's activity counts, not the machine's load, which is largely the peer's own work. A pause begins at once
and ends only when its condition has not held for `CALM_S`, so that it does not flap.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

from peer.errors import ConfigError

CALM_S: Final = 60.0
_MINUTES_A_DAY: Final = 24 * 60
_COMM_CHARS: Final = 15  # of a program's name, as the kernel keeps it
_FORMS: Final = "program:NAME, keyboard:MINUTES, battery or outside:HH:MM-HH:MM"


@dataclass(frozen=True)
class Readings:
    """This machine's readings at one moment."""

    programs: frozenset[str] = frozenset()
    """The names of running programs."""
    idle_s: float | None = None
    """How long no key was pressed, as far as can be read; None where unknown."""
    on_battery: bool = False
    minute: int = 0
    """Of the day, in local time."""


class PauseCondition(Protocol):
    """When the peer rests."""

    def holds(self, readings: Readings) -> bool: ...

    @property
    def reason(self) -> str:
        """Why it rests."""


@dataclass(frozen=True)
class ProgramRuns:
    """A program runs: by its file's name, without regard to case."""

    name: str

    def holds(self, readings: Readings) -> bool:
        return self.name.lower() in {program.lower() for program in readings.programs}

    @property
    def reason(self) -> str:
        return f"{self.name} runs"


@dataclass(frozen=True)
class KeyboardUsed:
    """A person has used the machine in the last minutes."""

    minutes: float

    def holds(self, readings: Readings) -> bool:
        return readings.idle_s is not None and readings.idle_s < 60 * self.minutes

    @property
    def reason(self) -> str:
        return f"the keyboard was used in the last {self.minutes:g} minutes"


@dataclass(frozen=True)
class OnBattery:
    """The machine runs on its battery."""

    def holds(self, readings: Readings) -> bool:
        return readings.on_battery

    @property
    def reason(self) -> str:
        return "the machine runs on its battery"


@dataclass(frozen=True)
class Outside:
    """It is another time of the day than the one that was allowed, which may go past midnight."""

    first: int
    """In minutes of the day; the first that is allowed."""
    end: int
    """The first that is not."""

    def holds(self, readings: Readings) -> bool:
        return (readings.minute - self.first) % _MINUTES_A_DAY >= (self.end - self.first) % _MINUTES_A_DAY

    @property
    def reason(self) -> str:
        return f"it is not between {_clock(self.first)} and {_clock(self.end)}"


def parse_condition(text: str) -> PauseCondition:
    """Parse one value of --pause-when. Raises ConfigError."""
    kind, _, value = text.strip().partition(":")
    if kind == "program" and (name := Path(value.strip()).name):
        return ProgramRuns(name[:_COMM_CHARS])
    if kind == "keyboard" and re.fullmatch(r"\d{1,4}", value) and int(value):
        return KeyboardUsed(int(value))
    if kind == "battery" and not value:
        return OnBattery()
    times = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-3]):([0-5]\d)", value)
    if kind == "outside" and times is not None:
        first, end = (60 * int(times[at]) + int(times[at + 1]) for at in (1, 3))
        if first != end:
            return Outside(first, end)
    raise ConfigError(f"--pause-when {text} is no condition: give {_FORMS}")


@dataclass
class PauseWatch:
    """Conditions over time."""

    conditions: Sequence[PauseCondition]
    _held_at: dict[PauseCondition, float] = field(default_factory=dict)

    def reason(self, readings: Readings, now: float) -> str:
        """Return why the peer rests now, by the first condition that holds or has held a moment ago; else an empty
        text. `now`: seconds of a clock that does not go back."""
        for condition in self.conditions:
            if condition.holds(readings):
                self._held_at[condition] = now
        resting = [one for one in self.conditions if now - self._held_at.get(one, -CALM_S) < CALM_S]
        return resting[0].reason if resting else ""


class MachineReadings:
    """Reads this machine's state, without rights of an administrator. `root`: where its files are; `clock`: the Unix
    time."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.time) -> None:
        self._root, self._clock = root, clock
        self._interrupts = ""  # of the keyboard's controller, as last read
        self._pressed_at: float | None = None

    def read(self) -> Readings:
        moment = datetime.fromtimestamp(self._clock())
        return Readings(
            programs=frozenset(self._programs()),
            idle_s=self._idle_s(),
            on_battery=self._on_battery(),
            minute=60 * moment.hour + moment.minute,
        )

    def _programs(self) -> Iterable[str]:
        return (text for file in self._root.glob("proc/[0-9]*/comm") if (text := _text(file)))

    def _idle_s(self) -> float | None:
        """By the terminals, which the kernel marks when a process reads typed input, and by the interrupts of a
        keyboard that is not on USB. The typed text is not read."""
        now, used = self._clock(), list[float]()
        for pattern in ("dev/pts/[0-9]*", "dev/tty[0-9]*"):
            for device in self._root.glob(pattern):
                with suppress(OSError):
                    used.append(device.stat().st_atime)
        lines = _text(self._root / "proc" / "interrupts", 1 << 20).splitlines()
        pressed, before = "\n".join(line for line in lines if line.endswith("i8042")), self._interrupts
        self._interrupts = pressed
        if before and pressed != before:
            self._pressed_at = now
        if self._pressed_at is not None:
            used.append(self._pressed_at)
        return max(0.0, now - max(used)) if used else None

    def _on_battery(self) -> bool:
        """Whether the mains are off and a battery gives."""
        supplies = list(self._root.glob("sys/class/power_supply/*"))
        mains = [_text(one / "online") for one in supplies if _text(one / "type") == "Mains"]
        gives = any(_text(one / "status") == "Discharging" for one in supplies if _text(one / "type") == "Battery")
        return gives and "1" not in mains


def condition_of(conditions: Sequence[PauseCondition]) -> Callable[[], str]:
    """Return a function that explains why the peer rests by these conditions on this machine."""
    if not conditions:
        return str
    machine, watch = MachineReadings(), PauseWatch(conditions)
    return lambda: watch.reason(machine.read(), time.monotonic())


def _text(file: Path, chars_max: int = 64) -> str:
    """Return the text of a file of the kernel; empty if it is gone."""
    try:
        with file.open(errors="replace") as opened:
            return opened.read(chars_max).strip()
    except OSError:
        return ""


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
