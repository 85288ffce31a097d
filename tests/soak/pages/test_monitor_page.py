"""The monitor's page in headless Chromium beside a quickstart with its faults; before a run begins, when all of its
peers are away, as `peer top` says it too, and when it is over."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
import trio

from cli.commands.quickstart import run_toml
from tests.cli.support.kept_scene import ended_run, home_of_a_member
from tests.soak.pages.browser import BROWSER, PHONE, POLL_S, Page, open_page

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.skipif(BROWSER is None, reason="no Chromium here")]

PEER = [sys.executable, "-m", "cli.main"]
RUN_S = 1500.0
WIDE, TALL = 1280, 900
CHIPS = "[...document.querySelectorAll('#map .replicas li')].map(chip => chip.textContent)"
WORD = "document.getElementById('word')?.textContent"
POINTS = """Object.fromEntries([...shown].map(([title, { plot }]) =>
    [title, plot.data.slice(1).flat().filter(value => value !== null).length]))"""
NAMED = """(name => [...document.querySelectorAll('#log li, #rounds .bad, #alerts li')].some(line =>
    RegExp(`${name} is not heard|(absent|last): .*${name}|of ${name} was merged`).test(line.textContent)))"""
KEEP_SLOW = """window.calledSlow = '';
    setInterval(() => document.querySelectorAll('#alerts li').forEach(line => {
        if (line.textContent.includes(' for a micro-batch')) window.calledSlow = line.textContent;
    }), 200)"""
FOCUS = """(at => at.id || at.name || at.getAttribute('aria-label') || at.textContent)(document.activeElement)"""
WIDTHS = """[document.documentElement.scrollWidth,
    ...[...document.querySelectorAll('.scroll')].map(box => box.scrollWidth - box.clientWidth)]"""


async def until(done: Callable[[], Any], process: subprocess.Popen[bytes], limit_s: float = RUN_S) -> Any:
    """What `done` returns once that is something, while the process runs."""
    with trio.fail_after(limit_s):
        while not (found := done()):
            assert process.poll() is None, f"it ended with {process.returncode}"
            await trio.sleep(POLL_S)
    return found


def match(log: Path, pattern: str) -> str | None:
    found = re.search(pattern, log.read_text()) if log.exists() else None
    return found and found[1]


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    finally:
        process.kill()


async def test_the_page_beside_a_quickstart_with_its_faults(tmp_path: Path) -> None:
    home, log = tmp_path / "q", tmp_path / "log"
    command = [*PEER, "quickstart", "--stages", "3", "--peers", "7", "--monitor", "--home", str(home)]
    with log.open("wb") as out:
        quickstart = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        url = await until(lambda: match(log, r"monitor: (http://\S+)"), quickstart)
        async with open_page(url, tmp_path / "live") as page:
            await page.look(WIDE, TALL)
            await page.until(f"{WORD} == 'not begun'")
            assert "of the" in await page.run("document.getElementById('reason').textContent")
            await page.run(KEEP_SLOW)  # it may be over before the killed one is gone from the map
            seen = await watch_the_kill(page, lambda: match(log, r"killed (peer-\d+) \(SIGKILL\)"), quickstart)
            assert seen, "it was on the map before"
            slow = match(log, r"slowed (peer-\d+) ")
            await page.until(f"window.calledSlow.includes({json.dumps(f'{slow} takes ')})", 120)
            frozen = await until(lambda: match(log, r"froze (peer-\d+) \(SIGSTOP\)"), quickstart)
            await page.until(f"{NAMED}({json.dumps(frozen)})", 120)
            await with_points(page)
            await pictures(page, "live")
            await by_keyboard(page)
            assert page.faults == []
        with trio.fail_after(RUN_S):
            while quickstart.poll() is None:
                await trio.sleep(POLL_S)
        assert quickstart.returncode == 0, log.read_text()[-3000:]
    finally:
        stop(quickstart)
    await check_what_stays(home, tmp_path)


async def check_what_stays(home: Path, tmp_path: Path) -> None:
    """The page of a run that is over, as a file."""
    async with open_page((home / "monitor" / "index.html").as_uri(), tmp_path / "file") as page:
        await page.until(f"{WORD}?.startsWith('complete')")
        assert await page.run("document.querySelector('input[name=span]:checked').value") == "all"
        points = await with_points(page)
        assert points["Round length"] >= 8
        assert "of 12 is committed" in await page.run("document.getElementById('reason').textContent")
        await pictures(page, "over")
        assert page.faults == []


async def watch_the_kill(page: Page, killed: Callable[[], str | None], process: subprocess.Popen[bytes]) -> bool:
    """Whether the killed peer was on the map, once it is there no more."""
    ever = set[str]()
    with trio.fail_after(RUN_S):
        while not (victim := killed()):
            assert process.poll() is None
            ever |= set(await page.run(CHIPS))
            await trio.sleep(0.5)
    await page.until(f"!{CHIPS}.includes({json.dumps(victim)})", 120)
    return victim in ever


async def with_points(page: Page) -> dict[str, int]:
    await page.until("shown.size >= 6 && [...shown.values()].every(({ plot }) => plot.data[0].length > 1)", 120)
    points: dict[str, int] = await page.run(POINTS)
    assert all(points.values())
    return points


async def pictures(page: Page, name: str) -> None:
    for width in (WIDE, PHONE):
        for scheme in ("light", "dark"):
            await page.look(width, TALL, scheme)
            await trio.sleep(0.5)  # the charts take the width at the next frame
            shown, *beyond = await page.run(WIDTHS)
            assert shown <= width and all(more <= 0 for more in beyond), (width, shown, beyond)
            height = await page.run("document.documentElement.scrollHeight")
            await page.look(width, height, scheme)
            await trio.sleep(0.5)
            await page.picture(f"{name}-{width}-{scheme}")
    await page.look(WIDE, TALL)


async def by_keyboard(page: Page) -> None:
    """Tab reaches everything that can be used, in the order of the page; the arrow keys work there."""
    await page.run("document.activeElement.blur()")
    reached = list[str]()
    while len(reached) < 40:
        await page.press("Tab", 9)
        at = await page.run(FOCUS)
        if at in reached or await page.run("document.activeElement == document.body"):
            break
        reached.append(at)
        if at == "span":
            await page.press("ArrowRight", 39)
            await page.until("document.activeElement.value == 'day' && document.activeElement.checked")
            await page.until("view.span == 'day'")
        if at.startswith("Round length"):
            await page.press("ArrowLeft", 37)
            await page.until("shown.get('Round length').plot.cursor.idx !== null")
            value = await page.run("shown.get('Round length').figure.querySelector('.u-legend').textContent")
            assert re.search(r"round\d+.*length\d", value.replace(" ", "").replace(":", "")), value
    assert reached[:2] == ["span", "stage"]
    assert sum("arrow keys read values" in name for name in reached) >= 6
    assert any("Members" in name or "Peer" in name for name in reached)
    assert reached[-2:] == ["JSON", "metrics"]


def screen_of_top(arguments: list[str], word: str, limit_s: float = 60.0) -> list[str]:
    """The lines that `peer top` draws in a terminal of 80x24, once they have that word."""
    own, other = pty.openpty()
    ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    plain = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    top = subprocess.Popen([*PEER, "top", *arguments], stdin=other, stdout=other, stderr=other, env=plain)
    os.close(other)
    seen, deadline = "", time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline and not (word in seen and seen.endswith("\n")):
            if select.select([own], [], [], 0.5)[0]:
                with suppress(OSError):
                    seen += os.read(own, 1 << 16).decode(errors="replace")
            elif word in seen:
                break
    finally:
        stop(top)
        os.close(own)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in seen.splitlines()]
    assert word in seen, lines
    return lines


async def test_a_run_that_has_not_begun_and_one_that_all_have_left(tmp_path: Path) -> None:
    """Real processes: the coordinator alone, then nobody."""
    (tmp_path / "run.toml").write_text(run_toml(6))
    home, log, url_log = tmp_path / "coordinator", tmp_path / "log", tmp_path / "url"
    listen = ["--listen", "/ip4/127.0.0.1/tcp/0"]
    with log.open("wb") as out:
        coordinator = subprocess.Popen(
            [*PEER, "coordinate", str(tmp_path / "run.toml"), "--home", str(home), *listen], stdout=out, stderr=out
        )
    monitor = None
    try:
        invite = home / "invite"
        await until(invite.exists, coordinator, 120)
        options = ["--listen", "127.0.0.1:0", "--db", str(tmp_path / "db"), "--json"]
        with url_log.open("wb") as out:
            monitor = subprocess.Popen([*PEER, "monitor", str(invite), *options], stdout=out, stderr=out)
        url = await until(lambda: match(url_log, r'"page":"([^"]+)"'), monitor, 60)
        async with open_page(url, tmp_path / "profile") as page:
            await page.until(f"{WORD} == 'not begun'")
            lines = await trio.to_thread.run_sync(screen_of_top, [str(invite)], "NOT BEGUN")
            assert max(map(len, lines)) <= 80
            await page.picture("not-begun")
            stop(coordinator)
            await page.until(f"{WORD} == 'everybody away'", 180)
            assert "no round is committed" in await page.run("document.getElementById('reason').textContent")
            assert "start the coordinator" in await page.run("document.getElementById('remedy').textContent")
            await page.picture("away")
            assert page.faults == []
        lines = await trio.to_thread.run_sync(screen_of_top, [str(invite)], "NOT REACHED")
        assert max(map(len, lines)) <= 80
    finally:
        stop(coordinator)
        if monitor is not None:
            stop(monitor)


async def test_a_run_that_is_over_is_shown_from_its_home(tmp_path: Path) -> None:
    """No peer answers: the page shows what the home keeps, with its age, and no name in it is obeyed."""
    hostile = "<img src=x onerror=alert(1)>"
    home, _ = home_of_a_member(tmp_path / "h", ended_run(name=hostile), name=hostile)
    url_log = tmp_path / "url"
    with url_log.open("wb") as out:
        options = ["--listen", "127.0.0.1:0", "--json"]
        monitor = subprocess.Popen([*PEER, "monitor", "--home", str(home), *options], stdout=out, stderr=out)
    try:
        url = await until(lambda: match(url_log, r'"page":"([^"]+)"'), monitor, 60)
        async with open_page(url, tmp_path / "profile") as page:
            await page.until("document.getElementById('kept-part')?.hidden === false")
            assert await page.run(f"{WORD}") == "not reached"
            assert await page.run("document.getElementById('name').textContent") == hostile
            kept = await page.run("document.getElementById('kept-part').textContent")
            assert "Last head: round 3, " in kept and " ago, state 07070707" in kept and hostile in kept
            await page.until('shown.has("Loss, by the home\'s log")')
            assert "held out 3.250 (round 2)" in await page.run("document.getElementById('charts').textContent")
            assert await page.run("document.querySelectorAll('.kind:not(.claims), main img').length") == 0
            assert await page.run("document.getElementById('map-part').hidden")
            await pictures(page, "kept")
            assert page.faults == []
    finally:
        stop(monitor)
