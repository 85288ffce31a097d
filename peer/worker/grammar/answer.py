"""The process of one answer: it compiles the schema, and says after each token which ones may come next."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from peer.errors import ConfigError
from peer.ipc.grammar_messages import (
    BeginGrammar,
    CallsGrammar,
    ContinueGrammar,
    Grammar,
    GrammarBounds,
    GrammarCommand,
    TokenMask,
)
from peer.ipc.messages import ControlFrames, frame, refusal_of, reply_to

OPTIONS: Final = {
    # A small model may write blanks without end, and more than these say nothing.
    "whitespace_pattern": r"[ \n\r\t]{1,32}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
LEXER_STATES_MAX: Final = 10_000
"""Some 2 kB each."""
_READ_BYTES: Final = 1 << 16
_KEYWORDS: Final = re.compile(r"Unimplemented keys: (\[.*\])")
_FORMAT: Final = re.compile(r"Unknown format: (\S{1,40})")
_REASON_CHARS: Final = 200


def follow_answer(sock: socket.socket, vocabulary: Any, vocab_size: int, bounds: GrammarBounds) -> None:
    """Answer the commands that come over a socket, until it ends. `vocabulary`: what `read_vocabulary` returns."""
    matcher: AnswerMatcher | None = None
    until_s = time.process_time() + bounds.cpu_s
    for command in _commands(sock):
        until_s += bounds.token_cpu_s * len(command.ids)
        used_s = time.process_time()
        if not isinstance(command, BeginGrammar):
            until_s = min(until_s, used_s + bounds.cpu_s)
        if used_s >= until_s:
            return
        # Its signal ends the process, even within one long step.
        signal.setitimer(signal.ITIMER_PROF, until_s - used_s)
        try:
            if isinstance(command, BeginGrammar):
                matcher = AnswerMatcher(compile_grammar(command.grammar, vocabulary), command.ends, vocab_size)
            assert matcher is not None, "no answer has begun"
            matcher.take(command.ids)
            reply = reply_to(command, matcher.mask())
        except ConfigError as error:
            reply = refusal_of(command, str(error), "value")
        try:
            sock.sendall(frame(reply))
        except OSError:
            return  # the client has hung up


def _commands(sock: socket.socket) -> Iterator[BeginGrammar | ContinueGrammar]:
    frames, decoder = ControlFrames(), msgspec.msgpack.Decoder(GrammarCommand)
    while data := sock.recv(_READ_BYTES):
        yield from map(decoder.decode, frames.feed(data))


class AnswerMatcher:
    """The state of a grammar after the tokens of its answer."""

    def __init__(self, matcher: Any, ends: Sequence[int], vocab_size: int) -> None:
        """`matcher`: of `compile_grammar`; `ends`: tokens that end an answer."""
        self._matcher, self._vocab_size = matcher, vocab_size
        self._ends = frozenset(id for id in ends if 0 <= id < vocab_size)
        self._nothing = bytes((vocab_size + 7) // 8)

    def take(self, ids: Sequence[int]) -> None:
        """Continue with tokens. Raises ConfigError."""
        for id in ids:
            if not self._matcher.consume_token(self._vocab_size if id in self._ends else id):
                raise ConfigError(_sentence(self._matcher.get_error() or f"token {id} does not fit"))

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
        is_complete = may_end and bits == self._nothing
        if may_end:
            for id in self._ends:
                bits[id >> 3] |= 1 << (id & 7)
        if not is_complete and bits == self._nothing:
            raise ConfigError("the vocabulary has no token that the schema allows next: take another schema")
        return TokenMask(bytes(bits), is_complete)


def compile_grammar(grammar: Grammar, vocabulary: Any) -> Any:
    """Return an `LLMatcher` at the beginning of a grammar. Raises ConfigError."""
    from llguidance import LLMatcher, LLParserLimits

    text, calls = _guided(grammar.schema), grammar.calls
    if grammar.prefix or grammar.suffix or calls is not None:
        whole = _sequence(grammar.prefix, "body", grammar.suffix)
        rules = [f"start: {whole}" + ("" if calls is None else " | calls"), f"body: %json {text}"]
        source = LLMatcher.grammar_from_lark("\n".join(rules + ([] if calls is None else _calls_rules(calls))))
    else:
        source = LLMatcher.grammar_from_json_schema(text)
    limits = LLParserLimits(max_lexer_states=LEXER_STATES_MAX, verbose_errors=False)
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise ConfigError(_sentence(matcher.get_error()))
    return matcher


def _calls_rules(calls: CallsGrammar) -> list[str]:
    mark = "" if calls.mark_id is None else f"<[{calls.mark_id}]> "
    more = "" if calls.separator is None else f" ({_sequence(calls.separator, 'call', '')})*"
    return [
        f"calls: call{more}",
        f"call: {mark}{_sequence(calls.mark, 'written', calls.close)}",
        f"written: %json {_guided(calls.schema)}",
    ]


def _sequence(before: str, rule: str, after: str) -> str:
    """Return a rule between two texts, as Lark writes it: an empty one is none."""
    return " ".join([*([json.dumps(before)] if before else []), rule, *([json.dumps(after)] if after else [])])


def _guided(schema: str) -> str:
    """Return the JSON of a schema with what llguidance is to know. Raises ConfigError."""
    try:
        read = json.loads(schema)
        if not isinstance(read, dict):
            raise ConfigError("the schema is no JSON object: send one")
        return json.dumps({**read, "x-guidance": OPTIONS}, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise ConfigError(_sentence(str(error))) from error


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
