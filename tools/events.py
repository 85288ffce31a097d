"""Prints the table of the events in the catalogue (`peer.catalogue`).

`python tools/events.py --write` updates the table in docs/run/operations.md between its markers.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

from peer.catalogue.happening import Happening
from peer.catalogue.reading import CATALOGUE

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "run" / "operations.md"
MARKED: Final = re.compile(r"(<!-- events -->\n)(.*?)(<!-- /events -->)", re.DOTALL)


def meaning(kind: type[Happening]) -> str:
    """Return the first paragraph of its docstring, else the sentence that a user sees."""
    doc = kind.__dict__.get("__doc__") or ""
    text = " ".join(doc.split("\n\n")[0].split()) if doc else kind.said
    text = text.removeprefix("{teller}").strip().replace("{of}", "").replace("{why}", ": {reason}")
    return re.sub(r"\{(\w+)(?:!p|:[^}]*)?\}", r"*\1*", text).replace("|", "\\|").lstrip(": ")


def table() -> str:
    """Return one line an event: name, fields, those that other peers are told in bold, and what it says."""
    lines = ["| event | fields | what it says |", "|---|---|---|"]
    for name, kind in sorted(CATALOGUE.items()):
        told = kind.told or ()
        fields = [f"**{field}**" if field in told else field for field in kind.__struct_fields__]
        lines.append(f"| `{name}` | {', '.join(fields)} | {meaning(kind)} |")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """Return the page with a true table."""
    text = table()
    return MARKED.sub(lambda found: found[1] + text + found[3], page)


def main() -> None:
    """Print the table, or write it to the page."""
    if "--write" in sys.argv[1:]:
        PAGE.write_text(updated(PAGE.read_text()))
    else:
        sys.stdout.write(table())


if __name__ == "__main__":
    main()
