"""Conversations as text, by the chat template of the checkpoint, run in a confined process of its own.

Without a template a conversation is written plainly, and an answer ends where the model writes the user's next line:

    system: Be brief.
    user: Hello
    assistant:
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Final

import msgspec

from peer.errors import ConfigError, WorkerError
from peer.ipc.text_messages import RenderChat, RenderedChat
from peer.model.text_rules import TextRules
from peer.plain_text import plain
from peer.worker.text_client import TextProcess, open_template_process, sound

RENDER_S: Final = 10.0
"""For a machine under load; of the processor a conversation may take a second (`peer.worker.text_worker`)."""
_PLAIN_STOPS: Final = ("\nuser:", "\nsystem:")


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Annotated[str, msgspec.Meta(max_length=64)]
    content: Annotated[str, msgspec.Meta(max_length=16 << 20)]


class TemplateFailed(ConfigError):
    """The template does not take this conversation, or is out of its bounds."""


class ChatTemplate:
    """Writes the conversations of one served model."""

    def __init__(self, process: TextProcess | None = None, sentence: str = "") -> None:
        """`process`: has the template; None for a model without one. `sentence`: says which template that is."""
        self._process, self.sentence = process, sentence

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which an answer ends, beside the model's stop tokens."""
        return _PLAIN_STOPS if self.is_plain else ()

    @property
    def is_plain(self) -> bool:
        """Whether conversations are written plainly, without the tokens before a text that a template writes."""
        return self._process is None

    async def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the conversation as text that ends where the assistant's next words begin. Raises TemplateFailed."""
        if self._process is None:
            return plain_conversation(messages)
        talk = [{"role": message.role, "content": sound(message.content)} for message in messages]
        try:
            chat = await self._process.ask(RenderChat(self._process.next_id(), talk), RenderedChat, RENDER_S)
        except WorkerError as error:
            chat = RenderedChat(fault=str(error))
        if chat.fault:
            raise TemplateFailed(
                f"the model's chat template does not take this conversation ({plain(chat.fault)}): send other messages,"
                " or complete plain text instead"
            )
        return chat.text


@asynccontextmanager
async def open_template(rules: TextRules, chosen: str | None = None) -> AsyncIterator[ChatTemplate]:
    """Run the template of a served model inside the block; its process starts with the first conversation. `chosen`:
    what --template says, the name of one of the checkpoint's templates, a file, or plain. Raises ConfigError."""
    choice = rules.choice(chosen)
    if not choice.source:
        yield ChatTemplate(sentence=choice.sentence)
        return
    async with open_template_process(choice.source, rules.bos, rules.eos) as process:
        yield ChatTemplate(process, choice.sentence)


def plain_conversation(messages: Sequence[ChatMessage]) -> str:
    """Return a conversation as models without a chat template get it."""
    return "".join(f"{message.role}:{_spaced(message.content)}\n" for message in messages) + "assistant:"


def _spaced(content: str) -> str:
    """Return a text with a space before it. An answer usually begins with one, and keeps its tokens that way."""
    return content if content[:1].isspace() else f" {content}"
