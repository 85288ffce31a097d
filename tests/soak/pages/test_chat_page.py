"""The chat page of `peer api` in headless Chromium, on a phone's width: a chat, a stop, a reset, a wrong key.

It is no part of `make test`, since that would need a browser on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.soak.pages.browser import BROWSER, PHONE, POLL_S, WAIT_S, Page, open_page
from tests.swarm.gateway.served_model import KEY, ServedModel, served_model

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.skipif(BROWSER is None, reason="no Chromium here")]
BUSY = "document.querySelectorAll('article.busy').length"
TOLD = "document.querySelectorAll('article small:not([hidden])').length"


async def say(page: Page, text: str) -> None:
    await page.run("document.getElementById('message').focus()")
    await page.call("Input.insertText", text=text)
    await page.press("Enter", 13)


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
        await say(page, "Hello, <b>you</b>")
        await page.until(f"{TOLD} == 1")
        assert await page.run("document.querySelector('article.user p').textContent") == "Hello, <b>you</b>"
        facts = await page.run("document.querySelector('article.assistant small').textContent")
        assert facts.startswith("40 tokens, ") and "a second, by 2 servers: …" in facts
        assert "(blocks 0 to 2), …" in facts and facts.endswith("(blocks 3 to 5)")
        await page.picture("light")

        await page.look(PHONE, 700, "dark")
        await page.set("limit", "3000")
        await say(page, "Go on")
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
        await say(page, "Too much")
        await page.until("document.getElementById('status').textContent.includes('exceeds this model')")
        assert await page.run("document.getElementById('message').value") == "Too much"
        assert [fault for fault in page.faults if "400" not in json.dumps(fault)] == []
