"""The "text" program: strangers' tokenizers in a process of their own, whatever that process comes to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import pytest

from peer.errors import ConfigError, WorkerError
from peer.ipc.text_messages import TEXT_CHARS_MAX
from peer.worker import text_client
from peer.worker.text_client import TextRefused, open_model_text
from tests.support.forking.forked import children
from tests.swarm.gateway.served_model import tokenizer

pytestmark = pytest.mark.process
CONTENT = tokenizer().to_str().encode()
PANIC = """
import runpy
from peer.data import tokenizer

class PanicException(BaseException):
    pass

PanicException.__module__ = "pyo3_runtime"

class Panicking:
    def __init__(self, own):
        self._own = own

    def __getattr__(self, name):
        return getattr(self._own, name)

    def encode(self, text, **options):
        if text == "panic":
            raise PanicException("index out of range")
        return self._own.encode(text, **options)

load = tokenizer.FileTokenizer.__init__
tokenizer.FileTokenizer.__init__ = lambda self, own: load(self, Panicking(own))
runpy.run_module("peer.worker.main", run_name="__main__")
"""


async def test_ids_and_texts_are_those_of_the_library() -> None:
    async with open_model_text(CONTENT, 263) as text:
        ids = await text.encode("the rain\u20ac <|im_end|>", special=True)
        assert ids == tokenizer().encode("the rain\u20ac <|im_end|>").ids
        assert await text.decode(ids, [], ids[:2]) == ["the rain\u20ac <|im_end|>", "", "the "]
        assert text.special == {261, 262}
        assert await text.words([256, 257, 256]) == {256: ("th", b"th"), 257: ("the", b"the")}
        part = {226: ("\ufffd", b"\xe2"), 32: (" ", b" "), 261: ("<|im_start|>", b"<|im_start|>")}
        assert await text.words(part) == part, "of a letter's first byte the text is no letter"
        assert await text.encode("\udce9", special=False) == [ord("?")], "of a command line that is not UTF-8"
    assert not children()


async def test_a_hostile_tokenizer_is_one_sentence() -> None:
    evil = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    with pytest.raises(ConfigError, match="unknown regular expression"):
        async with open_model_text(json.dumps({**json.loads(CONTENT), "pre_tokenizer": evil}).encode(), 263):
            pass
    with pytest.raises(ConfigError, match="the tokenizer has 263 ids and the model only 262"):
        async with open_model_text(CONTENT, 262):
            pass
    assert not children()


async def test_a_tokenizer_that_panics_is_one_sentence_and_the_next_text_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spawn: Any = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda line, **rest: spawn([line[0], "-c", PANIC, *line[3:]], **rest))
    async with open_model_text(CONTENT, 263) as text:
        with pytest.raises(TextRefused, match="makes its library panic"):
            await text.encode("panic", special=False)
        assert await text.encode("the", special=False) == [257]


@pytest.mark.parametrize(("blow", "words"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "takes longer than")])
async def test_a_process_that_dies_or_hangs_is_one_sentence_and_the_next_one_answers(
    monkeypatch: pytest.MonkeyPatch, blow: signal.Signals, words: str
) -> None:
    async with open_model_text(CONTENT, 263) as text:
        assert text.pid is not None
        os.kill(text.pid, blow)
        with monkeypatch.context() as patched, pytest.raises(WorkerError, match=words):
            patched.setattr(text_client, "_TOKENIZE_S", 0.5)
            await text.encode("the", special=False)
        assert await text.encode("the", special=False) == [257]


async def test_a_text_without_bounds_is_refused_here() -> None:
    async with open_model_text(CONTENT, 263) as text:
        with pytest.raises(TextRefused, match="send less"):
            await text.encode("x" * (TEXT_CHARS_MAX + 1), special=False)


async def test_bytes_need_no_process() -> None:
    async with open_model_text(b"", 256) as text:
        assert text.is_bytes and await text.decode(await text.encode("€", special=True)) == ["€"]
        assert await text.words([65, 226, 300]) == {65: ("A", b"A"), 226: ("\ufffd", b"\xe2"), 300: ("\ufffd", None)}
    assert not children()
