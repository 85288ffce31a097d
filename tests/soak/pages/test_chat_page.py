"""The chat page of `peer api` in headless Chromium, on a phone's width: a chat, a stop, a reset, a wrong key.

It is no part of `make test`, since that would need a browser on every machine.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.soak.pages.browser import BROWSER, PHONE, POLL_S, WAIT_S, Page, open_page
from tests.swarm.gateway.served_model import KEY, NAME, ServedModel, served_model

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
        await page.until("document.getElementById('model')?.textContent.includes('tokens of context')")
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


MARKDOWN = """# Title #

Some **bold _text_** and *more*, `a < b`, ~~gone~~, [a link](https://example.org/x?y=1) and [none](javascript:alert(1)).
Second line <img src=x onerror=alert(1)>

```python
def f(x):
    return "<b>" + x
```

- one
- two
  - inside
    still inside

3. three
4. four

> quoted
> > deeper

---
![picture](https://example.org/track.png)
~~~
never closed <script>
"""


async def test_markdown_becomes_elements_and_nothing_else(served: ServedModel, tmp_path: Path) -> None:
    async with open_page(served.url, tmp_path / "profile") as page:
        await page.until("document.getElementById('status')?.textContent.includes('API key')")
        page.faults.clear()
        await page.run(
            f"import('/markdown.js').then(m => {{ window.md = m; window.source = {json.dumps(MARKDOWN)}; }})"
        )
        await page.until("!!window.md")
        await page.run(
            "window.box = document.createElement('div'); document.body.append(box); md.showMarkdown(box, source)"
        )

        async def shown(selector: str) -> Any:
            return await page.run(f"[...box.querySelectorAll({json.dumps(selector)})].map(one => one.textContent)")

        assert await shown("h3") == ["Title"] and await shown("strong") == ["bold _text_"]
        assert await shown("em") == ["more"] and await shown("s") == ["gone"] and await shown("p code") == ["a < b"]
        assert await shown("pre") == ['def f(x):\n    return "<b>" + x', "never closed <script>\n"]
        assert await shown("figcaption") == ["pythonCopy", "codeCopy"]
        assert (await shown("ul > li"))[0] == "one" and await shown("ul ul > li") == ["inside\nstill inside"]
        assert await shown("ol > li") == ["three", "four"] and await page.run("box.querySelector('ol').start") == 3
        assert await shown("blockquote blockquote") == ["deeper"] and await shown("hr") == [""]
        links = await page.run("[...box.querySelectorAll('a')].map(a => [a.textContent, a.href, a.rel])")
        assert links == [
            ["a link", "https://example.org/x?y=1", "noopener noreferrer nofollow"],
            ["picture", "https://example.org/track.png", "noopener noreferrer nofollow"],
        ]
        assert await shown("img, script, iframe, style, form") == []
        assert "[none](javascript:alert(1))" in await page.run("box.textContent")
        for row in ("`" * 30000, "[" * 30000, "#" * 30000 + "a", "*" * 30000, "```" + " " * 30000 + "`", "> " * 9000):
            await page.run(f"md.showMarkdown(box, {json.dumps(row)})")
        await page.run("md.showMarkdown(box, ('- a\\n' + '  '.repeat(40) + '- b\\n').repeat(500))")
        assert page.faults == []


async def test_a_conversation_is_kept_over_a_reload_and_copied(served: ServedModel, tmp_path: Path) -> None:
    async with open_page(served.url, tmp_path / "profile") as page:
        await page.until("document.getElementById('status')?.textContent.includes('API key')")
        await page.set("key", KEY)
        await page.until("document.getElementById('model')?.textContent.includes('tokens of context')")
        await page.set("limit", "12")
        await page.set("temperature", "0")
        await say(page, "Hello\nyou")
        await page.until(f"{TOLD} == 1")
        texts = "[...document.querySelectorAll('article')].map(one => one.firstChild.textContent)"
        before, facts = await page.run(texts), await page.run("document.querySelector('article small').textContent")
        await page.run(
            "Object.defineProperty(navigator, 'clipboard', {value: {writeText: async t => {window.copied = t}}})"
        )
        await page.run("document.querySelector('article.user > .copy').click()")
        await page.until("window.copied === 'Hello\\nyou'")
        await page.call("Page.reload")
        await page.until("window.copied === undefined && document.querySelectorAll('article').length == 2")
        await page.until(f"({texts})[1] === {json.dumps(before[1])}")
        assert await page.run(texts) == before
        assert await page.run("document.querySelector('article small').textContent") == facts
        assert await page.run("document.getElementById('limit').value") == "12"
        await page.set("limit", "2000")
        await say(page, "Go on")
        await page.until("document.querySelectorAll('article.assistant')[1]?.textContent.length > 60")
        await page.call("Page.reload")
        await page.until("document.querySelectorAll('article.assistant small:not([hidden])').length == 2")
        assert await page.run("document.querySelectorAll('article small')[3].textContent") == "stopped early"
        await page.run("document.getElementById('reset').click()")
        await page.call("Page.reload")
        await page.until("document.getElementById('model')?.textContent.includes('tokens of context')")
        assert await page.run("document.querySelectorAll('article').length") == 0


OTHER_PAGE = """<!doctype html><meta charset="utf-8"><title>other</title><script>
const said = {parts: 0, text: "", route: "", fault: "", done: false};
async function ask(url, key, body) {
  try {
    const answer = await fetch(url, {method: "POST", body,
      headers: {"Content-Type": "application/json", "Authorization": "Bearer " + key}});
    said.route = answer.headers.get("X-Barnraise-Ignored") || "";
    const reader = answer.body.getReader(), decoder = new TextDecoder();
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      said.parts += 1;
      said.text += decoder.decode(value, {stream: true});
    }
  } catch (error) { said.fault = String(error); }
  said.done = true;
}
</script>"""


class OtherSite(http.server.BaseHTTPRequestHandler):
    """A site of another origin: one page."""

    def do_GET(self) -> None:
        page = OTHER_PAGE.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def other_site() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherSite) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("is_allowed", [True, False])
async def test_a_page_of_another_origin_streams_if_it_is_allowed(tmp_path: Path, is_allowed: bool) -> None:
    with other_site() as origin, served_model(tmp_path, *(["--allow-origin", origin] if is_allowed else [])) as served:
        async with open_page(origin, tmp_path / "profile") as page:
            await page.until("typeof said == 'object'")
            asked = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "stream": True}
            arguments = map(json.dumps, (f"{served.url}/v1/chat/completions", KEY, json.dumps({**asked, "vendor": 1})))
            await page.run(f"void ask({', '.join(arguments)})")
            await page.until("said.done")
            said = await page.run("said")
        if is_allowed:
            assert said["parts"] > 5 and said["text"].endswith("data: [DONE]\n\n") and not said["fault"]
            assert said["route"] == "vendor"
        else:
            assert said["fault"] and not said["text"]
