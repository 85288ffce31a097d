"""Tokenizers that somebody else wrote: what may cost more than its text is refused, and a panic is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HubTokenizer

from peer.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer, read_tokenizer
from peer.data.tokenizer_rules import REGEXES, check_tokenizer
from peer.errors import ConfigError
from tests.peer.support.clock import costs_at_most

UNITS_MAX = 100  # of work; what is read here takes 4 at most
EVIL = "(a+)+$"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace("{1,3}", "")
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEEPSEEK_CODER = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
NANOCHAT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
LONG = 40_000
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A byte-level tokenizer.json as plain values."""
    folder = tmp_path_factory.mktemp("hub")
    ByteTokenizer().save(folder)
    content: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return content


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def chain(key: str, *parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", key: list(parts)}


def added(id: int, content: str = "<|x|>") -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, "special": True, **flags}


def nested(depth: int) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "NFC"}
    for _ in range(depth):
        part = chain("normalizers", part)
    return part


@pytest.mark.parametrize("regex", [LLAMA_3, QWEN, GPT_2])
def test_the_tokenizers_of_known_models_are_read(sound: dict[str, Any], regex: str) -> None:
    file = {
        **sound,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": chain("pretokenizers", split(regex), BYTE_LEVEL),
        "added_tokens": [added(256)],
    }
    tokenizer = read_tokenizer(json.dumps(file).encode())
    text = "Don't count 12345\r\n\n   of them, naïve \N{SNOWMAN}"
    assert tokenizer.vocab_size == 257
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("regex", sorted(REGEXES))
def test_every_known_regex_is_one_and_takes_no_time(sound: dict[str, Any], regex: str) -> None:
    file = {**sound, "pre_tokenizer": chain("pretokenizers", split(regex), BYTE_LEVEL)}
    tokenizer = read_tokenizer(json.dumps(file).encode())
    text = "I'm 12345 \N{SNOWMAN}\r\n\n  一가x "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    alone = pre_tokenizers.Split(Regex(regex), "isolated")
    for text in ("a" * LONG + "!", " " * LONG + "x", "1" * LONG + "\n", "\r\n" * (LONG // 2) + "x", "'" * LONG):
        with costs_at_most(UNITS_MAX):
            alone.pre_tokenize_str(text)


def test_the_pipelines_of_known_models_are_read(sound: dict[str, Any]) -> None:
    digits = {"type": "Digits", "individual_digits": True}
    words = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    own = {**BYTE_LEVEL, "use_regex": True}
    for parts in (
        [split(r"[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split(DEEPSEEK_CODER), digits, BYTE_LEVEL],
        [digits, own],  # SmolLM
        [words, BYTE_LEVEL],  # Gemma
        [split(NANOCHAT), BYTE_LEVEL],
    ):
        read_tokenizer(json.dumps({**sound, "pre_tokenizer": chain("pretokenizers", *parts)}).encode())


def test_sentencepiece_tokenizers_are_read(sound: dict[str, Any]) -> None:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    file = {
        **sound,
        "pre_tokenizer": None,
        "normalizer": chain("normalizers", {"type": "Prepend", "prepend": "▁"}, replace),
        "decoder": chain("decoders", back, {"type": "ByteFallback"}, {"type": "Fuse"}),
    }
    assert read_tokenizer(json.dumps(file).encode()).vocab_size == 256


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre_tokenizer": split(EVIL)}, "unknown regular expression"),
        ({"pre_tokenizer": split(r"\s+$")}, "unknown regular expression"),  # DeepSeek LLM's: quadratic
        ({"pre_tokenizer": chain("pretokenizers", BYTE_LEVEL, chain("pretokenizers", split(EVIL)))}, "unknown regular"),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": EVIL}, "content": ""}}, "unknown regular expression"),
        ({"decoder": {"type": "Replace", "pattern": {"Regex": EVIL}, "content": ""}}, "unknown regular expression"),
        ({"normalizer": DOUBLING}, "longer text"),
        ({"normalizer": {**DOUBLING, "pattern": {"String": ""}, "content": ""}}, "0 characters"),
        ({"normalizer": {**DOUBLING, "pattern": {"String": "a", "Regex": EVIL}}}, "neither a String nor a Regex"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "unknown type 'Precompiled'"),
        ({"normalizer": {"type": "ByteLevels"}}, "unknown type"),
        ({"normalizer": {"no": "type"}}, "unknown type"),
        ({"normalizer": chain("normalizers", *[{"type": "ByteLevel"}] * 2)}, "ByteLevel 2 times"),
        ({"normalizer": chain("normalizers", *[DOUBLING] * 100)}, "at most 16"),
        ({"normalizer": nested(300)}, "more than 16 parts"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 1000}}, "1000 characters"),
        ({"normalizer": 7}, "not a tokenizer.json"),
        ({"decoder": {"type": "Strip", "content": " ", "start": 1 << 62, "stop": 0}}, "start"),
        ({"post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}] * 9}}, "just once"),
        ({"added_tokens": [added((1 << 32) - 1)]}, "id 4294967295"),
        ({"added_tokens": [added(-1)]}, "id -1"),
        ({"added_tokens": [added(256, "x" * 257)]}, "257 characters"),
        ({"added_tokens": [added(256, "")]}, "an empty one"),
        ({"model": {"type": "BPE", "vocab": {"a": (1 << 32) - 1}, "merges": []}}, "id 4294967295"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, "empty"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.5}}, "dropout"),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 1 << 40}}, "max_input"),
        ({"model": {"type": "Mystery", "vocab": {"a": 0}}}, "unknown type"),
        ({"model": None}, "not a tokenizer.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_has_no_known_cost_is_refused(sound: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    content = json.dumps({**sound, **changes}).encode()
    with pytest.raises(ConfigError, match=words), costs_at_most(UNITS_MAX):
        read_tokenizer(content)


@pytest.mark.parametrize("content", [b"", b"null", b"[" * 200_000, b'{"model":' * 200_000, b"\xff", b"{}"])
def test_what_is_no_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"not a tokenizer\.json"):
        check_tokenizer(content, "x")


def test_33_mib_are_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b" " * (33 << 20))
    with pytest.raises(ConfigError, match="larger than 33554432 bytes"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="more than 33554432"):
        read_tokenizer(bytes(33 << 20))


def test_padding_and_truncation_of_a_file_do_not_apply(sound: dict[str, Any]) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}
    padding: dict[str, Any] = {"strategy": {"Fixed": 1 << 31}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    tokenizer = read_tokenizer(json.dumps({**sound, "truncation": truncation, "padding": padding}).encode())
    assert tokenizer.encode("long enough") == list(b"long enough")


def test_a_panic_is_an_error_of_ours() -> None:
    """The rules refuse all that is known to panic, so this tokenizer is built beside them."""
    hub = HubTokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    hub.normalizer = normalizers.Replace(Regex(EVIL), "")
    hub.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = FileTokenizer(hub)
    text = "a" * 28 + "b"
    with pytest.raises(ConfigError, match=r"makes its library panic \(Onig: Regex search error"):
        tokenizer.encode(text)
    with pytest.raises(ConfigError, match="panic"):
        tokenizer.encode_file(text.encode())
    assert tokenizer.encode("ab") == [0, 1]
