"""Thinking and calls of functions on the chat page, in headless Chromium: folded, escaped, kept over a reload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.soak.pages.browser import BROWSER, Page, open_page
from tests.swarm.gateway.reading.thinking_models import TOOLS, model_of
from tests.swarm.gateway.scripted import open_site
from tests.swarm.gateway.tool_models import CLOCK, WEATHER, written

pytestmark = [pytest.mark.process, pytest.mark.soak, pytest.mark.skipif(BROWSER is None, reason="no Chromium here")]
EVIL = "<img src=x onerror=alert(1)>"
THOUGHT = f"The user asks for the weather in **Köln**.\n\n{EVIL}\nI do not know it, so I shall ask the function for it."
CITY = {"city": f"Köln {EVIL} and a name of a place that is so long that it has to be broken", "days": 3}
CALLS = written("hermes", [("get_weather", CITY), ("clock", {})])
DONE = "document.querySelectorAll('article small:not([hidden])').length"
ADD_TOOLS = f"""(fetched => {{
  window.sent = [];
  window.fetch = (path, options = {{}}) => {{
    if (!options.body) return fetched(path, options);
    window.sent.push(JSON.parse(options.body));
    const body = JSON.stringify({{...JSON.parse(options.body), tools: {json.dumps([WEATHER, CLOCK])}}});
    return fetched(path, {{...options, body}});
  }};
}})(window.fetch)"""


async def say(page: Page, text: str) -> None:
    await page.run("document.getElementById('message').focus()")
    await page.call("Input.insertText", text=text)
    await page.press("Enter", 13)


async def shown(page: Page, selector: str) -> Any:
    return await page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.textContent)")


async def test_thinking_is_folded_and_calls_are_cards(tmp_path: Path) -> None:
    model = model_of(TOOLS, f"<think>\n{THOUGHT}\n</think>\n\nLet me *look*.\n{CALLS}\0".encode())
    async with open_site(model) as site, open_page(f"http://127.0.0.1:{site.port}/", tmp_path / "profile") as page:
        await page.until("document.getElementById('model')?.textContent.includes('tokens of context')")
        await page.run(ADD_TOOLS)
        await say(page, "How warm is it?")
        await page.until(f"{DONE} == 1 && document.querySelectorAll('figure.call').length == 2")
        for _ in range(2):  # as it came, and after a reload
            assert await shown(page, "details.thinking p") == [THOUGHT]
            assert await shown(page, "details.thinking summary") == ["Thinking"]
            assert not await page.run("document.querySelector('details.thinking').open")
            assert await shown(page, "article.assistant > div") == ["Let me look."]
            assert await shown(page, "figure.call figcaption") == ["get_weatherCopy", "clockCopy"]
            assert [json.loads(one) for one in await shown(page, "figure.call code")] == [CITY, {}]
            assert await shown(page, "article img, article script") == []
            await page.call("Page.reload")
            await page.until("!window.sent && document.querySelectorAll('figure.call code').length == 2")
            await page.until("document.querySelector('figure.call code').textContent")
        await page.run(ADD_TOOLS)
        model.script = (b"<think>\nOnly thought",)
        await say(page, "And now?")
        await page.until(f"{DONE} == 2")
        assert await page.run("window.sent[0].messages[1]") == {"role": "assistant", "content": "Let me *look*."}
        assert (await shown(page, "details.thinking p"))[1] == "Only thought"
        assert await page.run("document.querySelectorAll('article.assistant > .copy')[1].hidden")
        for width, scheme in ((380, "light"), (380, "dark"), (1100, "light"), (1100, "dark")):
            await page.look(width, 900, scheme)
            assert await page.run("document.documentElement.scrollWidth") == width
            for is_open in (False, True):
                await page.run(f"document.querySelector('details.thinking').open = {json.dumps(is_open)}")
                await page.run("document.getElementById('log').scrollTop = 0")
                await page.picture(f"answers-{width}-{scheme}-{'open' if is_open else 'folded'}")
        assert page.faults == []


async def test_arguments_are_shown_while_the_model_writes_them_and_kept_half(tmp_path: Path) -> None:
    text, goes_on = written("hermes", [("get_weather", CITY)]), trio.Event()
    middle = text.index(" and a name")
    model = model_of(TOOLS, text[:middle].encode(), goes_on, text[middle : middle + 6].encode(), b"\0")
    async with open_site(model) as site, open_page(f"http://127.0.0.1:{site.port}/", tmp_path / "profile") as page:
        await page.until("document.getElementById('model')?.textContent.includes('tokens of context')")
        await page.run(ADD_TOOLS)
        await say(page, "How warm is it?")
        half = text[text.index('{"city"') : middle]
        await page.until(f"document.querySelector('figure.call code')?.textContent === {json.dumps(half)}")
        assert await page.run(DONE) == 0
        goes_on.set()
        await page.until(f"{DONE} == 1")
        await page.call("Page.reload")
        kept = json.dumps(half + text[middle : middle + 6])
        await page.until(f"document.querySelector('figure.call code')?.textContent === {kept}")
        assert await shown(page, "article img, article script") == []
        assert page.faults == []
