"""The protocol of the "grammar" program: which tokens may follow in an answer that a JSON schema binds.

A schema is a stranger's. So the program, which has read the vocabulary, forks a process for each answer, which is
confined, bounded and expendable: an answer can begin again from its grammar and its tokens. The network process makes a
socket pair for each answer and sends the program one end, which the fork keeps: its commands go there.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from peer.ipc.messages import Command

SCHEMA_CHARS_MAX: Final = 256 << 10
AFFIX_CHARS_MAX: Final = 1024
MASK_BYTES_MAX: Final = 62 << 10
"""With what compression may add, one small message of a flow."""


class CallsGrammar(msgspec.Struct, frozen=True):
    """The form of calls of functions: each is a mark, JSON that a schema describes, and a text after."""

    schema: str
    """The JSON text of the schema, an object."""
    mark: str = ""
    mark_id: int | None = None
    """A special token that stands before the mark."""
    close: str = ""
    separator: str | None = None
    """The text between two calls; None where there is one alone."""


class Grammar(msgspec.Struct, frozen=True):
    """The form of an answer: a text before, JSON that a schema describes, and a text after; or calls in its place."""

    schema: str
    """The JSON text of the schema, an object."""
    prefix: str = ""
    suffix: str = ""
    calls: CallsGrammar | None = None


ANY_OBJECT: Final = Grammar('{"type":"object"}')
"""Any JSON object."""


class GrammarBounds(msgspec.Struct, frozen=True):
    """What the process of one answer may take; then the kernel ends it, or refuses it memory."""

    cpu_s: float
    """Of the processor, for the schema."""
    token_cpu_s: float
    """Of the processor beside that, for each token; what is saved is kept up to `cpu_s`."""
    memory_bytes: int
    """Beside what it shares with the program."""
    niceness: int = 0
    """How far it gives way to others."""


class LoadGrammar(msgspec.Struct, frozen=True, tag="load_grammar", kw_only=True):
    """The first message to a worker for grammars."""

    tokenizer: str = ""
    """The path of a tokenizer.json; "" for bytes."""
    vocab_size: int
    """The model's: masks have this many bits."""
    directory: str
    """The one folder that the worker may write."""
    sockets: int
    """The inherited descriptor over which the sockets of answers come, each with one byte: the place of its bounds."""
    bounds: tuple[GrammarBounds, ...]


class BeginGrammar(Command, frozen=True, tag="begin_grammar"):
    """The first command of an answer: asks for a TokenMask after its tokens so far."""

    grammar: Grammar
    ends: list[int]
    """Tokens that end an answer: they are allowed where the grammar may end, and nowhere else."""
    ids: list[int]
    """The tokens of the answer so far."""


class ContinueGrammar(Command, frozen=True, tag="continue_grammar"):
    """Asks for a TokenMask after more tokens of the answer."""

    ids: list[int]


class TokenMask(msgspec.Struct, frozen=True):
    """The tokens that may come next."""

    bits: Annotated[bytes, msgspec.Meta(max_length=MASK_BYTES_MAX)]
    """A bit for each token of the vocabulary, the least significant bit of a byte first."""
    is_complete: bool = False
    """Whether nothing but the end may follow."""


GrammarCommand = BeginGrammar | ContinueGrammar
