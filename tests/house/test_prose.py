"""`tools/prose.py` finds the turns of phrase that it names, and counts the sentences that have one."""

from __future__ import annotations

import pytest

from tools import prose

PAGE = """# A heading

The peer tells the other what it has received. The leader reports it to all members.

| what | who tells of it and goes on for ever |
- One more sentence without any fault.
```
A peer that tells nothing at all here.
```
"""


def test_a_sentence_counts_once_and_code_does_not() -> None:
    found = list(prose.of_page("docs/page.md", PAGE))
    assert [words.split()[:2] for _, _, words in found] == [
        ["The", "peer"],
        ["The", "leader"],
        ["|", "what"],
        ["One", "more"],
    ]
    lines, share = prose.report(found, "tell")
    assert share == 50 and lines[-1] == "page: 2 of 4 sentences (50.0 %)"
    assert [line for line in lines if line.startswith("    docs/page.md | The peer tells")]


def test_of_a_module_docstrings_and_long_strings_count() -> None:
    source = '"""Say it. Then go on."""\nWORDS = "tell the peer to go on"\nNAME = "tell"\n'
    assert list(prose.of_module("peer/x.py", source)) == [
        ("doc", "peer/x.py", "Say it."),
        ("doc", "peer/x.py", "Then go on."),
        ("text", "peer/x.py", "tell the peer to go on"),
    ]


def test_more_hits_than_allowed_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prose, "sentences", lambda: list(prose.of_page("docs/page.md", PAGE)))
    for most, code in (("50", 0), ("49", 1)):
        monkeypatch.setattr("sys.argv", ["prose.py", "--most", most])
        assert prose.main() == code
    assert "go on, for continue: {'page': 1}" in capsys.readouterr().out
