"""A finding has one sentence, in one place: what a rule of the status or a check of `peer doctor` says is nowhere else
in the program. The documentation may quote it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from tests.house.source import modules, parsed

RULES = ("swarm/status/verdict.py", "swarm/status/alerts.py", "swarm/status/model_state.py", "cli/commands/doctor.py")
WORDS_MIN = 6
"""Fewer are no sentence: words such as those of a remedy's command may return."""


@lru_cache
def texts(path: Path) -> tuple[str, ...]:
    """Return the strings of a module, of formatted ones each constant part, without docstrings."""
    tree = parsed(path)
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in notes)
    return tuple(node.value for node in strings if isinstance(node.value, str))


def sentences() -> Iterator[str]:
    """Yield what findings say, cut where a remedy or a reason follows."""
    for path in modules():
        if str(path) in RULES or path.parts[:2] == ("cli", "checks"):
            for text in texts(path):
                yield from (part.strip() for part in re.split("[;:]", text) if len(part.split()) >= WORDS_MIN)


def test_what_a_finding_says_is_written_once() -> None:
    found = list(sentences())
    assert len(found) > 100, "the rules and checks are elsewhere"
    program = "\n".join(text for path in modules() for text in texts(path))
    assert [sentence for sentence in found if program.count(sentence) != 1] == []
