"""When a peer rests by itself: pure conditions over readings, and the readings of a made-up machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import trio

from peer.errors import ConfigError
from peer.events import Event, EventLog
from swarm.run.owners_pause import OwnersPause, PauseRequest, read_request, write_request
from swarm.run.pause_conditions import CALM_S, MachineReadings, PauseWatch, Readings, parse_condition


@pytest.mark.parametrize(
    ("text", "holds", "does_not"),
    [
        ("program:Steam", Readings(programs=frozenset({"bash", "steam"})), Readings(programs=frozenset({"steamer"}))),
        ("program:/usr/bin/a-very-long-program", Readings(programs=frozenset({"a-very-long-pro"})), Readings()),
        ("keyboard:10", Readings(idle_s=599.0), Readings(idle_s=600.0)),
        ("keyboard:10", Readings(idle_s=0.0), Readings(idle_s=None)),
        ("battery", Readings(on_battery=True), Readings()),
        ("outside:22:00-07:00", Readings(minute=7 * 60), Readings(minute=6 * 60 + 59)),
        ("outside:22:00-07:00", Readings(minute=22 * 60 - 1), Readings(minute=22 * 60)),
        ("outside:9:00-17:30", Readings(minute=17 * 60 + 30), Readings(minute=9 * 60)),
        ("outside:9:00-17:30", Readings(minute=0), Readings(minute=12 * 60)),
    ],
)
def test_a_condition(text: str, holds: Readings, does_not: Readings) -> None:
    condition = parse_condition(text)
    assert condition.holds(holds) and not condition.holds(does_not)


@pytest.mark.parametrize(
    "text",
    [
        *("", "load:3", "program:", "keyboard:", "keyboard:0", "keyboard:-1", "battery:5"),
        *("outside:7-9", "outside:24:00-1:00", "outside:07:00-07:00", "outside:07:60-08:00"),
    ],
)
def test_what_is_no_condition(text: str) -> None:
    with pytest.raises(ConfigError, match="is no condition: give program:NAME"):
        parse_condition(text)


def test_a_pause_begins_at_once_and_ends_when_its_condition_has_not_held_for_a_minute() -> None:
    watch = PauseWatch([parse_condition("battery"), parse_condition("keyboard:5")])
    calm, plugged_out, typing = Readings(), Readings(on_battery=True), Readings(idle_s=3.0)
    assert watch.reason(calm, 0.0) == ""
    assert watch.reason(plugged_out, 10.0) == "the machine runs on its battery"
    assert watch.reason(calm, 10.0 + CALM_S - 1) == "the machine runs on its battery"
    assert watch.reason(typing, 10.0 + CALM_S) == "the keyboard was used in the last 5 minutes"
    assert watch.reason(calm, 10.0 + 2 * CALM_S) == ""


def test_the_readings_of_a_machine(tmp_path: Path) -> None:
    now = 1_800_000_000.0
    machine = MachineReadings(tmp_path, lambda: now)
    assert machine.read().idle_s is None and not machine.read().on_battery
    for number, name in (("1", "init"), ("77", "steam")):
        (tmp_path / "proc" / number).mkdir(parents=True)
        (tmp_path / "proc" / number / "comm").write_text(f"{name}\n")
    for name, files in {
        "AC": {"type": "Mains", "online": "0"},
        "BAT0": {"type": "Battery", "status": "Discharging"},
    }.items():
        folder = tmp_path / "sys/class/power_supply" / name
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(f"{text}\n")
    terminal = tmp_path / "dev/pts/3"
    terminal.parent.mkdir(parents=True)
    terminal.touch()
    os.utime(terminal, (now - 500, now))
    readings = machine.read()
    assert readings.programs == {"init", "steam"} and readings.on_battery
    assert readings.idle_s == 500, "what is printed there is no key"
    (tmp_path / "sys/class/power_supply/AC/online").write_text("1\n")
    assert not machine.read().on_battery

    interrupts = tmp_path / "proc" / "interrupts"
    interrupts.write_text("  1:   9   IO-APIC   1-edge   i8042\n  8:   1   IO-APIC   8-edge   rtc0\n")
    assert machine.read().idle_s == 500, "the first look tells nothing"
    interrupts.write_text("  1:  11   IO-APIC   1-edge   i8042\n  8:   1   IO-APIC   8-edge   rtc0\n")
    assert machine.read().idle_s == 0


async def test_a_file_in_the_home_pauses_until_it_is_gone_or_its_time_is_over(tmp_path: Path) -> None:
    log, told, file, condition = EventLog(), list[Event](), tmp_path / "paused", [""]
    pause = OwnersPause(log, file, lambda: condition[0])
    with log.subscribed(told.append):
        write_request(file, PauseRequest())
        pause.look()
        assert pause.paused and read_request(file, time.time()) == PauseRequest()
        condition[0] = "steam runs"
        file.unlink()
        pause.look()
        assert pause.reason == "steam runs"
        condition[0] = ""
        pause.look()
        await pause.until(paused=False)
        assert [event.name for event in told] == ["peer_paused", "peer_paused", "peer_resumed"]

        write_request(file, PauseRequest(until=time.time() - 1.0))
        pause.look()
        assert not pause.paused
        file.write_text("what is this")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pause.run)
            with trio.fail_after(300):
                await pause.until(paused=True)
            nursery.cancel_scope.cancel()
