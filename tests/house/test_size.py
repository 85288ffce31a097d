"""Files, folders and argument lists stay small."""

from __future__ import annotations

import ast
from collections import Counter

from tests.house.source import PACKAGES, ROOT, modules, parsed, tracked

LINES_MAX = 400
FILES_MAX = 20
ARGUMENTS_MAX = 7


def test_no_file_is_long() -> None:
    long = {
        str(path): lines
        for path in tracked()
        if path.suffix in (".py", ".md", ".toml", ".sh") and path.name != "RESULTS.md"
        if (lines := (ROOT / path).read_bytes().count(b"\n")) > LINES_MAX
    }
    assert not long


def test_no_folder_is_full() -> None:
    full = {str(folder): files for folder, files in Counter(path.parent for path in tracked()).items()}
    assert not {folder: files for folder, files in full.items() if files > FILES_MAX}


def test_argument_lists_are_short() -> None:
    """Click commands are excepted: their arguments are the options."""
    long = []
    for path in modules():
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_command(node):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len(arguments) - (bool(arguments) and arguments[0].arg in ("self", "cls"))
            if count > ARGUMENTS_MAX:
                long.append(f"{path}:{node.lineno} {node.name}: {count}")
    assert not long


def _is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("click.command" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_every_module_and_package_says_what_it_is_for() -> None:
    silent = [str(path) for path in modules() if not ast.get_docstring(parsed(path))]
    folders = {path.parent for path in modules()}
    silent += [f"{folder}/__init__.py" for folder in folders if not (ROOT / folder / "__init__.py").is_file()]
    assert not silent and {folder.parts[0] for folder in folders} == set(PACKAGES)
