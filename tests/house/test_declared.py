"""What we import is declared in pyproject.toml: what only comes along with something else may go with it."""

from __future__ import annotations

import ast
import re
import sys

import msgspec

from tests.house.source import PACKAGES, ROOT, parsed, tracked

COMES_WITH = {
    "cryptography": "libp2p", "google": "libp2p", "multiaddr": "libp2p", "noise": "libp2p", "trio_typing": "libp2p",
    "trio_websocket": "libp2p", "h11": "hypercorn", "h2": "hypercorn", "httpx2": "openai", "nacl": "pynacl",
}  # fmt: skip
"""What a declared package is made of: we meet it through that package's interface."""


IMPORT = re.compile(r"(?:^|[;:])[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([^#;\n]+))", re.MULTILINE)


def seem_imported(text: str) -> set[str]:
    """Return the packages that a source imports, and maybe words of its prose: it need not be parsed for most."""
    found = set()
    for origin, names in IMPORT.findall(text):
        found |= {origin} if origin else {name.split()[0].split(".")[0] for name in names.split(",") if name.split()}
    return found


def declared() -> set[str]:
    project = msgspec.toml.decode((ROOT / "pyproject.toml").read_bytes())["project"]
    listed = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        listed += extra
    return {re.split(r"[\[<>=!~; ]", line)[0].replace("-", "_").lower() for line in listed}


def imported(known: set[str], *folders: str) -> dict[str, str]:
    """Return the packages that are imported and not known, each with a file that does it."""
    found: dict[str, str] = {}
    for path in tracked(*folders):
        if path.suffix != ".py" or seem_imported((ROOT / path).read_text()) <= known:
            continue
        for node in ast.walk(parsed(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for name in names:
                found.setdefault(name.split(".")[0], str(path))
    return {name: path for name, path in found.items() if name not in known}


def test_what_is_imported_is_declared() -> None:
    ours = {*PACKAGES, "tests", "benchmarks", "tools", *sys.stdlib_module_names}
    known = declared() | ours
    missing = {name: path for name, path in imported(known).items() if COMES_WITH.get(name, name).lower() not in known}
    assert not missing, missing


def test_what_is_imported_is_seen() -> None:
    """All of it, also in a function, and several names in one line."""
    text = "import torch\n    from libp2p.peer import id\nx = 1; import trio, msgspec\nimport a.b as c\n"
    assert seem_imported(text) == {"torch", "libp2p", "trio", "msgspec", "a"}
    found = imported(set(), "dht")
    assert {"trio", "msgspec"} <= set(found) and imported(set(found), "dht") == {}
