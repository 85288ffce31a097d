"""The words are the field's; the old private ones do not come back, and each has a word in its place."""

from __future__ import annotations

import re

import pytest

from tests.house.source import PACKAGES, ROOT, modules, tracked

ABOUT_WORDS = {"tests/house/test_words.py"}
EVERYWHERE = (*PACKAGES, "docs", "tests", "benchmarks", "changes", "README.md", "CHANGELOG.md", "CONTRIBUTING.md")

OLD = {  # and what to say instead
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
    "lends?|lent|lending|loans?": "upload, or serve",
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
    "issuers?": "source",
    "reissue[ds]?": "dispatch again",
    "outbox": "send queue",
    "parting|see off": "completion",
    "sightings?|standings?|viewpoints?": "head candidate, or head report",
    "stations?": "stage server",
    "tempo": "timeouts",
    "trainees?": "trainer",
    "whom[ _]to[ _]blame": "choose excluded",
    "take[ _]back|give[ _]back": "restore residual",
    "wirings?": "router",
    "visitors?": "client",
    "wrap(?:s|ped|ping)? up|wrap_up": "finish early",
    "mode[_-][ab]": "witness, or required",
    "holes? \\d+": "the fault itself",
}

AGREEMENT = {  # in the agreement, what carries it out and what describes it
    "(?:has_)?runs?[_ ]dry": "exhausted",
    "heights?": "open round",
    "lacking": "missing",
    "letters?": "message batch",
    "persons?": "operator",
    "strikes?|struck": "penalty",
}
OF_THE_AGREEMENT = (
    *("swarm/protocol", "swarm/rounds", "swarm/coordinator"),
    *("docs/internals/agreement.md", "docs/internals/agreement_mutations.md"),
)

CLASSES = {  # names that say nothing to who knows the field
    "Asked": "RegroupRequested",
    "Height": "OpenRound",
    "Idle": "HeadGossip",
    "Lacking": "Missing",
    "Letter": "MessageBatch",
    "Starts": "TermStarts",
    "Tell": "Emit",
    "Told": "Report",
    "Turns": "ElectionTimeouts",
    "Wire": "MessageFormat",
}

VAGUE = {
    "anew": "again",
    "anybody|somebody|whoever": "a peer, a member, or a process",
    "nobody": "no peer, or no member",
}


def faults(words: dict[str, str], line: str) -> list[str]:
    """Return what is wrong with a line: each of the words in it, also as a part of an identifier, and what to say
    instead."""
    return [
        f"{match.group()!r} is no word of the field: say {instead}"
        for word, instead in words.items()
        if (match := re.search(rf"(?<![a-zA-Z])(?:{word})(?![a-zA-Z])", line, re.IGNORECASE))
    ]


def uses(words: dict[str, str], folders: tuple[str, ...]) -> list[str]:
    """Return the faults of all lines, with their places."""
    anything = re.compile(rf"(?<![a-z])(?:{'|'.join(words)})(?![a-z])")  # of small letters: five times as fast
    return [
        f"{path}:{number}: {fault}"
        for path in tracked(*folders)
        if path.suffix in (".py", ".md", ".toml") and str(path) not in ABOUT_WORDS
        if anything.search((text := (ROOT / path).read_text()).lower())
        for number, line in enumerate(text.splitlines(), 1)
        for fault in faults(words, line)
    ]


def test_old_words_do_not_come_back() -> None:
    found = uses(OLD, EVERYWHERE)
    if found:
        pytest.fail("\n".join(found))


def test_subjects_have_names() -> None:
    found = uses(VAGUE, (*PACKAGES, "docs", "README.md"))
    if found:
        pytest.fail("\n".join(found))


def test_the_agreement_speaks_as_its_field_does() -> None:
    found = uses(AGREEMENT, OF_THE_AGREEMENT)
    if found:
        pytest.fail("\n".join(found))


def test_old_names_of_classes_do_not_come_back() -> None:
    found = [
        f"{path}: {name} is no name of the field: say {CLASSES[name]}"
        for path in modules()
        for name in re.findall(r"^\s*class (\w+)", (ROOT / path).read_text(), re.MULTILINE)
        if name in CLASSES
    ]
    if found:
        pytest.fail("\n".join(found))


def test_a_fault_names_the_word_to_use() -> None:
    assert faults(OLD, "def Hand_in(self):") == ["'Hand_in' is no word of the field: say submit"]
    assert faults(VAGUE, "if nobody waits") == ["'nobody' is no word of the field: say no peer, or no member"]
    assert faults(OLD, "the wait of a session with patience") == []  # a word of the field in scheduling


@pytest.mark.parametrize("words", [OLD, VAGUE, AGREEMENT])
def test_no_fault_is_mended_by_another(words: dict[str, str]) -> None:
    assert {
        instead: faults(OLD | VAGUE | AGREEMENT, instead)
        for instead in words.values()
        if faults(OLD | VAGUE | AGREEMENT, instead)
    } == {}
    assert all(words.values())
