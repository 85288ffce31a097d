"""Conversations as text, by the chat template of the checkpoint, run in a confined process of its own.

Without a template a conversation is written plainly, and an answer ends where the model writes the user's next line:

    system: Be brief.
    user: Hello
    assistant:
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from peer.confinement.environment import passed_on
from peer.errors import ConfigError
from peer.model.text_rules import TextRules
from peer.plain_text import plain
from swarm.gateway.template_child import FRAME, TEXT_CHARS_MAX

RENDER_S: Final = 2.0
START_S: Final = 20.0
"""For Python to start, on a machine under load."""
REPLY_BYTES_MAX: Final = 8 * TEXT_CHARS_MAX
_MODULE: Final = "swarm.gateway.template_child"
_PLAIN_STOPS: Final = ("\nuser:", "\nsystem:")


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


class TemplateFailed(ConfigError):
    """The template does not take this conversation, or is out of its bounds."""


class ChatTemplate:
    """Writes the conversations of one served model."""

    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self._child: _Child | None = None
        self._turn = trio.Lock()

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which an answer ends, beside the model's stop tokens."""
        return () if self._rules.chat_template else _PLAIN_STOPS

    async def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the conversation as text that ends where the assistant's next words begin. Raises TemplateFailed."""
        if not self._rules.chat_template:
            return plain_conversation(messages)
        given = {
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
            "bos_token": self._rules.bos,
            "eos_token": self._rules.eos,
        }
        async with self._turn:
            reply = await self._ask(given)
        if "text" not in reply:
            raise TemplateFailed(
                f"the model's chat template does not take this conversation ({plain(str(reply.get('error')))}):"
                " send other messages, or complete plain text instead"
            )
        return str(reply["text"])

    async def _ask(self, given: dict[str, Any]) -> dict[str, Any]:
        """Have the child render. After a fault the next conversation gets another child."""
        child, self._child = self._child or await _Child.start(self._rules.chat_template), None
        fault = "its process died, as of too much memory"
        with trio.move_on_after(RENDER_S) as limit:
            reply = await child.ask(given)
            if reply is not None:
                self._child = child
                return reply
        if limit.cancelled_caught:
            fault = f"it takes longer than {RENDER_S:.0f} s"
        child.kill()
        return {"error": fault}

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child = None


@asynccontextmanager
async def open_template(rules: TextRules) -> AsyncIterator[ChatTemplate]:
    """Run the template of a served model inside the block; its process starts with the first conversation."""
    template = ChatTemplate(rules)
    try:
        yield template
    finally:
        template.close()


def plain_conversation(messages: Sequence[ChatMessage]) -> str:
    """Return a conversation as models without a chat template get it."""
    return "".join(f"{message.role}:{_spaced(message.content)}\n" for message in messages) + "assistant:"


def _spaced(content: str) -> str:
    """Return a text with a space before it. An answer mostly begins with one, and stays the tokens that it was."""
    return content if content[:1].isspace() else f" {content}"


class _Child:
    """The process, and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], stream: trio.SocketStream) -> None:
        self._process, self._stream = process, stream

    @classmethod
    async def start(cls, template: str) -> _Child:
        """Start the process and wait until it is ready. Raises TemplateFailed."""
        child = cls._spawn()
        try:
            with trio.move_on_after(START_S):
                if await child.ask({"template": template}) is not None:
                    return child
        except BaseException:
            child.kill()
            raise
        child.kill()
        raise TemplateFailed(f"the process for the chat template is not ready after {START_S:.0f} s: try again later")

    @classmethod
    def _spawn(cls) -> _Child:
        """Start the process, not by trio: the kernel's parent-death signal refers to the thread that forks."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is the parent's
                env=_environment(),
            )
        return cls(process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))

    async def ask(self, value: dict[str, Any]) -> dict[str, Any] | None:
        """Send a frame and return the answer; None if the process is gone or answers nonsense."""
        body = json.dumps(value).encode()
        try:
            await self._stream.send_all(FRAME.pack(len(body)) + body)
            (size,) = FRAME.unpack(await self._read(FRAME.size))
            if size > REPLY_BYTES_MAX:
                return None
            reply = json.loads(await self._read(size))
        except (trio.BrokenResourceError, EOFError, ValueError):
            return None
        return reply if isinstance(reply, dict) else None

    async def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            more = await self._stream.receive_some(size - len(data))
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    def kill(self) -> None:
        """Kill and reap the process, which takes no more than a moment, and close the socket."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._stream.socket.close()


def _environment() -> dict[str, str]:
    kept = passed_on(os.environ)
    house, inherited = str(Path(__file__).resolve().parents[2]), kept.get("PYTHONPATH")
    path = house + (os.pathsep + inherited if inherited else "")
    return {**kept, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUTF8": "1"}
