"""The network process's handle on the "grammar" program: for each answer with a grammar, which tokens may come next.

Each answer has a process of its own. One that takes too much begins again in a second one, which may take more and gets
what others leave of the processor: so a schema that costs seconds, or ends its process, holds up no other answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from peer.errors import WorkerError
from peer.files import temporary_folder, write_atomically
from peer.ipc.grammar_messages import (
    AFFIX_CHARS_MAX,
    MASK_BYTES_MAX,
    SCHEMA_CHARS_MAX,
    BeginGrammar,
    CallsGrammar,
    ContinueGrammar,
    Grammar,
    GrammarBounds,
    LoadGrammar,
    TokenMask,
)
from peer.notifier import beside_block
from peer.worker.grammar.forks import COMMAND_S, AnswerFork, AnswerForks, ForkKind
from peer.worker.text_client import TextRefused

QUICK: Final = ForkKind(GrammarBounds(cpu_s=0.25, token_cpu_s=0.02, memory_bytes=64 << 20), most=64)
"""The first process of an answer. A schema of 25 objects of 25 strings takes 0.04 s, and a mask some 0.5 ms."""
PATIENT: Final = ForkKind(GrammarBounds(cpu_s=2.0, token_cpu_s=0.1, memory_bytes=256 << 20, niceness=19), most=4)
"""The second one."""


class GrammarRefused(TextRefused):
    """A schema that is not supported, or takes too much to follow."""


class AnswerGrammar:
    """The grammar of one answer, which the caller closes."""

    def __init__(self, model: ModelGrammars, grammar: Grammar, ends: Sequence[int]) -> None:
        self._model, self._kind = model, QUICK
        self._grammar, self._ends = grammar, list(ends)
        self._fork: AnswerFork | None = None
        self._seen = list[int]()
        """The tokens of the answer that the process has seen."""

    async def mask(self, ids: Sequence[int]) -> TokenMask:
        """Return what may follow the tokens of the answer so far. Raises GrammarRefused, ConfigError, WorkerError."""
        try:
            mask, has_again = await self._next(list(ids)), False
            while mask is None:
                if self._fork is not None and self._fork.is_lost and not has_again:
                    has_again = True  # it may have ended for no fault of the schema
                elif self._kind is QUICK:
                    self._kind = PATIENT
                else:
                    break
                mask = await self._begin(list(ids))
        except TextRefused as error:
            raise GrammarRefused(str(error)) from error
        if mask is None:
            raise GrammarRefused(
                f"the schema takes more than {PATIENT.bounds.cpu_s:g} s of the processor,"
                f" {PATIENT.bounds.memory_bytes >> 20} MiB or {COMMAND_S:.0f} s to follow: send a simpler one"
            )
        if len(mask.bits) != self._model.mask_bytes:
            raise WorkerError(f"a mask of {len(mask.bits)} bytes came from the grammar's process: see its log")
        self._seen = list(ids)
        return mask

    def close(self) -> None:
        """End the process. The answer may continue all the same."""
        if self._fork is not None:
            self._fork.end()
            self._fork = None

    async def _next(self, ids: list[int]) -> TokenMask | None:
        """Return the mask; None if the answer's process has ended."""
        fork, count = self._fork, len(self._seen)
        if fork is None or fork.is_ended or ids[:count] != self._seen:
            return await self._begin(ids)
        return await fork.ask(lambda id: ContinueGrammar(id, ids[count:]), TokenMask)

    async def _begin(self, ids: list[int]) -> TokenMask | None:
        self.close()
        self._fork = await self._model.forks.fork(self._kind)
        return await self._fork.ask(lambda id: BeginGrammar(id, self._grammar, self._ends, ids), TokenMask)


class ModelGrammars:
    """The grammars of all answers of one model. A program starts with the first of them."""

    def __init__(self, forks: AnswerForks, vocab_size: int) -> None:
        self.forks: Final = forks
        self.mask_bytes: Final = (vocab_size + 7) // 8

    def begin(self, grammar: Grammar, ends: Sequence[int]) -> AnswerGrammar:
        """Return the grammar of a new answer. `ends`: tokens that end it. Raises GrammarRefused for one that is too
        long."""
        calls = grammar.calls or CallsGrammar("")
        size = len(grammar.schema) + len(calls.schema)
        if size > SCHEMA_CHARS_MAX:
            of_calls = "" if grammar.calls is None else " with that of the calls"
            raise GrammarRefused(
                f"the schema has {size} characters{of_calls}, more than {SCHEMA_CHARS_MAX}: send a shorter one"
            )
        if self.mask_bytes > MASK_BYTES_MAX:
            raise GrammarRefused(f"the vocabulary has more than {8 * MASK_BYTES_MAX} tokens: ask for text of any form")
        affixes = grammar.prefix, grammar.suffix, calls.mark, calls.close, calls.separator or ""
        if max(map(len, affixes)) > AFFIX_CHARS_MAX:
            raise GrammarRefused(f"a text around the JSON has more than {AFFIX_CHARS_MAX} characters: shorten it")
        return AnswerGrammar(self, grammar, ends)


@asynccontextmanager
async def open_grammars(tokenizer: bytes, vocab_size: int) -> AsyncIterator[ModelGrammars]:
    """Follow grammars in a tokenizer.json (empty for bytes) inside the block."""
    with temporary_folder("barnraise-grammar-") as place:
        path = place / "tokenizer.json"
        if tokenizer:
            write_atomically(path, tokenizer)

        def load(sockets: int) -> LoadGrammar:
            return LoadGrammar(
                tokenizer=str(path) if tokenizer else "",
                vocab_size=vocab_size,
                directory=str(place / "worker"),
                sockets=sockets,
                bounds=tuple(kind.bounds for kind in kinds),
            )

        kinds = (QUICK, PATIENT)
        forks: AnswerForks | None = None
        try:
            async with beside_block() as nursery:
                forks = AnswerForks(load, kinds, nursery)
                yield ModelGrammars(forks, vocab_size)
        finally:
            if forks is not None:  # not sooner: a start that is under way ends with the nursery
                await forks.close()
