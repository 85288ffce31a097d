"""Rules for a `tokenizer.json`, checked before the parser of the `tokenizers` library sees it.

A run brings its tokenizer, and every peer runs it over its own text. That must cost time and memory in
proportion to the text: a pattern such as `(a+)+$` panics the library with 29 bytes of text, padding to 2**31 tokens
takes all memory, and a replacement that doubles the text, applied thirty times, does so as well. So a file may name
only parts of known cost, only the regular expressions of well-known models, and only ids that a model can have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from peer.config import VOCABULARY_MAX
from peer.decoding import MALFORMED, malformed
from peer.errors import ConfigError

TOKENIZER_BYTES_MAX: Final = 32 << 20  # Llama 3's has 9 to 17 MB, others of 256 thousand ids up to 33
TOKEN_CHARACTERS_MAX: Final = 256
PARTS_MAX: Final = 16  # of one pipeline of normalizers, pre-tokenizers or decoders
WORD_CHARACTERS_MAX: Final = 1000  # of what WordPiece tries to match, in quadratic time
_REMEDY: Final = "name a tokenizer.json of a well-known model, or train one without that part"

_SUFFIXES: Final = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"
_ENDINGS: Final = "'(?i:[sdmt]|ll|ve|re)"
_OWN: Final = r"[^\r\n\p{L}\p{N}]?+\p{L}+"
_OWN_SIGNS: Final = r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_ASCII_SIGN: Final = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""

REGEXES: Final = frozenset(
    (
        rf"{_SUFFIXES}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",  # GPT-2
        rf"(?i:{_SUFFIXES}){_WORDS}|\p{{N}}{{1,3}}{_SIGNS}{_SPACES}",  # cl100k, Llama 3
        rf"(?i:{_SUFFIXES}){_WORDS}|\p{{N}}{_SIGNS}{_SPACES}",  # Qwen2, Qwen3
        rf"(?i:{_SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}",  # Qwen3.5
        rf"{_BEFORE}{_UPPER}*{_LOWER}+(?i:{_SUFFIXES})?|{_BEFORE}{_UPPER}+{_LOWER}*(?i:{_SUFFIXES})?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}",  # o200k
        rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}",  # Mistral's Tekken
        rf"{_ASCII_SIGN}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_SPACES}",  # DeepSeek 3
        "[一-龥\u3040-ゟ゠-ヿ]+",  # DeepSeek, too
        "[一-龥\u0800-一\uac00-\ud7ff]+",  # DeepSeek Coder
        " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",  # BLOOM, Poro, Viking
        rf"{_ENDINGS}|{_OWN}|\p{{N}}{{1,3}}{_OWN_SIGNS}",  # GPT-4's as minbpe writes it
        rf"{_ENDINGS}|{_OWN}|\p{{N}}{{1,2}}{_OWN_SIGNS}",  # nanochat
        rf"{_ENDINGS}|{_OWN}|\p{{N}}{_OWN_SIGNS}",  # Ling
        r"\p{N}{1,3}",
        r"\p{N}",
        r"\p{N}+",
        r"\d",
        r"\d+",
        r"[0-9]",
        r"[0-9][0-9][0-9]",
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"\s+",
        r" {2,}",
    )
)
"""The patterns that a file may hold: each matches in linear time, the slowest 40 thousand characters in 41 ms.
DeepSeek LLM's `\\s+$` is not among them: 40 thousand spaces before a letter take it 6 s, half of them 1.5 s."""

_REPEATED: Final = {"Split", "Replace"}  # may occur more than once in a pipeline, as these cannot lengthen the text
_NORMALIZERS: Final = {
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Prepend", "Replace", "Strip",
    "StripAccents",
}  # fmt: skip
_PRE_TOKENIZERS: Final = {
    "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Split",
    "UnicodeScripts", "Whitespace", "WhitespaceSplit",
}  # fmt: skip
_DECODERS: Final = {
    "BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece",
}  # fmt: skip
_POST_PROCESSORS: Final = {"BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"}
_INNER: Final = ("normalizers", "pretokenizers", "decoders", "processors")  # where a Sequence keeps its parts

_Part = dict[str, Any]


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    type: str = "BPE"
    merges: list[str | tuple[str, str]] = []
    dropout: float | None = None
    max_input_chars_per_word: int = 100


