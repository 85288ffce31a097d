"""A model's vocabulary as llguidance reads it, with one token more that stands for the end of an answer.

A model may have several tokens that end an answer, or none: the grammar knows only the one behind the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peer.data.tokenizer import panics_as_errors
from peer.data.tokenizer_rules import TOKENIZER_BYTES_MAX, check_tokenizer
from peer.errors import ConfigError
from peer.files import read_bounded

_BYTES = 256
_REASON_CHARS = 200


class _Tokens:
    """The interface that `LLTokenizer` expects of a tokenizer in Python."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], encoder: Any) -> None:
        self.tokens = [*tokens, b"<end of answer>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*special, len(tokens)]
        self._encoder = encoder

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return list(data) if self._encoder is None else list(self._encoder.tokenize_bytes(data))


def read_vocabulary(path: str, vocab_size: int) -> Any:
    """Return an `LLTokenizer` of `vocab_size` + 1 tokens, the last of which ends an answer. `path`: of a
    tokenizer.json; empty for bytes. Raises ConfigError."""
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise ConfigError("response_format needs llguidance: pip install 'barnraise[serve]'") from error

    if not path:
        tokens = [bytes([id]) if id < _BYTES else b"<%d>" % id for id in range(vocab_size)]
        wrapped: Any = _Tokens(tokens, list(range(_BYTES, vocab_size)), None)
    else:
        content = read_bounded(Path(path), TOKENIZER_BYTES_MAX)
        check_tokenizer(content, "the model's tokenizer")
        with _taken():
            own = LLTokenizer(content.decode(), n_vocab=vocab_size, eos_token=0)
            tokens = [own.decode_bytes([id]) for id in range(vocab_size)]
            special = [id for id in range(vocab_size) if own.is_special_token(id)]
        wrapped = _Tokens(tokens, special, own)
    with _taken():
        return LLTokenizer(wrapped, n_vocab=vocab_size + 1, eos_token=vocab_size, slices=LLTokenizer.json_slices())


@contextmanager
def _taken() -> Iterator[None]:
    """Raise ConfigError for a tokenizer that llguidance does not take."""
    try:
        with panics_as_errors("the model's tokenizer"):
            yield
    except ValueError as error:
        raise ConfigError(
            f"the model's tokenizer does not go with grammars ({str(error)[:_REASON_CHARS]}): use another model"
        ) from error
