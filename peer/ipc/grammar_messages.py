"""The protocol of the "grammar" program: which tokens may follow in an answer that a JSON schema binds.

The schema is a stranger's, so the program is confined, bounded, and expendable: each answer can begin again from its
grammar and its tokens.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from peer.ipc.messages import Command

SCHEMA_CHARS_MAX: Final = 256 << 10
AFFIX_CHARS_MAX: Final = 1024
MATCHERS_MAX: Final = 64
"""Answers whose state the process keeps; of more, the one that rested longest begins again when it continues."""
MASK_BYTES_MAX: Final = 62 << 10
"""With what compression may add, one small message of a flow."""


class Grammar(msgspec.Struct, frozen=True):
    """The form of an answer: a text before, JSON that a schema describes, and a text after."""

    schema: str
    """The JSON text of the schema, an object."""
    prefix: str = ""
    suffix: str = ""


ANY_OBJECT: Final = Grammar('{"type":"object"}')
"""Any JSON object."""


class LoadGrammar(msgspec.Struct, frozen=True, tag="load_grammar", kw_only=True):
    """The first message to a worker for grammars."""

    tokenizer: str = ""
    """The path of a tokenizer.json; "" for bytes."""
    vocab_size: int
    """The model's: masks have this many bits."""
    directory: str
    """The one folder that the worker may write."""
    memory_bytes: int
    """The most that the process may allocate, beside what it has once it has loaded."""


class BeginGrammar(Command, frozen=True, tag="begin_grammar"):
    """Begins an answer, or begins it again, and asks for a TokenMask after its tokens so far."""

    answer: int
    """A number that the caller gives to the answer."""
    grammar: Grammar
    ends: list[int]
    """Tokens that end an answer: they are allowed where the grammar may end, and nowhere else."""
    ids: list[int]
    """The tokens of the answer so far."""
    ended: list[int] = msgspec.field(default_factory=list)
    """The numbers of answers to forget."""


class ContinueGrammar(Command, frozen=True, tag="continue_grammar"):
    """Asks for a TokenMask after more tokens of an answer."""

    answer: int
    after: int
    """The number of tokens of the answer before `ids`."""
    ids: list[int]
    ended: list[int] = msgspec.field(default_factory=list)
    """The numbers of answers to forget."""


class TokenMask(msgspec.Struct, frozen=True):
    """The tokens that may come next."""

    bits: Annotated[bytes, msgspec.Meta(max_length=MASK_BYTES_MAX)] = b""
    """A bit for each token of the vocabulary, the least significant bit of a byte first; empty where `is_unknown`."""
    is_complete: bool = False
    """Whether nothing but the end may follow."""
    is_unknown: bool = False
    """Whether the process does not have the answer after so many tokens: begin it again."""


GrammarCommand = BeginGrammar | ContinueGrammar
