"""Errors for people read `what happened, with the value: what to do`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.source import modules, parsed

PROPER = ("H ", "Python", "I/O", "TLS", "NAT", "PowerSGD", "AdamW", "LAMB", "Muon", "Hugging Face")


def error_classes() -> set[str]:
    """Return the names of BarnraiseError and its subclasses in the five packages."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    }
    found = {"BarnraiseError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def messages() -> Iterator[tuple[str, list[str]]]:
    """Yield each raise of such an error: its place, and the message's pieces; "{}" stands for a value."""
    errors = error_classes()
    for path in modules():
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
                continue
            if ast.unparse(node.exc.func).rpartition(".")[2] not in errors:
                continue
            place = 1 if ast.unparse(node.exc.func).endswith("RemoteError") and len(node.exc.args) > 1 else 0
            if pieces := _pieces(node.exc.args[place]):
                yield f"{path}:{node.lineno}", pieces


def _is_name(text: str) -> bool:
    """Whether a message begins with a name: of a product, or like `RUN.toml` or `WorkerConfig.stage`."""
    return text.startswith(PROPER) or bool(re.match(r"[A-Z]\w*\.\w", text))


def _pieces(message: ast.expr) -> list[str]:
    if isinstance(message, ast.Constant) and isinstance(message.value, str):
        return [message.value]
    if isinstance(message, ast.JoinedStr):
        return [part.value if isinstance(part, ast.Constant) else "{}" for part in message.values]  # type: ignore[misc]
    return []


@pytest.fixture(scope="module")
def told() -> list[tuple[str, str]]:
    return [(place, "".join(pieces)) for place, pieces in messages()]


def test_errors_end_without_a_full_stop(told: list[tuple[str, str]]) -> None:
    assert not [(place, text) for place, text in told if text.endswith(".")]


def test_errors_ask_no_questions_and_mark_no_remedies(told: list[tuple[str, str]]) -> None:
    assert not [(place, text) for place, text in told if "?" in text or "Remedy:" in text]


def test_errors_begin_in_lower_case(told: list[tuple[str, str]]) -> None:
    assert not [
        (place, text) for place, text in told if re.match("[A-Z]", text) and not _is_name(text)
    ]  # fmt: skip


def test_there_are_errors_to_look_at(told: list[tuple[str, str]]) -> None:
    assert len(told) > 150
