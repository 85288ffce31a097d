"""The commands of `peer`: one file each, or a folder for one with commands of its own.

The first line of a file reads "`peer NAME`: SUMMARY". The summary is the command's line in `peer --help`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

FIRST: Final = (
    *("quickstart", "coordinate", "join", "serve", "generate", "chat", "api"),
    *(
        "ls",
        "pause",
        "resume",
        "invite",
        "regroup",
        "status",
        "monitor",
        "top",
        "export",
        "plan",
        "doctor",
        "data",
        "relay",
    ),
)
"""In the order in which a user meets them. Other commands follow by name."""


def command_summaries() -> dict[str, str]:
    """Return the commands in the order of `peer --help`, each with its line there. Imports none of them."""
    here = Path(__file__).parent
    files = {path.stem: path for path in here.glob("*.py") if path.stem != "__init__"}
    files |= {path.parent.name: path for path in here.glob("*/__init__.py")}
    names = [*(name for name in FIRST if name in files), *sorted(files.keys() - set(FIRST))]
    return {name: _summary(files[name]) for name in names}


def _summary(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        text = file.readline().partition("`: ")[2].strip().removesuffix('"""')
    return text[:1].upper() + text[1:]
