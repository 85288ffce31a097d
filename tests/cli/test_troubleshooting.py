"""The page on troubleshooting is found by what the program prints: its messages are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.source import modules, parsed

PAGE = Path(__file__).parents[2] / "docs" / "use" / "troubleshooting.md"
VARIES = "\0"
LIKELY = (
    "the invite is damaged (its checksum does not match)",
    "this run trains on text of your own",
    "holds too little text",
    "is in use",
    "another peer is running from",
    "no bootstrap peer answered",
    "nothing listens there, or it hangs up",
    "no answer in time",
    "another peer answers there",
    "this run is by invitation and the invite carries no key",
    "the invite has been withdrawn",
    "is banned from this run",
    "the run speaks protocol version",
    "GB of memory are free",
    "GB are free on the disk of",
    "the compute worker failed to start",
    "training has diverged",
    "is no peer's home",
    "has no intact checkpoint yet",
    "is the coordinator's home, and holds no trained weights",
    "passes over the damaged checkpoint",
    "cannot go on from round",
    "waiting for peers",
)
"""What a person is likeliest to meet in the first hours."""


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the texts that a module composes, with `VARIES` for what is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VARIES for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def printed() -> str:
    return "\n".join(text for path in modules() for text in texts(parsed(path)))


def documented() -> list[str]:
    """The first column of each table of messages."""
    tables = re.findall(r"^## Exit code.*?\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    cells = [line.split(" | ")[0].removeprefix("| ") for table in tables for line in table.splitlines() if "|" in line]
    return [cell.replace("`", "") for cell in cells if cell != "message" and not cell.startswith("|---")]


@pytest.mark.parametrize("message", documented())
def test_a_documented_message_is_one_of_the_code(message: str) -> None:
    pieces = [piece.strip() for part in message.split("; ") for piece in part.split("...")]
    assert [piece for piece in pieces if piece and piece not in printed()] == []


def symptoms() -> list[str]:
    """What is quoted in the table of symptoms, where it is a phrase and no name."""
    _, _, table = PAGE.read_text().partition("## It runs, but")
    quoted = [re.findall("`([^`]+)`", line.split(" | ")[0]) for line in table.splitlines() if line.startswith("| ")]
    return [phrase for line in quoted for phrase in line if phrase.count(" ") >= 2 and not phrase.startswith("peer ")]


@pytest.mark.parametrize("phrase", symptoms())
def test_a_documented_symptom_is_what_the_program_prints(phrase: str) -> None:
    assert [piece for piece in phrase.split("...") if piece.strip() and piece.strip() not in printed()] == []


@pytest.mark.parametrize("message", LIKELY)
def test_a_likely_message_is_documented(message: str) -> None:
    assert message in printed()
    assert message in PAGE.read_text()
