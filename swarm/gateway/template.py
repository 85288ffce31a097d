"""Conversations as text, by the chat template of the checkpoint, run in a confined process of its own.

Without a template a conversation is written plainly, and an answer ends where the model writes the user's next line:

    system: Be brief.
    user: Hello
    assistant:
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec
from blake3 import blake3

from peer.decoding import MALFORMED
from peer.errors import ConfigError, WorkerError
from peer.ipc.text_messages import RenderChat, RenderedChat
from peer.model.text.rules import TextRules
from peer.plain_text import plain
from peer.worker.text_client import TextProcess, open_template_process, sound
from swarm.gateway.json_depth import is_deep
from swarm.gateway.reading.call_formats import AUTO, CallFormat, format_of, takes_tools
from swarm.gateway.reading.thinking import ThinkingFormat, thinking_of

CALLS_MAX: Final = 128
"""Of one message."""
CALL_ID_CHARS_MAX: Final = 128
RENDER_S: Final = 10.0
"""For a machine under load; of the processor a conversation may take a second (`peer.worker.text_worker`)."""
_PLAIN_STOPS: Final = ("\nuser:", "\nsystem:")
_NAME: Final = re.compile("[a-zA-Z_][a-zA-Z0-9_]*")
_NUMBER_MIN: Final = -(1 << 63)
_NUMBER_MAX: Final = (1 << 64) - 1
_MISTRAL_ID: Final = re.compile("[a-zA-Z0-9]{9}")
"""The one kind of a call's id that Mistral's templates take."""


class PastCall(msgspec.Struct, frozen=True):
    """A call in an assistant's message of a conversation (`swarm.gateway.tools`)."""

    id: Annotated[str, msgspec.Meta(max_length=CALL_ID_CHARS_MAX)]
    name: Annotated[str, msgspec.Meta(max_length=64)]
    arguments: Annotated[str, msgspec.Meta(max_length=16 << 20)]
    """A JSON object; of a call that was cut, or that the model wrote wrong, any text."""


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation."""

    role: Annotated[str, msgspec.Meta(max_length=64)]
    content: Annotated[str, msgspec.Meta(max_length=16 << 20)]
    calls: Annotated[tuple[PastCall, ...], msgspec.Meta(max_length=CALLS_MAX)] = ()
    tool_call_id: Annotated[str, msgspec.Meta(max_length=CALL_ID_CHARS_MAX)] = ""
    """Of a call's result: which one it answers, and the function's name."""
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    thought: Annotated[str, msgspec.Meta(max_length=16 << 20)] = ""
    """What an assistant has thought before it, as the client sent it back."""


class TemplateFailed(ConfigError):
    """The template does not take this conversation, or is out of its bounds."""


class ToolsRefused(ConfigError):
    """The model can be given no tools, or what it writes of them is not understood."""


class ChatTemplate:
    """Writes the conversations of one served model."""

    def __init__(
        self,
        process: TextProcess | None = None,
        sentence: str = "",
        form: CallFormat | None = None,
        source: str = "",
    ) -> None:
        """`process`: has the template; None for a model without one. `sentence`: says which template that is. `form`:
        in which the model writes calls, as far as that is known. `source`: the template's text."""
        self.thinking: ThinkingFormat | None = thinking_of(source)
        """The tags around what the model thinks; None for none."""
        self.names = frozenset(_NAME.findall(source))
        """All names in the template. A variable that is not among them changes no conversation."""
        self._process, self.sentence, self._form, self._has_tools = process, sentence, form, takes_tools(source)

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which an answer ends, beside the model's stop tokens."""
        return _PLAIN_STOPS if self.is_plain else ()

    @property
    def is_plain(self) -> bool:
        """Whether conversations are written plainly, without the tokens before a text that a template writes."""
        return self._process is None

    @property
    def form(self) -> CallFormat:
        """The form in which the model writes calls. Raises ToolsRefused if it can be given no tools."""
        if not self._has_tools:
            what = "has no chat template" if self.is_plain else "has a chat template that writes no tools"
            raise ToolsRefused(f"the model {what}: send no tools, or start peer api with a --template that writes them")
        if self._form is None:
            raise ToolsRefused(
                "the model's chat template does not show in which form it calls tools: start peer api with"
                " --tool-parser"
            )
        return self._form

    async def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the conversation as text that ends where the assistant's next words begin. `tools`: the functions that
        the model may call. `variables`: more of the template's, by name. Raises TemplateFailed."""
        if self._process is None:
            if any(message.calls or message.tool_call_id for message in messages):
                raise TemplateFailed("the model has no chat template, which calls of tools need: send other messages")
            return plain_conversation(messages)
        talk = [self._given(message) for message in messages]
        command = RenderChat(
            self._process.next_id(), talk, [_sound(tool) for tool in tools] or None, _sound(dict(variables))
        )
        try:
            chat = await self._process.ask(command, RenderedChat, RENDER_S)
        except WorkerError as error:
            chat = RenderedChat(fault=str(error))
        if chat.fault:
            raise TemplateFailed(
                f"the model's chat template does not take this conversation ({plain(chat.fault)}): send other messages,"
                " or complete plain text instead"
            )
        return chat.text

    def _given(self, message: ChatMessage) -> dict[str, Any]:
        """Return a message as the template gets it."""
        given: dict[str, Any] = {"role": message.role, "content": sound(message.content)}
        if message.thought:
            given["reasoning_content"] = sound(message.thought)
        if message.calls:
            given["tool_calls"] = [self._call(call) for call in message.calls]
        if message.tool_call_id:
            given |= {"tool_call_id": self._id(message.tool_call_id), "name": message.name}
        return given

    def _call(self, call: PastCall) -> dict[str, Any]:
        """Return a call as the template gets it: its arguments as an object, or as the text that they are."""
        arguments = read_arguments(call.arguments)
        return {
            "id": self._id(call.id),
            "type": "function",
            "function": {"name": call.name, "arguments": sound(call.arguments) if arguments is None else arguments},
        }

    def _id(self, id: str) -> str:
        """Return the id of a call as the template takes it."""
        if self._form is None or self._form.name != "mistral" or _MISTRAL_ID.fullmatch(id):
            return sound(id)
        return blake3(id.encode(errors="replace")).hexdigest()[:9]