class _TokenizerFile(msgspec.Struct):
    """A `tokenizer.json`, as far as it is checked."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    normalizer: _Part | None = None
    pre_tokenizer: _Part | None = None
    post_processor: _Part | None = None
    decoder: _Part | None = None


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class _Vocabulary(msgspec.Struct):
    model: _Model


def token_id(content: bytes, token: str) -> int | None:
    """Return the id of a token in the content of a tokenizer.json, None if it has none. Raises MALFORMED."""
    for added in msgspec.json.decode(content, type=_AddedTokens).added_tokens:
        if added.content == token:
            return added.id
    vocabulary = msgspec.json.decode(content, type=_Vocabulary).model.vocab
    if isinstance(vocabulary, dict):
        return vocabulary.get(token)
    return next((id for id, (known, _) in enumerate(vocabulary) if known == token), None)


def check_tokenizer(content: bytes, name: str) -> int:
    """Return the number of ids, 1 + the highest. Raises ConfigError, in which `name` names the file, unless the file
    holds only what is known to cost little."""
    if len(content) > TOKENIZER_BYTES_MAX:
        raise ConfigError(f"{name} has {len(content)} bytes, more than {TOKENIZER_BYTES_MAX}: {_REMEDY}")
    try:
        file = msgspec.json.decode(content, type=_TokenizerFile)
    except MALFORMED as error:
        raise ConfigError(f"{name} is not a tokenizer.json, as it {malformed(content, error)}") from error
    try:
        _check_parts("normalizer", file.normalizer, _NORMALIZERS)
        _check_parts("pre_tokenizer", file.pre_tokenizer, _PRE_TOKENIZERS)
        _check_parts("decoder", file.decoder, _DECODERS)
        _check_parts("post_processor", file.post_processor, _POST_PROCESSORS)
        return _check_ids(file)
    except ValueError as error:
        raise ConfigError(f"{name} is refused, as its {error}: {_REMEDY}") from error


def _check_ids(file: _TokenizerFile) -> int:
    model = file.model
    if model.type not in ("BPE", "Unigram", "WordLevel", "WordPiece"):
        raise ValueError(f"model is of the unknown type {model.type[:40]!r}")
    if model.dropout:
        raise ValueError(f"dropout is {model.dropout}, so that the same text would have other ids each time")
    if not 0 <= model.max_input_chars_per_word <= WORD_CHARACTERS_MAX:
        raise ValueError(f"max_input_chars_per_word is {model.max_input_chars_per_word}")
    pairs: list[tuple[str, int]] = [(token.content, token.id) for token in file.added_tokens]
    if isinstance(model.vocab, dict):
        pairs += model.vocab.items()
    else:
        pairs += [(token, index) for index, (token, _) in enumerate(model.vocab)]
    if not pairs:
        raise ValueError("vocabulary is empty")
    if len(pairs) > VOCABULARY_MAX:
        raise ValueError(f"vocabulary has {len(pairs)} entries")
    for token, id in pairs:
        if not 0 <= id < VOCABULARY_MAX:
            raise ValueError(f"token {token[:40]!r} has the id {id}, above {VOCABULARY_MAX - 1}")
        if len(token) > TOKEN_CHARACTERS_MAX:
            raise ValueError(f"token with the id {id} has {len(token)} characters, more than {TOKEN_CHARACTERS_MAX}")
    if any(not token.content for token in file.added_tokens):
        raise ValueError("added tokens include an empty one")
    return 1 + max(id for _, id in pairs)


def _check_parts(kind: str, part: _Part | None, known: set[str]) -> None:
    parts = list(_flattened(part))
    if len(parts) > PARTS_MAX:
        raise ValueError(f"{kind} has {len(parts)} parts or more, more than {PARTS_MAX}")
    for name, count in Counter(str(one.get("type")) for one in parts).items():
        if name not in known:
            raise ValueError(f"{kind} is of the unknown type {name[:40]!r}")
        if count > 1 and name not in _REPEATED:
            raise ValueError(f"{kind} has {name} {count} times")
    for one in parts:
        _check_part(kind, one)


def _flattened(part: _Part | None) -> Iterator[_Part]:
    """Yield the parts of a pipeline, PARTS_MAX + 1 at most. No recursion: sequences may be nested deeply."""
    pending: list[object] = [] if part is None else [part]
    for _ in range(PARTS_MAX * PARTS_MAX):
        if not pending:
            return
        one = pending.pop()
        if not isinstance(one, dict):
            raise ValueError("pipelines hold something other than an object")
        if one.get("type") != "Sequence":
            yield one
            continue
        inner = next((one[key] for key in _INNER if key in one), None)
        if not isinstance(inner, list) or len(inner) > PARTS_MAX:
            raise ValueError(f"Sequence is no list of at most {PARTS_MAX} parts")
        pending += inner
    raise ValueError(f"pipelines have more than {PARTS_MAX} parts")


def _check_part(kind: str, part: Mapping[str, object]) -> None:
    if "pattern" in part:
        _check_pattern(kind, part)
    name = part["type"]
    for key, value in part.items():
        if isinstance(value, str) and key not in ("type", "content") and len(value) > TOKEN_CHARACTERS_MAX:
            raise ValueError(f"{kind} {name} has a {key[:40]} of {len(value)} characters")
        if isinstance(value, int) and not 0 <= value <= TOKEN_CHARACTERS_MAX:
            raise ValueError(f"{kind} {name} has {key[:40]} {value}")
    if name == "TemplateProcessing":
        _check_template(part.get("single"))


def _check_pattern(kind: str, part: Mapping[str, object]) -> None:
    """Check the pattern of a Split or Replace, and that a replacement is no longer than what it replaces."""
    pattern = part["pattern"]
    plain, regex = (pattern.get("String"), pattern.get("Regex")) if isinstance(pattern, dict) else (None, None)
    if isinstance(plain, str) and regex is None:
        if not 1 <= len(plain) <= TOKEN_CHARACTERS_MAX:
            raise ValueError(f"{kind} has a pattern of {len(plain)} characters")
        shortest = len(plain)
    elif isinstance(regex, str) and plain is None:
        if regex.replace("\r", r"\r").replace("\n", r"\n") not in REGEXES:
            raise ValueError(f"{kind} has the unknown regular expression {regex[:80]!r}")
        shortest = 1
    else:
        raise ValueError(f"{kind} has a pattern that is neither a String nor a Regex")
    content = part.get("content", "")
    if not isinstance(content, str) or len(content) > shortest:
        raise ValueError(f"{kind} replaces text by longer text")


def _check_template(single: object) -> None:
    """Check that the text occurs once in what is made of it."""
    if not isinstance(single, Sequence) or len(single) > PARTS_MAX:
        raise ValueError(f"post_processor has a template that is no list of at most {PARTS_MAX} parts")
    if sum(isinstance(piece, dict) and "Sequence" in piece for piece in single) != 1:
        raise ValueError("post_processor has a template in which the text does not occur just once")
