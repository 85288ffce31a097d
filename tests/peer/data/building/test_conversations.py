"""Conversations: what of a template's text counts, against transformers, and data sets made of them."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as HubTokenizer

from peer.data.building.marking import marked_text
from peer.data.chat_template import ChatTemplateCode
from peer.data.conversations import MarkedText
from peer.data.pages.corpus import PagedCorpus
from peer.data.pages.folder import BuiltPages
from peer.data.tokenizer import load_tokenizer
from peer.errors import ConfigError
from tests.peer.data.building.builds import built, gathered, plan_of, small_tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # earlier answers are cut short, as templates of models that think do
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last or m.role == 'user' else '...' }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the old barn? 日本"},
    {"role": "assistant", "content": "the new barn 🌾"},
    {"role": "user", "content": "and the town"},
    {"role": "assistant", "content": "is raised"},
]


def code(template: str) -> ChatTemplateCode:
    return ChatTemplateCode(template, "", "")


def counted(text: MarkedText) -> list[str]:
    return [text.text[first:end] for first, end in text.spans]


def test_what_the_tags_hold_counts() -> None:
    text = marked_text(code(TAGGED), TALK)
    assert text.how == "tags" and counted(text) == ["the new barn 🌾<|im_end|>", "is raised<|im_end|>"]
    assert text.text == marked_text(code(CHATML), TALK).text, "the tags leave no trace"
    assert code(TAGGED).render(TALK).endswith("<|im_start|>assistant\n")


def test_without_tags_the_texts_with_and_without_each_answer_are_compared() -> None:
    text = marked_text(code(CHATML), TALK)
    assert text.how == "compared" and counted(text) == ["the new barn 🌾<|im_end|>\n", "is raised<|im_end|>\n"]
    unfinished = marked_text(code(CHATML), [*TALK, {"role": "user", "content": "thanks"}])
    assert counted(unfinished) == counted(text)


def test_where_a_template_changes_what_is_before_the_last_answer_alone_counts() -> None:
    text = marked_text(code(FORGETFUL), TALK)
    assert text.how == "last answer" and counted(text) == ["is raised<|im_end|>\n"]
    with pytest.raises(ValueError, match="does not show where an answer is"):
        marked_text(code(FORGETFUL), [*TALK, {"role": "user", "content": "thanks"}])


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (CHATML, TALK[:2], "without a message of the role assistant"),
        ("{{ raise_exception('no system here') }}", TALK, "no system here"),
        ("always the same", TALK, "does not show"),
        ("{% for m in messages %}{{ m.nothing.at.all }}{% endfor %}", TALK, "has no attribute 'nothing'"),
    ],
)
def test_a_conversation_that_cannot_be_trained_on_says_why(
    template: str, messages: list[dict[str, str]], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        marked_text(code(template), messages)


def test_ids_and_marks_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import BatchEncoding, PreTrainedTokenizerFast  # here: a second for each worker of pytest

    path = small_tokenizer(tmp_path, SPECIAL)
    theirs = PreTrainedTokenizerFast(tokenizer_object=HubTokenizer.from_file(str(path)), chat_template=TAGGED)
    talks = [TALK, TALK[1:3], [*TALK, *TALK[1:]]]
    mine = load_tokenizer(str(path)).encode_marked(marked_text(code(TAGGED), talk) for talk in talks)
    for talk, (ids, marks) in zip(talks, mine, strict=True):
        found = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        assert isinstance(found, BatchEncoding)
        assert ids.tolist() == found["input_ids"]
        assert marks.astype(int).tolist() == found["assistant_masks"]


def test_a_template_that_asks_for_the_date_makes_the_same_text_on_every_day() -> None:
    text = marked_text(code("{{ strftime_now('%d %b %Y') }} " + CHATML), TALK)
    assert text.text.startswith("26 Jul 2024 <|im_start|>") and text.how == "compared"


def talks(count: int) -> list[list[dict[str, str]]]:
    rng = np.random.default_rng(4)
    words = ["barn", "town", "the", "raised", "é", "🌾", "\n"]

    def said() -> str:
        return " ".join(rng.choice(words, rng.integers(1, 30)))

    return [
        [
            message
            for at in range(rng.integers(1, 4))
            for message in (
                {"role": "user", "content": f"{number} {at} {said()}"},
                {"role": "assistant", "content": said()},
            )
        ]
        for number in range(count)
    ]


def test_a_data_set_of_conversations_holds_their_ids_and_marks(tmp_path: Path) -> None:
    made, path = talks(120), small_tokenizer(tmp_path, SPECIAL)
    (tmp_path / "json").mkdir()
    (tmp_path / "table").mkdir()
    lines = [json.dumps({"messages": talk, "id": number}) for number, talk in enumerate(made)]
    lines += [json.dumps({"messages": talk}) for talk in (made[0][:1], [], [{"role": "user"}])]
    (tmp_path / "json" / "a.jsonl").write_text("\n".join(lines))
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    parquet.write_table(arrow.table({"messages": made[::-1]}), tmp_path / "table" / "b.parquet")
    options = {"chat_template": TAGGED, "seq_len": 31}
    index = built([tmp_path / "json"], tmp_path / "one", str(path), **options)
    assert index == built([tmp_path / "table"], tmp_path / "two", str(path), **options, buckets=1)
    assert index.masked and index.train.documents + index.held_out.documents == len(made)

    tokenizer = load_tokenizer(str(path))
    found = [*tokenizer.encode_marked(marked_text(code(TAGGED), talk) for talk in made)]
    wanted = Counter((id, bool(mark)) for ids, marks in found for id, mark in zip(ids.tolist(), marks, strict=True))
    pages = BuiltPages.open(tmp_path / "one" / "out")
    corpus = PagedCorpus(pages.index, pages.index.config.root, [pages])
    assert corpus.has_marks
    tokens = corpus.batch([*range(corpus.windows)], 0).flatten().tolist()
    held_out = [row for batch in corpus.held_out_batches(4, 1000) for row in batch.flatten().tolist()]
    have = Counter((-1 - token, False) if token < 0 else (token, True) for token in [*tokens, *held_out])
    ends = tokenizer.encode("\n\n")
    lost = wanted + Counter({(id, False): len(made) * ends.count(id) for id in ends}) - have
    assert lost.total() < 2 * 32, "but for the rest of each part, shorter than a window"
    assert not have - (wanted + Counter({(id, False): len(made) * ends.count(id) for id in ends}))

    note = gathered(plan_of([tmp_path / "json"], str(path), **options), tmp_path / "three", str(path))
    assert note.marked == {"tags": len(made)}
    assert note.counted == sum(int(marks.sum()) for _, marks in found)
    assert note.skipped["conversations without a message of the role assistant"] == 1
    assert note.skipped["lines of .jsonl with an empty text"] == 1
    assert note.skipped["lines of .jsonl without a text"] == 1


def test_fewer_tokens_than_a_window_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    path = small_tokenizer(tmp_path, SPECIAL)
    with pytest.raises(ConfigError, match="there are 0 tokens to train on"):
        built([tmp_path / "a.jsonl"], tmp_path / "one", str(path), chat_template=TAGGED, seq_len=2047)


def test_conversations_in_the_form_of_sharegpt_make_the_same_data_set(tmp_path: Path) -> None:
    made, path = talks(60), small_tokenizer(tmp_path, SPECIAL)
    names = {"user": "human", "assistant": "gpt"}
    shared = [[{"from": names[each["role"]], "value": each["content"]} for each in talk] for talk in made]
    for folder in ("plain", "lines", "mixed", "table"):
        (tmp_path / folder).mkdir()
    plain = [json.dumps({"messages": talk}) for talk in made]
    lines = [json.dumps({"id": str(number), "conversations": talk}) for number, talk in enumerate(shared)]
    (tmp_path / "plain" / "a.jsonl").write_text("\n".join(plain))
    (tmp_path / "lines" / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "mixed" / "a.json").write_text(json.dumps([{"messages": talk} for talk in shared[30:]]))
    (tmp_path / "mixed" / "b.jsonl").write_text(
        "\n".join([*lines[:20], *plain[20:30], '{"conversations": [{"from": 1}]}'])
    )
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    parquet.write_table(arrow.table({"conversations": shared}), tmp_path / "table" / "b.parquet")
    options = {"chat_template": TAGGED, "seq_len": 31}
    index = built([tmp_path / "plain"], tmp_path / "one", str(path), **options)
    assert index.train.documents + index.held_out.documents == len(made)
    for folder in ("lines", "mixed", "table"):
        assert built([tmp_path / folder], tmp_path / f"of-{folder}", str(path), **options) == index
