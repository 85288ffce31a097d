"""The words are the field's; the old private ones do not come back."""

from __future__ import annotations

import re

import pytest

from tests.house.source import PACKAGES, ROOT, tracked

ABOUT_WORDS = {"tests/house/test_words.py"}
EVERYWHERE = (*PACKAGES, "docs", "tests", "benchmarks", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")

OLD = {
    "abreast": "fast-forward",
    "archives?": "backup",
    "attendance": "lifecycle",
    "boasts?": "claim",
    "charters?": "run files",
    "corner": "context",
    "deput(?:y|ies)": "other replica",
    "errands?": "task",
    "gangs?": "worker group",
    "grudges?": "scores",
    "hand(?:s|ed)? in|hand_in": "submit",
    "harvest": "collector",
    "hurried": "cut short",
    "keepers?": "backup holder",
    "knock(?:s|ed|ing|ers?)?": "join request",
    "lanes?": "bulk transport",
    "lends?|lent|lending|loans?": "upload, serve",
    "offen[cs]es?": "violation",
    "overseers?": "batch tracker",
    "premises": "peer context",
    "quarrels?": "accusation",
    "recipes?": "strategy",
    "roll call": "probe",
    "seats?|seated": "replica",
    "shel(?:f|ves)": "snapshot store",
    "sleepers?": "frozen peer",
    "stints?": "compute phase",
    "desks?": "handlers",
    "ears": "dial-back",
    "founding": "create a run",
    "issuers?|reissue[ds]?": "source, dispatch again",
    "outbox": "send queue",
    "parting|see off": "completion",
    "patience": "timeout",
    "sightings?|standings?|viewpoints?": "head candidate, head report",
    "stations?": "stage server",
    "tempo": "timeouts",
    "trainees?": "trainer",
    "whom[ _]to[ _]blame|take[ _]back|give[ _]back": "choose excluded, restore residual",
    "wirings?": "router",
    "visitors?": "client",
    "wrap(?:s|ped|ping)? up|wrap_up": "finish early",
}

VAGUE = {
    "anew": "again",
    "anybody|somebody|whoever": "a peer, a member, a process",
    "nobody": "no peer, no member",
}


def uses(words: dict[str, str], folders: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the places of each word, as parts of identifiers, too."""
    patterns = {word: re.compile(rf"(?<![a-zA-Z])(?:{word})(?![a-zA-Z])", re.IGNORECASE) for word in words}
    found: dict[str, list[str]] = {}
    for path in tracked(*folders):
        if path.suffix not in (".py", ".md", ".toml") or str(path) in ABOUT_WORDS:
            continue
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            for word, pattern in patterns.items():
                if pattern.search(line):
                    found.setdefault(f"{word} -> {words[word]}", []).append(f"{path}:{number}")
    return found


def test_old_words_do_not_come_back() -> None:
    found = uses(OLD, EVERYWHERE)
    if found:
        pytest.fail("\n".join(f"{word}: {', '.join(places)}" for word, places in sorted(found.items())))


def test_subjects_have_names() -> None:
    found = uses(VAGUE, (*PACKAGES, "docs", "README.md"))
    if found:
        pytest.fail("\n".join(f"{word}: {', '.join(places)}" for word, places in sorted(found.items())))
