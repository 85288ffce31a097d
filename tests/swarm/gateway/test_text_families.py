"""Ids and texts of four families are those of `tokenizers`, beginnings and templates those of `transformers`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from peer.data.tokenizer import FileTokenizer, read_tokenizer
from peer.model.text.rules import TextRules
from peer.worker.text_client import ModelText, open_model_text
from swarm.gateway.template import ChatMessage, open_template
from swarm.inference.decoding import TextStream
from tests.swarm.gateway.text_families import FAMILIES, TEMPLATES, TextFamily, lines

LINES = 60  # `make soak` reads 4,000
BATCH = 30
TALKS = [
    [ChatMessage("user", "Is 2 < 3?")],
    [ChatMessage("system", "Be brief.\n"), ChatMessage("user", " schöne Grüße 🙂 ")],
    [ChatMessage("user", "Hi"), ChatMessage("assistant", " Yes? "), ChatMessage("user", "你好 <b>{{ 7 * 7 }}")],
]


class InProcess(ModelText):
    """The tokenizer without a process of its own, which for each token would take most of the time."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    async def decode(self, *sequences: Sequence[int]) -> list[str]:
        return [self._tokenizer.decode(list(ids)) if ids else "" for ids in sequences]


@dataclass
class Streams:
    """Answers of one family, given out token by token."""

    family: TextFamily
    draw: random.Random = field(default_factory=lambda: random.Random(3))

    def __post_init__(self) -> None:
        tokenizer = read_tokenizer(self.family.content)
        assert isinstance(tokenizer, FileTokenizer)
        self.tokenizer = tokenizer

    def spelled(self, line: str) -> list[int]:
        """Return the line in odd pieces: most letters byte by byte, the others alone."""
        ids = list[int]()
        for letter in line:
            ids += self.family.spelled(letter) if self.draw.random() < 0.6 else self.tokenizer.encode(letter)
        return ids

    async def check(self, prompt: str, line: str) -> None:
        """Check an answer behind no prompt and behind one, in the tokenizer's own tokens and in odd ones."""
        before = self.tokenizer.encode(prompt, special=True)
        await self._check([], self.tokenizer.encode(line))
        await self._check(before, self.tokenizer.encode(line))
        await self._check(before, self.spelled(line))

    async def _check(self, before: list[int], answer: list[int]) -> None:
        start = len(self._text(before))
        whole = self._text(before + answer)[start:]
        stream = TextStream(InProcess(self.tokenizer), (), before)
        for token in answer:
            await stream.push(token)
            assert whole.startswith(stream.text), "half a letter was shown"
        await stream.finish()
        assert stream.text == whole

    def _text(self, ids: list[int]) -> str:
        text: str = self.family.tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
        return text


async def check_family(family: TextFamily, count: int) -> None:
    """Check so many lines: ids and texts of the process, and streams."""
    all_lines, library = list(lines(count, family.special)), family.tokenizer
    streams, before = Streams(family), ""
    async with open_model_text(family.content, library.get_vocab_size()) as text:
        for start in range(0, count, BATCH):
            batch = all_lines[start : start + BATCH]
            ids = [await text.encode(line, special=False) for line in batch]
            assert ids == [one.ids for one in library.encode_batch(batch, add_special_tokens=False)]
            begun = [await text.encode(line, special=True) for line in batch]
            assert begun == [one.ids for one in library.encode_batch(batch)] == [family.bos_ids + one for one in ids]
            texts = await text.decode(*begun)
            assert texts == [library.decode(one, skip_special_tokens=False) if one else "" for one in begun]
    for line in all_lines:
        await streams.check(before, line)
        before = line


@pytest.mark.process
@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
async def test_ids_and_texts_of_varied_lines_are_those_of_the_library(make: Any) -> None:
    await check_family(make(), LINES)


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
async def test_ids_and_texts_of_four_thousand_lines_are_those_of_the_library(make: Any) -> None:
    await check_family(make(), 4000)


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
async def test_answers_without_special_tokens_are_those_of_the_library(make: Any) -> None:
    family: TextFamily = make()
    streams = Streams(family)
    special = sorted(streams.tokenizer.special)
    assert {family.tokenizer.token_to_id(word) for word in family.special} <= set(special)
    for line in lines(30, ("and",)):
        before, answer = streams.tokenizer.encode("Once", special=True), streams.spelled(line)
        for token in special:
            answer.insert(streams.draw.randrange(len(answer) + 1), token)
        shown = [family.tokenizer.decode(ids, skip_special_tokens=True) for ids in (before, before + answer)]
        for stops in ((), ("no such text",)):
            stream = TextStream(InProcess(streams.tokenizer), stops, before, streams.tokenizer.special)
            for token in answer:
                await stream.push(token)
            await stream.finish()
            assert stream.text == shown[1][len(shown[0]) :]


@pytest.mark.process
@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
async def test_prompts_and_conversations_are_the_ids_of_transformers(make: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    family: TextFamily = make()
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=family.tokenizer, bos_token=family.bos or None, eos_token=family.eos
    )
    async with open_model_text(family.content, family.tokenizer.get_vocab_size()) as text:
        for line in ("", "the rain", " in Spain\n", f"{family.eos}你好 🙂"):
            assert await text.encode(line, special=True) == theirs(line)["input_ids"]
        for template in TEMPLATES[family.name]:
            rules = TextRules(chat_template=template, bos=family.bos, eos=family.eos)
            async with open_template(rules) as ours:
                for talk in TALKS:
                    told = [{"role": message.role, "content": message.content} for message in talk]
                    expected: Any = theirs.apply_chat_template(
                        told, chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=False
                    )
                    written = await ours.render(talk)
                    assert await text.encode(written, special=ours.is_plain) == expected
                    assert [token for token in expected if token in family.bos_ids] == family.bos_ids, "not twice"
                    assert expected[: len(family.bos_ids)] == family.bos_ids


async def test_a_long_row_of_letters_that_are_bytes_is_shown_letter_by_letter() -> None:
    family = FAMILIES[0]()
    streams = Streams(family)
    row = "漢字仮名交り文" * 8
    stream = TextStream(InProcess(streams.tokenizer), (), family.spelled(row))
    shown = [await stream.push(token) for token in family.spelled(row)]
    assert [piece for piece in shown if piece] == list(row)
    spoilt = TextStream(InProcess(streams.tokenizer), (), family.spelled("a"))
    tokens = [*family.spelled("字"), family.spelled("字")[0], *streams.tokenizer.encode("the")[-1:]]
    pieces = [await spoilt.push(token) for token in tokens]
    assert pieces[2] == "字" and pieces[-1].startswith("\ufffd") and "字" not in pieces[-1], "nothing is shown twice"
