"""Each check of the judge fires on a history that breaks what it checks, and on no neighbour; and each weakening of the
judge is noticed by some of these histories."""

from __future__ import annotations

import ast
import re

import pytest

from tests.simulation.invariants import Broken, OutsidePromise
from tests.simulation.judging import certificates, electorates, standstills, starts  # noqa: F401  they add their histories
from tests.simulation.judging.votes import HISTORIES, History
from tests.simulation.judging.weakenings import Weakening, weaker_judges

WEAKENINGS = list(weaker_judges())


def verdict(history: History, breaks: bool) -> str:
    """Return what the judge says of a history; empty if it holds."""
    try:
        history.play(breaks)
    except (Broken, OutsidePromise) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.name)
def test_a_check_fires_where_it_must_and_only_there(history: History) -> None:
    assert re.search(history.verdict, verdict(history, breaks=True)), verdict(history, breaks=True)
    assert verdict(history, breaks=False) == ""


def noticed_by(weakening: Weakening) -> str:
    """Return the history that tells a weaker judge from the judge, "" if none does."""
    source = ast.unparse(weakening.tree)
    likely = sorted(HISTORIES, key=lambda history: history.verdict.partition(":")[0] not in source)
    with weakening.applied():
        for history in likely:
            try:
                said = verdict(history, breaks=True)
            except Exception as error:  # noqa: BLE001  a judge that goes on where it should have stopped may do anything
                said = repr(error)
            if not re.search(history.verdict, said):
                return history.name
        return next((f"not {history.name}" for history in HISTORIES if verdict(history, breaks=False)), "")


@pytest.mark.parametrize("weakening", WEAKENINGS, ids=lambda weakening: weakening.name)
def test_each_weakening_of_the_judge_is_noticed(weakening: Weakening) -> None:
    assert noticed_by(weakening)
