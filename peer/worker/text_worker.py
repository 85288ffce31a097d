"""The "text" program of a worker: the tokenizer and the chat template of a model, which strangers wrote.

A client holds a key, and is connected to others; so it parses no tokenizer and runs no template itself. Both libraries
are imported only where they are needed, so that the memory of a template's process can be bounded closely.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from peer.errors import ConfigError
from peer.ipc.messages import ModelLoaded
from peer.ipc.text_messages import (
    TOKEN_BYTES_MAX,
    BytesOfTokens,
    EncodeText,
    ListSpecial,
    LoadText,
    RenderChat,
    RenderedChat,
    TextCommand,
)
from peer.worker.control_link import ControlLink

if TYPE_CHECKING:
    from peer.data.chat_template import ChatTemplateCode
    from peer.data.tokenizer import Tokenizer

RENDER_CPU_S: Final = 1.0
"""CPU time for one conversation; then the kernel ends the process, even within one long step."""


class TextWorker:
    """Answers its commands one after the other."""

    commands: ClassVar[Any] = TextCommand

    def __init__(self, link: ControlLink, load: LoadText) -> None:
        self._link = link
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplateCode | None = None
        if load.tokenizer:
            from peer.data.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(load.tokenizer)
            if self._tokenizer.vocab_size > load.vocab_size:
                raise ConfigError(
                    f"the tokenizer has {self._tokenizer.vocab_size} ids and the model only {load.vocab_size}: take a"
                    " model whose parts belong together"
                )
        if load.chat_template:
            from peer.data.chat_template import ChatTemplateCode

            self._template = ChatTemplateCode(load.chat_template, load.bos, load.eos)
        hold_memory(memory_held() + load.memory_bytes)
        link.send(ModelLoaded(device="", bf16=False, compiled=False))

    def run(self) -> None:
        """Serve commands until the process is ended."""
        while True:
            command = self._link.commands.get()
            try:
                body = self._answer(command)
            except ConfigError as error:
                self._link.refuse(command, str(error), "value")
            else:
                self._link.reply(command, body)

    def _answer(self, command: TextCommand) -> Any:
        if isinstance(command, RenderChat):
            return self._render(command)
        assert self._tokenizer is not None
        if isinstance(command, EncodeText):
            return self._tokenizer.encode(command.text, special=command.special)
        if isinstance(command, BytesOfTokens):
            found = [self._tokenizer.bytes_of(id) for id in command.ids]
            return [None if one is None or len(one) > TOKEN_BYTES_MAX else one for one in found]
        if isinstance(command, ListSpecial):
            return sorted(self._tokenizer.special)
        return [self._tokenizer.decode(ids) if ids else "" for ids in command.sequences]

    def _render(self, command: RenderChat) -> RenderedChat:
        assert self._template is not None
        try:
            with processor_time(RENDER_CPU_S):
                text = self._template.render(command.messages, command.tools, command.variables)
                return RenderedChat(text=text)
        except ValueError as error:
            return RenderedChat(fault=str(error))


def memory_held() -> int:
    """Return the bytes that this process has allocated; 0 where the system does not report them, as in a fork of a
    confined process."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    return 0


def hold_memory(size_bytes: int) -> None:
    """Limit what this process may allocate, in bytes; the kernel refuses more."""
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, size_bytes))


@contextmanager
def processor_time(seconds: float) -> Iterator[None]:
    """Have the kernel end this process if the block takes more of the processor."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
