"""Letters that the output's encoding lacks, and input that is no text."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.terminal.typed_lines import TypedLines, decoded, whole_input
from peer.errors import ConfigError
from swarm.gateway.chat_log import ChatLog
from swarm.gateway.template import ChatMessage
from tests.cli.support.lost_terminal import ROOT

SHOWS = """
from cli import main as program
from cli.terminal.lines import say
from cli.terminal.screen import screen
from cli.terminal.stream import write_text
from rich.table import Table

def show(**options):
    for err in (False, True):
        say("J\\u00fcrgen \\U0001f600", err=err)
        table = Table("\\U0001f600", title="J\\u00fcrgen")
        table.add_row("\\u65e5\\u672c")
        screen(err=err).print(table)
    write_text("\\U0001f600\\n")
    print("a library's \\U0001f600")

program.group.main = show
program.main()
"""


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252"])
def test_letters_that_an_encoding_lacks_are_escapes(encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run([sys.executable, "-c", SHOWS], env=environment, capture_output=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    for text in (shown.stdout.decode(encoding), shown.stderr.decode(encoding)):
        assert r"\U0001f600" in text and ("J\u00fcrgen" if encoding != "ascii" else r"J\xfcrgen") in text


@pytest.mark.parametrize(("encoding", "data"), [("utf-8", b"J\xfcrgen"), ("ascii", b"J\xfcrgen"), ("utf-8", b"\xff")])
def test_input_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch, encoding: str, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding=encoding))
    with pytest.raises(ConfigError, match=r"standard input is no text in UTF-8 \(byte [01]\): convert it"):
        whole_input()


def test_input_is_read_in_its_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"J\xfcrgen\r\n"), encoding="latin-1"))
    assert whole_input() == "J\u00fcrgen\n" and decoded(b"\xfc", "it") == "\u00fc"


async def test_a_line_that_is_no_text_or_too_long_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "typed").write_bytes(b"one\n\xff\n" + bytes((1 << 20) + 9) + b"\ntwo")
    with (tmp_path / "typed").open() as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        lines = TypedLines()
        assert await lines.next() == "one"
        with pytest.raises(ConfigError, match="the line is no text in UTF-8"):
            await lines.next()
        with pytest.raises(ConfigError, match="a line has more than 1 MiB: break it"):
            await lines.next()
        assert [await lines.next(), await lines.next()] == ["two", None]


def test_a_history_may_have_blank_lines_and_its_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "talk"
    path.write_text('{"role":"user","content":"a"}\n\n   \n{"role":"assistant","content":"b"}\r\n\n')
    assert ChatLog(path).messages() == [ChatMessage("user", "a"), ChatMessage("assistant", "b")]
    path.write_text('{"role":"user","content":"a"}\n\n{"role":7}\n')
    with pytest.raises(ConfigError, match=r"line 3 of .*talk is no message of a chat .*: correct or delete it"):
        ChatLog(path)
