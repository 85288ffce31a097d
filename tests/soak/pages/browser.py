"""Headless Chromium for tests of pages, by the protocol of its developer tools. SCREENSHOTS=folder keeps pictures."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio
from trio_websocket import WebSocketConnection, open_websocket_url

BROWSER: Final = shutil.which("chromium") or shutil.which("google-chrome")
WAIT_S: Final = 60.0
POLL_S: Final = 0.05
PHONE: Final = 380


class Page:
    """One tab. `faults`: the errors that it has told of."""

    def __init__(self, connection: WebSocketConnection) -> None:
        self.faults: list[Any] = []
        self._connection = connection
        self._numbers = itertools.count(1)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._connection.send_message(json.dumps({"id": number, "method": method, "params": parameters}))
        with trio.fail_after(WAIT_S):
            while True:
                told = json.loads(await self._connection.get_message())
                if told.get("method") == "Runtime.exceptionThrown":
                    self.faults.append(told)
                if told.get("method") == "Runtime.consoleAPICalled" and told["params"]["type"] in ("error", "assert"):
                    self.faults.append(told)
                if told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                    self.faults.append(told)
                if told.get("id") == number:
                    assert "error" not in told, told
                    return dict(told["result"])

    async def run(self, code: str) -> Any:
        """Return the value of an expression."""
        done = await self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def until(self, code: str, limit_s: float = WAIT_S) -> None:
        with trio.fail_after(limit_s):
            while not await self.run(code):
                await trio.sleep(POLL_S)

    async def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Take this size and this preference of colors."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width <= PHONE,
        )  # fmt: skip
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def set(self, field: str, value: str) -> None:
        await self.run(
            f"(field => {{ field.value = {json.dumps(value)}; field.dispatchEvent(new Event('change')); }})"
            f"(document.getElementById({json.dumps(field)}))"
        )

    async def picture(self, name: str) -> None:
        if folder := os.environ.get("SCREENSHOTS"):
            taken = await self.call("Page.captureScreenshot", format="png")
            (Path(folder) / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))


@asynccontextmanager
async def open_page(url: str, profile: Path) -> AsyncIterator[Page]:
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    browser = subprocess.Popen([BROWSER, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        told = profile / "DevToolsActivePort"
        with trio.fail_after(WAIT_S):
            while not (told.exists() and told.read_text().count("\n")):
                await trio.sleep(POLL_S)
        port = told.read_text().splitlines()[0]
        tabs = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=WAIT_S))
        (tab,) = [tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"]
        async with open_websocket_url(tab, max_message_size=1 << 26) as connection:
            page = Page(connection)
            for domain in ("Page", "Runtime", "Log"):
                await page.call(f"{domain}.enable")
            await page.look(PHONE, 700)
            await page.call("Page.navigate", url=url)
            yield page
    finally:
        browser.terminate()
        browser.wait()
