"""`peer chat` with a checkpoint on this machine, at a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from swarm.gateway.chat_log import ChatLog
from tests.cli.support.seen_in import forked
from tests.swarm.gateway.served_model import write_checkpoint

ANSWERED = "by this machine ("


@pytest.mark.process
async def test_a_person_talks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    kept = tmp_path / "talk"
    kept.write_text('{"role":"user","content":"earlier"}\n{"role":"assistant","content":"x"}\n')
    options = ["--model", str(tmp_path / "model"), "--max-tokens", "2", "--threads", "1", "--history", str(kept)]
    async with forked(100, "chat", *options) as (terminal, process):

        async def says(keys: str, *words: str, answers: int) -> None:
            terminal.press(keys)
            await terminal.until(
                lambda text: (
                    all(word in text for word in words)
                    and text.count(ANSWERED) == answers
                    and text.rstrip().endswith(">")
                )
            )

        await says("", "/help lists all", answers=0)
        await says("\x1b[200~def f(x):\r    return x\r\x1b[201~\r", "...     return x", answers=1)
        await says("\x1b[A\x1b[A\x1b[A!\r", "> earlier!", answers=2)
        await says("/sytsem be kind\r", "/sytsem is no command: write /system; /help lists them", answers=2)
        await says('"""/reset\rnow"""\r', '... now"""', answers=3)
        await says("not sent\x03/help\r", "begins a message of several lines", answers=3)
        terminal.press("\x04")
        assert await trio.to_thread.run_sync(process.wait, 60) == 0
    asked = [message.content for message in ChatLog(kept).messages() if message.role == "user"]
    assert asked == ["earlier", "def f(x):\n    return x", "earlier!", "/reset\nnow"]
