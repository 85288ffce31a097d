"""Only `cli/terminal` writes to a terminal, so that no command can show what others wrote in another way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import ROOT, modules, parsed

SINKS = {Path("cli/terminal"), Path("peer/worker/main.py")}
"""A worker's standard error is its log."""
MODULES = {"click", "rich", "sys", "os", "traceback", "logging", "warnings"}
ATTRIBUTES = {
    "echo", "secho", "echo_via_pager", "prompt", "confirm", "progressbar", "style", "show",
    "stdout", "stderr", "__stdout__", "__stderr__", "print_exc", "print_exception", "print_stack", "print_tb",
    "basicConfig", "StreamHandler", "showwarning",
}  # fmt: skip
RICH = {"rich.console": {"Console", "get_console"}, "rich": {"print", "get_console"}, "rich.live": {"Live"}}


WORDS = re.compile(rf"\b(?:{'|'.join({'print', 'input', 'Console', 'get_console', 'Live'} | ATTRIBUTES)})\b")
"""A source without any of them need not be parsed."""


def writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the places that write to a terminal, or get hold of a thing that does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"print", "input"}:
            yield node.lineno, node.func.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES:
            if node.attr in ATTRIBUTES or (node.value.id == "rich" and node.attr == "print"):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Attribute) and node.attr in {"Console", "Live", "show"}:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            wrong = RICH.get(node.module or "", ATTRIBUTES if node.module in MODULES else set())
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names if name.name in wrong)


def test_only_one_folder_writes_to_the_terminal() -> None:
    others = [path for path in modules() if not SINKS & {path, *path.parents}]
    found = [
        f"{path}:{line}: {what}"
        for path in others
        if WORDS.search((ROOT / path).read_text())
        for line, what in writes(parsed(path))
    ]
    assert not found, "say it by cli.terminal"


@pytest.mark.parametrize(
    "line",
    [
        "print('x')",
        "click.echo(x)",
        "click.secho(x)",
        "error.show()",
        "sys.stdout.write(x)",
        "file = sys.stderr",
        "from sys import stdout",
        "from click import echo",
        "from rich.console import Console",
        "rich.console.Console()",
        "from rich import print",
        "rich.print(x)",
        "from rich.live import Live",
        "traceback.print_exc()",
        "logging.basicConfig()",
    ],
)
def test_each_way_around_it_is_seen(line: str) -> None:
    assert WORDS.search(line) and list(writes(ast.parse(line)))


def test_the_sinks_themselves_write() -> None:
    for sink in SINKS:
        assert any(list(writes(parsed(path))) for path in modules() if sink in (path, *path.parents)), sink
