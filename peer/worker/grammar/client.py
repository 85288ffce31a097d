"""The network process's handle on the "grammar" program: for each answer with a grammar, which tokens may come next.

A schema that ends the process costs the other answers the time to begin again from their tokens, and no error.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio

from peer.errors import WorkerError
from peer.files import temporary_folder, write_atomically
from peer.ipc.grammar_messages import (
    AFFIX_CHARS_MAX,
    MASK_BYTES_MAX,
    SCHEMA_CHARS_MAX,
    BeginGrammar,
    ContinueGrammar,
    Grammar,
    GrammarCommand,
    LoadGrammar,
    TokenMask,
)
from peer.worker.text_client import TextProcess, TextRefused

GRAMMAR_BYTES_MAX: Final = 2 << 30
_COMMAND_S: Final = 20.0
"""More than its CPU time, as other processes may need the cores."""


class GrammarRefused(TextRefused):
    """A schema that is not supported, or takes too much to follow."""


class AnswerGrammar:
    """The grammar of one answer, which the caller closes."""

    def __init__(self, model: ModelGrammars, number: int, grammar: Grammar, ends: Sequence[int]) -> None:
        self._model, self._process, self._number = model, model.process, number
        self._grammar, self._ends = grammar, list(ends)
        self._seen: list[int] | None = None
        """The tokens of the answer that the process has seen; None before it has begun."""

    async def mask(self, ids: Sequence[int]) -> TokenMask:
        """Return what may follow the tokens of the answer so far. Raises GrammarRefused, ConfigError, WorkerError."""
        try:
            try:
                mask = await self._next(list(ids))
            except WorkerError:
                if self._seen is None:
                    raise
                mask = await self._again(list(ids))  # another answer's schema may have ended the process
        except TextRefused as error:
            raise GrammarRefused(str(error)) from error
        except WorkerError as error:
            raise GrammarRefused(
                f"the schema ended the process that follows it ({error}): send a simpler one"
            ) from error
        if len(mask.bits) != self._model.mask_bytes:
            raise WorkerError(f"a mask of {len(mask.bits)} bytes came from the grammar's process: see its log")
        self._seen = list(ids)
        return mask

    def close(self) -> None:
        """Have the process forget the answer with its next command. It may continue all the same."""
        if self._seen is not None:
            self._seen = None
            self._model.ended.append(self._number)

    async def _next(self, ids: list[int]) -> TokenMask:
        if self._seen is None or ids[: len(self._seen)] != self._seen:
            return await self._again(ids)
        process, count = self._process, len(self._seen)
        command = ContinueGrammar(process.next_id(), self._number, count, ids[count:], self._model.take_ended())
        mask = await self._ask(command)
        return await self._again(ids) if mask.is_unknown else mask

    async def _again(self, ids: list[int]) -> TokenMask:
        id, ended = self._process.next_id(), self._model.take_ended()
        command = BeginGrammar(id, self._number, self._grammar, self._ends, ids, ended)
        return await self._ask(command)

    async def _ask(self, command: GrammarCommand) -> TokenMask:
        """Ask in any case until the answer: a command that is cancelled would end the process, which others need."""
        with trio.CancelScope(shield=True):
            return await self._process.ask(command, TokenMask, _COMMAND_S)


class ModelGrammars:
    """The grammars of all answers of one model, in one process, which starts with the first of them."""

    def __init__(self, process: TextProcess, vocab_size: int) -> None:
        self.process: Final = process
        self.mask_bytes: Final = (vocab_size + 7) // 8
        self.ended = list[int]()
        """The numbers of answers that the process is still to forget."""
        self._numbers = itertools.count()

    @property
    def pid(self) -> int | None:
        """The process id; None while there is none."""
        return self.process.pid

    def take_ended(self) -> list[int]:
        """Return the answers to forget, with the command that tells the process."""
        ended, self.ended = self.ended, []
        return ended

    def begin(self, grammar: Grammar, ends: Sequence[int]) -> AnswerGrammar:
        """Return the grammar of a new answer. `ends`: tokens that end it. Raises GrammarRefused for one that is too
        long."""
        if len(grammar.schema) > SCHEMA_CHARS_MAX:
            raise GrammarRefused(
                f"the schema has {len(grammar.schema)} characters, more than {SCHEMA_CHARS_MAX}: send a shorter one"
            )
        if self.mask_bytes > MASK_BYTES_MAX:
            raise GrammarRefused(f"the vocabulary has more than {8 * MASK_BYTES_MAX} tokens: ask for text of any form")
        if max(len(grammar.prefix), len(grammar.suffix)) > AFFIX_CHARS_MAX:
            raise GrammarRefused(f"a text around the JSON has more than {AFFIX_CHARS_MAX} characters: shorten it")
        return AnswerGrammar(self, next(self._numbers), grammar, ends)


@asynccontextmanager
async def open_grammars(tokenizer: bytes, vocab_size: int) -> AsyncIterator[ModelGrammars]:
    """Follow grammars in a tokenizer.json (empty for bytes) inside the block; a process starts with the first."""
    with temporary_folder("barnraise-grammar-") as place:
        path = place / "tokenizer.json"
        if tokenizer:
            write_atomically(path, tokenizer)
        load = LoadGrammar(
            tokenizer=str(path) if tokenizer else "",
            vocab_size=vocab_size,
            directory=str(place / "worker"),
            memory_bytes=GRAMMAR_BYTES_MAX,
        )
        process = TextProcess(load)
        try:
            yield ModelGrammars(process, vocab_size)
        finally:
            await process.close()
