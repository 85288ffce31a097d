"""Text that attacks a terminal, and commands that are shown it in a real one."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

from tests.support.newer_trio import run_abandonable

SCRIPT = Path(__file__).with_name("shown.py")
ROOT = Path(__file__).parents[3]

MARK = "hostile"
"""Where this word is shown, the text has arrived."""
EVIL = (
    f"{MARK}\x1b]0;title\x07\x1b]52;c;Y3VybCBldmlsfHNo\x07\x1b[2J\x1b[8m\x1bc\x9b2J\x9d0;x\x9c\x08\x7f\x00\r"
    "\u202egnp.exe\u2066\u2069\u200f\u200b\ufeff\U000e0041\ud800\u2028\u2029\x85\n"
    "peer: FORGED\n[red]:skull:[/red]a" + "\u0301" * 100
)
SENT = EVIL.replace("\ud800", "")
"""The same without the surrogate, which no message can carry."""
OURS = re.compile(r"\x1b\[(?:(?:[0-35-7]|3[0-7])(?:;(?:[0-35-7]|3[0-7]))*m|[0-9]*[A-GK]|2K|\?25[lh])")
"""What rich writes for colours and to redraw: neither hidden text nor a cleared screen."""
MESSAGE_BYTES_MAX = 4096


def harmless(shown: bytes, wraps: bool = False) -> str:
    """Return what is left of a terminal's input after our own colours and cursor movements; all of it is plain text.

    Where a table `wraps` text, a line may begin in the middle of it.
    """
    text = OURS.sub("", shown.decode())
    obeyed = sorted({letter for letter in text if not letter.isprintable() and letter not in "\n\r\t"})
    assert not obeyed, obeyed
    assert not re.search("[\u0300-\u036f]{4}", text), "a flood of combining marks"
    assert wraps or not re.search(r"^(?:peer: )?FORGED", text, re.MULTILINE), "a line that the sender has begun"
    return text


async def shown_by(actions: Sequence[dict[str, Any]], on: Literal["terminal", "pipe"]) -> list[bytes]:
    """Run the actions of `shown.py` in one process, on a pseudo-terminal or a pipe, and return what each wrote."""
    ours, theirs = pty.openpty() if on == "terminal" else os.pipe()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "50", "PYTHONWARNINGS": "ignore"}
    environment.pop("NO_COLOR", None)
    with TemporaryFile() as told:
        told.write(json.dumps(actions).encode())
        told.seek(0)
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=told, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT
        )
    os.close(theirs)
    try:
        return (await run_abandonable(_read, ours)).split(b"<next>")[: len(actions)]
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _read(fd: int) -> bytes:
    pieces = []
    try:
        while piece := os.read(fd, 1 << 16):
            pieces.append(piece)
    except OSError:
        pass  # how a pseudo-terminal ends
    return b"".join(pieces)