@asynccontextmanager
async def open_template(rules: TextRules, chosen: str | None = None, parser: str = AUTO) -> AsyncIterator[ChatTemplate]:
    """Run the template of a served model inside the block; its process starts with the first conversation. `chosen`:
    what --template says, the name of one of the checkpoint's templates, a file, or plain. `parser`: what --tool-parser
    says. Raises ConfigError."""
    choice = rules.choice(chosen)
    form = format_of(choice.source, parser)
    if not choice.source:
        yield ChatTemplate(sentence=choice.sentence)
        return
    async with open_template_process(choice.source, rules.bos, rules.eos) as process:
        yield ChatTemplate(process, choice.sentence, form, choice.source)


def _sound(value: Any) -> Any:
    """Return a value of JSON with texts that UTF-8 can hold. Raises TemplateFailed for a number that the message to the
    template's process cannot hold."""
    if isinstance(value, str):
        return sound(value)
    if isinstance(value, int) and not _NUMBER_MIN <= value <= _NUMBER_MAX:
        raise TemplateFailed(
            "a whole number in a tool, a call or a variable has more than 64 bits: send a smaller one, or a text"
        )
    if isinstance(value, dict):
        return {sound(name): _sound(inner) for name, inner in value.items()}
    return [_sound(inner) for inner in value] if isinstance(value, list) else value


def read_arguments(given: str) -> dict[str, Any] | None:
    """Return the arguments of a call as an object; None for what is no JSON object, or too deep. Raises
    TemplateFailed as `_sound` does."""
    try:
        found = msgspec.json.decode(given.encode(errors="replace"))
    except MALFORMED:
        return None
    return _sound(found) if isinstance(found, dict) and not is_deep(found) else None


def plain_conversation(messages: Sequence[ChatMessage]) -> str:
    """Return a conversation as models without a chat template get it."""
    return "".join(f"{message.role}:{_spaced(message.content)}\n" for message in messages) + "assistant:"


def _spaced(content: str) -> str:
    """Return a text with a space before it. An answer usually begins with one, and keeps its tokens that way."""
    return content if content[:1].isspace() else f" {content}"
