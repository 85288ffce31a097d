"""The chat page of `peer api` in headless Chromium, on a phone's width: a chat, a stop, a reset, a wrong key.

It is no part of `make test`, since that would need a browser on every machine. SCREENSHOTS=folder keeps pictures.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio_websocket import WebSocketConnection, open_websocket_url

from tests.swarm.gateway.served_model import KEY, ServedModel, served_model

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.skipif(BROWSER is None, reason="no Chromium here")]
WAIT_S = 60.0
POLL_S = 0.05
BUSY = "document.querySelectorAll('article.busy').length"
TOLD = "document.querySelectorAll('article small:not([hidden])').length"


class Page:
    """One tab, by the protocol of Chromium's developer tools."""

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

    async def until(self, code: str) -> None:
        with trio.fail_after(WAIT_S):
            while not await self.run(code):
                await trio.sleep(POLL_S)

    async def say(self, text: str) -> None:
        await self.run("document.getElementById('message').focus()")
        await self.call("Input.insertText", text=text)
        await self.press("Enter", 13)

    async def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

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
            await page.call(
                "Emulation.setDeviceMetricsOverride", width=380, height=700, deviceScaleFactor=1, mobile=True
            )
            await page.call("Page.navigate", url=url)
            yield page
    finally:
        browser.terminate()
        browser.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    with served_model(tmp_path_factory.mktemp("served")) as model:
        yield model


async def test_the_page_on_a_phone(served: ServedModel, tmp_path: Path) -> None:
    async with open_page(served.url, tmp_path / "profile") as page:
        await page.until("document.getElementById('status')?.textContent.includes('API key')")
        page.faults.clear()  # Chromium logs the 401
        assert await page.run("document.getElementById('settings').open")
        await page.set("key", KEY)
        await page.until("document.getElementById('model').textContent.includes('tokens of context')")
        assert await page.run("document.documentElement.scrollWidth") == 380
        await page.run("document.getElementById('settings').open = false")

        await page.set("limit", "40")
        await page.set("temperature", "0")
        await page.set("system", "Be brief.")
        await page.say("Hello, <b>you</b>")
        await page.until(f"{TOLD} == 1")
        assert await page.run("document.querySelector('article.user p').textContent") == "Hello, <b>you</b>"
        facts = await page.run("document.querySelector('article.assistant small').textContent")
        assert facts.startswith("40 tokens, ") and "a second, by 2 servers: …" in facts
        assert "(blocks 0 to 2), …" in facts and facts.endswith("(blocks 3 to 5)")
        await page.picture("light")

        await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        await page.set("limit", "3000")
        await page.say("Go on")
        await page.until("document.querySelectorAll('article.assistant')[1]?.textContent.length > 30")
        assert await page.run("getComputedStyle(document.body).backgroundColor") == "rgb(23, 23, 26)"
        await page.picture("dark")
        await page.press("Escape", 27)
        await page.until(f"{BUSY} == 0 && !document.getElementById('send').hidden")
        assert await page.run("document.getElementById('status').textContent") == ""
        with trio.fail_after(WAIT_S):
            while [told["ended"] for told in served.events("api", "request_answered")] != ["done", "disconnected"]:
                await trio.sleep(POLL_S)

        await page.run("document.getElementById('reset').click()")
        assert await page.run("document.querySelectorAll('article').length") == 0
        await page.set("limit", "100000")
        await page.say("Too much")
        await page.until("document.getElementById('status').textContent.includes('exceeds this model')")
        assert await page.run("document.getElementById('message').value") == "Too much"
        assert [fault for fault in page.faults if "400" not in json.dumps(fault)] == []
