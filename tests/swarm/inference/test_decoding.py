"""Text that comes piece by piece: whole letters, and nothing of a stop string."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from peer.ipc.block_messages import PAGE_TOKENS
from peer.worker.text_client import ModelText
from swarm.inference.decoding import TextStream
from swarm.inference.page_names import page_names

BYTES = ModelText()


async def stream_of(text: str, stops: tuple[str, ...]) -> tuple[list[str], TextStream]:
    stream = TextStream(BYTES, stops)
    given = [await stream.push(token) for token in text.encode()]
    return [*given, await stream.finish()], stream


def pieces(text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    return trio.run(stream_of, text, stops)


@given(st.text(max_size=60))
def test_all_pieces_together_are_the_text(text: str) -> None:
    given, stream = pieces(text)
    assert "".join(given) == text == stream.text
    assert not any("\ufffd" in piece for piece in given if "\ufffd" not in text)


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_an_answer_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    given, stream = pieces(text, tuple(stops))
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    whole = text if not ends else text[: min(at for end, at in ends if end == min(ends)[0])]
    assert "".join(given) == whole
    assert stream.stopped == bool(ends)


async def test_letters_come_when_they_are_whole() -> None:
    stream = TextStream(BYTES)
    assert [await stream.push(token) for token in "aß€".encode()] == ["a", "", "ß", "", "", "€"]
    half = TextStream(BYTES)
    assert await half.push("€".encode()[0]) == "" and await half.finish() == "\ufffd"


@pytest.mark.parametrize(
    ("stops", "shown"),
    [
        ((), "OK.user: Hi"),
        (("<user",), "OK."),
        (("<",), "OK."),
        (("<user:",), "OK.user: Hi"),
        ((".<user",), "OK"),
        (("user",), "OK."),
        (("K.<",), "O"),
    ],
)
async def test_hidden_tokens_are_not_shown_and_stops_may_name_them(stops: tuple[str, ...], shown: str) -> None:
    stream = TextStream(BYTES, stops, (), b"<|")
    for token in b"OK.<user|: Hi|":
        await stream.push(token)
    await stream.finish()
    assert stream.text == shown and stream.stopped == (shown != "OK.user: Hi")


def test_pages_are_named_after_all_that_stands_before() -> None:
    one, other = list(range(100)), [*range(40), 99, *range(41, 100)]
    names = page_names(one)
    assert len(names) == (len(one) - 1) // PAGE_TOKENS
    assert [a == b for a, b in zip(names, page_names(other), strict=True)] == [True, True, False, False, False, False]
    assert not set(names) & set(page_names(one, "int8")), "hidden states were rounded on the way"
    assert len(page_names(one[: PAGE_TOKENS + 1])) == 1 and not page_names(one[:PAGE_TOKENS])
