"""The network process's handle on the "text" program: ids of texts, texts of ids, conversations as text.

Each `TextProcess` has a process of its own. A client has one for the tokenizer and one for the chat template: so a
template that does not end is killed, and no answer that is being written waits for that.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import trio

from peer.data.tokenizer import ByteTokenizer
from peer.errors import ConfigError, WorkerError
from peer.files import temporary_folder, write_atomically
from peer.ipc.grammar_messages import LoadGrammar
from peer.ipc.messages import ModelLoaded, WorkerReply
from peer.ipc.text_messages import (
    SEQUENCES_MAX,
    TEXT_CHARS_MAX,
    BytesOfTokens,
    DecodeTokens,
    EncodeText,
    ListSpecial,
    LoadText,
    TextCommand,
    Texts,
    TokenIds,
    TokensBytes,
)
from peer.plain_text import plain
from peer.worker.process import WorkerProcess, handshake, make_private

_TOKENIZE_S: Final = 30.0
_START_S: Final = 60.0
_TOKENIZER_BYTES_MAX: Final = 2 << 30  # the library takes some 20 times the file
TEMPLATE_BYTES_MAX: Final = 256 << 20
_LOG: Final = "text-worker.log"
UNFINISHED: Final = "\ufffd"
"""In the text of tokens that are parts of letters."""
_Body = TypeVar("_Body")


class TextRefused(ConfigError):
    """A text, or ids, that the model's tokenizer or template does not take."""


class TextProcess:
    """One process, started with the first request, and again after a fault. It answers one request at a time."""

    def __init__(self, load: LoadText) -> None:
        self._load = load
        self._worker: WorkerProcess | None = None
        self._turn = trio.Lock()
        self._ids = itertools.count()

    @property
    def pid(self) -> int | None:
        """The process id; None while there is none."""
        return None if self._worker is None else self._worker.pid

    async def start(self) -> None:
        """Start the process, if there is none. Raises ConfigError if it does not take what it is to load,
        WorkerError."""
        async with self._turn:
            self._worker = self._worker or await start_program(self._load)

    async def ask(self, command: TextCommand, kind: type[_Body], limit_s: float) -> _Body:
        """Return the answer. Raises TextRefused, and WorkerError if the process ends or takes too long; the next
        request has another one then."""
        async with self._turn:
            worker, self._worker = self._worker or await start_program(self._load), None
            try:
                with trio.move_on_after(limit_s) as limit:
                    await worker.send(command)
                    answer = await self._answer(worker, command.id)
                    if answer is not None:
                        self._worker = worker
                        return result_of(answer, kind)
                if limit.cancelled_caught:
                    raise WorkerError(f"it takes longer than {limit_s:.0f} s")
                raise WorkerError(await worker.exit_diagnosis())
            finally:
                if self._worker is None:  # its answer may be half read, or come later
                    await worker.destroy()

    def next_id(self) -> int:
        """Return the id of a new command."""
        return next(self._ids)

    async def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            await self._worker.destroy()
            self._worker = None

    @staticmethod
    async def _answer(worker: WorkerProcess, id: int) -> WorkerReply | None:
        """Return the answer to a command; None if the process has ended."""
        while True:
            message = await worker.receive()
            if message is None or (isinstance(message, WorkerReply) and message.id == id):
                return message


async def start_program(load: LoadText | LoadGrammar, fds: tuple[int, ...] = ()) -> WorkerProcess:
    """Start a process that reads what strangers wrote, with descriptors that it inherits. Raises ConfigError if it does
    not take what it is to load, WorkerError."""
    folder = Path(load.directory)
    make_private(folder)
    worker = WorkerProcess.start(folder.parent / _LOG, folder, 1, fds, nice=0)  # its program says how far it gives way
    try:
        answer = await handshake(worker, load, _START_S)
    except BaseException:  # a cancellation, too: the process must not stay
        await worker.destroy()
        raise
    if not isinstance(answer, ModelLoaded):
        await worker.destroy()
        raise ConfigError(answer.message)
    return worker


def result_of(reply: WorkerReply, kind: type[_Body]) -> _Body:
    """Return what a reply brings. Raises TextRefused, WorkerError."""
    if reply.error is not None:
        raise TextRefused(plain(reply.error.message))
    return reply.result(kind)


class TokenWord(NamedTuple):
    """One token alone."""

    text: str
    content: bytes | None
    """Its bytes; None for a part of a letter that the tokenizer does not reveal."""

    @property
    def is_part(self) -> bool:
        """Whether it is a part of a letter, whose text many tokens share."""
        return UNFINISHED in self.text


