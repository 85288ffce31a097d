"""Small tokenizers in the form of each family's, made by `tokenizers` itself, and varied lines to read with them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from peer.data.tokenizer import _stand_in

VOCABULARY: Final = 700
_SUFFIXES: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS: Final = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT: Final = _SUFFIXES + _LETTERS + r"|\p{N}{1,3}" + _REST
_QWEN_SPLIT: Final = _SUFFIXES + _LETTERS + r"|\p{N}" + _REST
_BYTES: Final = [f"<0x{byte:02X}>" for byte in range(256)]
# what tokenizers are trained on, and with what a line is made: letters of one to four bytes, joined ones, code, signs
_TEXT: Final = """
the rain in Spain stays mainly in the plain and there is nothing that they'll hear here again isn't it
Straße schöne Grüße déjà-vu naïve Ångström œuvre señor İstanbul ŁÓDŹ Привет мир как дела Γειά σου κόσμε
שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก 你好世界天地玄黄 こんにちは カタカナ 안녕하세요 세계
def f(x): return x**2 + 1 // != <= "quoted" 'single' `code` {key: [1, 2.5e-3]} 1234567 0x1F 3.14159 $9.99 50%
"""
_WORDS: Final = _TEXT.split()
_RARE: Final = (
    "🙂", "👩\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "🇫🇷", "𝔘𝔫𝔦", "𠜎𠜱𡿺", "e\u0301", "A\u030a", "\ufb01",
    "\u200b", "\u00a0", "\u3000", "\ufffd", "\u2581", "\u2028", "\ufffd🙂\ufffd", "\x00", "\x1b[0m", "\ufeff", "\u0124",
    "漢字仮名交じり文を長く続ける", "🙂🙃😉😊😇🥲😋😛", "\U0010ffff", "\u2026", "\u2014", "<0x41>",
)  # fmt: skip
_SPACES: Final = ("", "", " ", " ", " ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", " \n ")


@dataclass(frozen=True)
class TextFamily:
    """The tokenizer of one family of models."""

    name: str
    tokenizer: Tokenizer
    bos: str
    """What a text begins with; empty for none."""
    eos: str
    special: tuple[str, ...]
    byte_token: Callable[[int], str]
    """Returns the name of the token of a byte."""

    @property
    def content(self) -> bytes:
        """The tokenizer.json."""
        return self.tokenizer.to_str().encode()

    @property
    def bos_ids(self) -> list[int]:
        found = self.tokenizer.token_to_id(self.bos) if self.bos else None
        return [] if found is None else [found]

    def spelled(self, text: str) -> list[int]:
        """Return a text's ids with one token a byte, which a model may draw as well."""
        vocabulary = self.tokenizer.get_vocab()
        return [vocabulary[self.byte_token(byte)] for byte in text.encode()]


def lines(count: int, special: tuple[str, ...], seed: int = 1) -> Iterator[str]:
    """Yield different lines of many scripts, with the family's own special tokens among them; the first is empty."""
    draw, seen = random.Random(seed), set[str]()
    yield ""
    while len(seen) < count - 1:
        line = ""
        for _ in range(draw.randrange(1, 14)):
            kind = draw.random()
            word = draw.choice(special if kind < 0.06 else _RARE if kind < 0.3 else _WORDS)
            line += draw.choice(_SPACES) + (word if draw.random() < 0.9 else word[: draw.randrange(len(word) + 1)])
        line += draw.choice(_SPACES)
        if line not in seen:
            seen.add(line)
            yield line


def llama2() -> TextFamily:
    """Return sentencepiece's BPE as Llama 2 has it: spaces are letters, unknown letters are bytes."""
    made = _sentencepiece(("<unk>", "<s>", "</s>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _beginning("llama2", made, "<s>", "</s>", ("<s>", "</s>", "<unk>"), _BYTES.__getitem__)


def mistral() -> TextFamily:
    """Return the same with Metaspace, and with marks for instructions, as Mistral has it from its third version on."""
    special = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]")
    made = _sentencepiece(("<unk>", *special))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    return _beginning("mistral", made, "<s>", "</s>", special, _BYTES.__getitem__)


def llama3() -> TextFamily:
    """Return a byte-level BPE that puts a token before a text."""
    special = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    made = _byte_level(_LLAMA3_SPLIT, special, ignore_merges=True)
    return _beginning("llama3", made, special[0], special[-1], special, _stand_in)


def qwen2() -> TextFamily:
    """Return a byte-level BPE of composed letters, without a token before a text."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    made = _byte_level(_QWEN_SPLIT, special, ignore_merges=False)
    made.normalizer = normalizers.NFC()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return TextFamily("qwen2", made, "", special[2], special, _stand_in)


FAMILIES: Final[tuple[Callable[[], TextFamily], ...]] = (llama2, mistral, llama3, qwen2)


def _sentencepiece(special: tuple[str, ...]) -> Tokenizer:
    # trained with spaces as letters; letters that come once stay unknown, and so are bytes
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    learned.train_from_iterator(_training(), _trainer(limit_alphabet=60))
    model = _model(learned)
    pieces = [*special, *_BYTES, *sorted(model["vocab"], key=model["vocab"].get)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in special])
    return made


def _byte_level(split: str, special: tuple[str, ...], *, ignore_merges: bool) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(_training(), _trainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    made.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in special])
    return made


def _beginning(
    name: str, made: Tokenizer, bos: str, eos: str, special: tuple[str, ...], byte_token: Callable[[int], str]
) -> TextFamily:
    """Put the beginning-of-text token before each text."""
    pair = (bos, made.token_to_id(bos))
    made.post_processor = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[pair])
    return TextFamily(name, made, bos, eos, special, byte_token)


def _training() -> list[str]:
    """Return what the tokenizers are trained on: the words several times, the common scripts most of all."""
    draw = random.Random(0)
    return [
        " ".join(draw.choices(_WORDS, [3.0 if word.isascii() else 1.0 for word in _WORDS], k=12)) for _ in range(300)
    ]


def _trainer(**options: Any) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(vocab_size=VOCABULARY, show_progress=False, **options)


def _model(made: Tokenizer) -> dict[str, Any]:
    model: dict[str, Any] = json.loads(made.to_str())["model"]
    return model


# written from the documented formats
_LLAMA2_CHAT: Final = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ (bos_token if loop.index0 == 0) ~ '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_MISTRAL_CHAT: Final = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate user and assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""
_LLAMA3_CHAT: Final = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_QWEN2_CHAT: Final = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_QWEN3_CHAT: Final = """
{%- if tools %}{{- raise_exception("no tools") }}{%- endif %}
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
_CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES: Final = {
    "llama2": (_LLAMA2_CHAT,),
    "mistral": (_MISTRAL_CHAT,),
    "llama3": (_LLAMA3_CHAT,),
    "qwen2": (_QWEN2_CHAT, _QWEN3_CHAT, _CHATML),
}
"""The chat templates of each family."""
