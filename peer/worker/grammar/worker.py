"""The "grammar" program of a worker: it compiles strangers' JSON schemas, and says which tokens may come next."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from peer.errors import ConfigError
from peer.ipc.grammar_messages import (
    MATCHERS_MAX,
    BeginGrammar,
    Grammar,
    GrammarCommand,
    LoadGrammar,
    TokenMask,
)
from peer.ipc.messages import ModelLoaded
from peer.worker.control_link import ControlLink
from peer.worker.grammar.vocabulary import read_vocabulary
from peer.worker.text_worker import hold_memory, processor_time

GRAMMAR_CPU_S: Final = 2.0
"""CPU time for one command; then the kernel ends the process."""
OPTIONS: Final = {
    # A small model may write blanks without end, and more than these say nothing.
    "whitespace_pattern": r"[ \n\r\t]{1,32}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
LEXER_STATES_MAX: Final = 10_000
"""Of one answer, some 2 kB each."""
_KEYWORDS: Final = re.compile(r"Unimplemented keys: (\[.*\])")
_FORMAT: Final = re.compile(r"Unknown format: (\S{1,40})")
_REASON_CHARS: Final = 200


class _Matcher:
    """One answer: the grammar's state after `count` tokens."""

    def __init__(self, matcher: Any, ends: Sequence[int], vocab_size: int) -> None:
        self.count = 0
        self._matcher, self._vocab_size = matcher, vocab_size
        self._ends = frozenset(id for id in ends if 0 <= id < vocab_size)

    def take(self, ids: Sequence[int]) -> None:
        """Continue with tokens. Raises ConfigError."""
        for id in ids:
            if not self._matcher.consume_token(self._vocab_size if id in self._ends else id):
                raise ConfigError(_sentence(self._matcher.get_error() or f"token {id} does not fit"))
            self.count += 1

    def mask(self) -> TokenMask:
        """Return the tokens that may come next. Raises ConfigError."""
        found, size = self._matcher.compute_bitmask(), self._vocab_size
        if self._matcher.is_error():
            raise ConfigError(_sentence(self._matcher.get_error()))
        bits = bytearray(found[: (size + 7) // 8])
        may_end = bool(found[size >> 3] >> (size & 7) & 1)
        if size & 7:
            bits[-1] &= (1 << (size & 7)) - 1
        for id in self._ends:
            bits[id >> 3] &= ~(1 << (id & 7))
        is_complete = may_end and not any(bits)
        if may_end:
            for id in self._ends:
                bits[id >> 3] |= 1 << (id & 7)
        if not is_complete and not any(bits):
            raise ConfigError("the vocabulary has no token that the schema allows next: take another schema")
        return TokenMask(bytes(bits), is_complete)


class GrammarWorker:
    """Answers its commands one after the other."""

    commands: ClassVar[Any] = GrammarCommand

    def __init__(self, link: ControlLink, load: LoadGrammar) -> None:
        self._link, self._load = link, load
        self._vocabulary = read_vocabulary(load.tokenizer, load.vocab_size)
        self._matchers: OrderedDict[int, _Matcher] = OrderedDict()  # in the order of their last use
        hold_memory(load.memory_bytes)
        link.send(ModelLoaded(device="", bf16=False, compiled=False))

    def run(self) -> None:
        """Serve commands until the process is ended."""
        while True:
            command = self._link.commands.get()
            try:
                with processor_time(GRAMMAR_CPU_S):
                    body = self._answer(command)
            except ConfigError as error:
                self._matchers.pop(command.answer, None)
                self._link.refuse(command, str(error), "value")
            else:
                self._link.reply(command, body)

    def _answer(self, command: GrammarCommand) -> TokenMask:
        for ended in command.ended:
            self._matchers.pop(ended, None)
        held = self._matchers.pop(command.answer, None)
        if isinstance(command, BeginGrammar):
            matcher = self._compile(command.grammar)
            held = _Matcher(matcher, command.ends, self._load.vocab_size)
        elif held is None or held.count != command.after:
            return TokenMask(is_unknown=True)
        held.take(command.ids)
        mask = held.mask()
        self._matchers[command.answer] = held
        if len(self._matchers) > MATCHERS_MAX:
            self._matchers.popitem(last=False)
        return mask

    def _compile(self, grammar: Grammar) -> Any:
        """Return a matcher at its beginning. Raises ConfigError."""
        from llguidance import LLMatcher, LLParserLimits

        try:
            schema = json.loads(grammar.schema)
            if not isinstance(schema, dict):
                raise ConfigError("the schema is no JSON object: send one")
            text = json.dumps({**schema, "x-guidance": OPTIONS}, ensure_ascii=False)
        except (ValueError, RecursionError) as error:
            raise ConfigError(_sentence(str(error))) from error
        if grammar.prefix or grammar.suffix:
            parts = [json.dumps(grammar.prefix)] * bool(grammar.prefix) + ["body"]
            parts += [json.dumps(grammar.suffix)] * bool(grammar.suffix)
            source = LLMatcher.grammar_from_lark(f"start: {' '.join(parts)}\nbody: %json {text}")
        else:
            source = LLMatcher.grammar_from_json_schema(text)
        limits = LLParserLimits(max_lexer_states=LEXER_STATES_MAX, verbose_errors=False)
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise ConfigError(_sentence(matcher.get_error()))
        return matcher


def _sentence(error: str) -> str:
    """Return an error of llguidance as a sentence with a remedy."""
    if found := _KEYWORDS.search(error):
        names = ", ".join(str(name)[:40] for name in json.loads(found[1])[:8])
        return f"the schema has {names}, which this server does not support: leave it out"
    if found := _FORMAT.search(error):
        return f"the schema has the format {found[1]}, which this server does not support: leave it out"
    if "oneOf constraints are not supported" in error:
        return "the schema has oneOf with parts that overlap, which this server does not support: use anyOf"
    lines = [line.strip() for line in error.splitlines() if line.strip() and not line.startswith("<")]
    reason = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "no reason given")
    return f"the schema cannot be followed ({reason.removeprefix('error: ')[:_REASON_CHARS]}): simplify it"