class ModelText:
    """The tokenizer of a model. Bytes need no process."""

    def __init__(self, process: TextProcess | None = None) -> None:
        self.special: frozenset[int] = frozenset()
        """The ids of special tokens, once it has started."""
        self._process = process
        self._bytes = ByteTokenizer()

    async def start(self) -> None:
        """Start the process. Raises ConfigError if it does not take its tokenizer, WorkerError."""
        if self._process is not None:
            await self._process.start()
            self.special = frozenset(await self._ask(self._process, ListSpecial(self._process.next_id()), TokenIds))

    @property
    def pid(self) -> int | None:
        """The process id of the tokenizer; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def is_bytes(self) -> bool:
        """Whether a token is a byte."""
        return self._process is None

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text. `special`: with what the tokenizer puts before a text, as for a prompt; without it
        for a conversation, whose template has written that. Raises TextRefused, WorkerError."""
        if self._process is None:
            return self._bytes.encode(sound(text))
        if len(text) > TEXT_CHARS_MAX:
            raise TextRefused(f"the text has {len(text)} characters, more than {TEXT_CHARS_MAX}: send less")
        command = EncodeText(self._process.next_id(), sound(text), special)
        return list(await self._ask(self._process, command, TokenIds))

    async def decode(self, *sequences: Sequence[int]) -> list[str]:
        """Return the text of each sequence of ids. Raises WorkerError."""
        if self._process is None:
            return [self._bytes.decode(list(ids)) for ids in sequences]
        command = DecodeTokens(self._process.next_id(), [list(ids) for ids in sequences])
        return list(await self._ask(self._process, command, Texts))

    async def words(self, ids: Iterable[int]) -> dict[int, TokenWord]:
        """Return each token alone. Raises WorkerError."""
        known, found = sorted(set(ids)), dict[int, TokenWord]()
        for start in range(0, len(known), SEQUENCES_MAX):
            part = known[start : start + SEQUENCES_MAX]
            for id, text in zip(part, await self.decode(*([id] for id in part)), strict=True):
                found[id] = TokenWord(text, text.encode())
        parts = [id for id, word in found.items() if word.is_part]
        for start in range(0, len(parts), SEQUENCES_MAX):
            part = parts[start : start + SEQUENCES_MAX]
            for id, content in zip(part, await self._bytes_of(part), strict=True):
                found[id] = TokenWord(found[id].text, content)
        return found

    async def _bytes_of(self, ids: list[int]) -> list[bytes | None]:
        if self._process is None:
            return [self._bytes.bytes_of(id) for id in ids]
        command = BytesOfTokens(self._process.next_id(), ids)
        return list(await self._ask(self._process, command, TokensBytes))

    @staticmethod
    async def _ask(process: TextProcess, command: TextCommand, kind: Any) -> Any:
        try:
            return await process.ask(command, kind, _TOKENIZE_S)
        except WorkerError as error:
            raise WorkerError(f"the model's tokenizer failed ({error}): try again, or use another model") from error


@asynccontextmanager
async def open_model_text(tokenizer: bytes, vocab_size: int) -> AsyncIterator[ModelText]:
    """Run a tokenizer.json (empty for bytes) inside the block. Raises ConfigError if it does not do, WorkerError."""
    if not tokenizer:
        yield ModelText()
        return
    with temporary_folder("barnraise-text-") as place:
        path = place / "tokenizer.json"
        write_atomically(path, tokenizer)
        load = LoadText(
            tokenizer=str(path),
            vocab_size=vocab_size,
            directory=str(place / "worker"),
            memory_bytes=_TOKENIZER_BYTES_MAX,
        )
        process = TextProcess(load)
        try:
            text = ModelText(process)
            await text.start()
            yield text
        finally:
            await process.close()


@asynccontextmanager
async def open_template_process(chat_template: str, bos: str, eos: str) -> AsyncIterator[TextProcess]:
    """Run a chat template inside the block; its process starts with the first conversation."""
    with temporary_folder("barnraise-template-") as place:
        load = LoadText(
            chat_template=chat_template,
            bos=bos,
            eos=eos,
            directory=str(place / "worker"),
            memory_bytes=TEMPLATE_BYTES_MAX,
        )
        process = TextProcess(load)
        try:
            yield process
        finally:
            await process.close()


def sound(text: str) -> str:
    """Return a text with "?" for halves of surrogate pairs, which a command line or JSON can bring and UTF-8 cannot."""
    return text.encode(errors="replace").decode()
