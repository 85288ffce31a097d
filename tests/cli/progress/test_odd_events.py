"""Events with null, missing or odd fields: no view ends the peer that it shows, and none shows an old loss as new."""

from __future__ import annotations

import io
import math
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console

from cli.commands.join import farewell
from cli.demo.report import broken_in_pipeline, broken_in_whole
from cli.demo.verdict import train_losses
from cli.progress.progress import Progress
from cli.views.live import Draw, Shown, _drawn, read_tails
from cli.views.monitor_view import _skipped_text
from cli.views.table import live_view
from peer.catalogue.reading import CATALOGUE
from peer.catalogue.rounds import RoundCommitted
from tests.cli.terminal.test_hostile_text import fields_of, member
from tests.cli.views.test_pipeline_views import COUNTED, told

HANDLED = sorted(CATALOGUE)
NAMES = sorted({field.name for kind in CATALOGUE.values() for field in structs.fields(kind)})
TEXTS = st.text(max_size=8) | st.sampled_from(["0-8", "1", "coordinator", "not_finite"])
LEAVES = st.none() | st.booleans() | st.integers() | st.just(1 << 62) | st.floats() | TEXTS
VALUES = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(st.text(max_size=3), LEAVES, max_size=2)
ODD = st.tuples(st.sampled_from(HANDLED), st.dictionaries(st.sampled_from(NAMES), VALUES))
EVENTS = ODD | ODD.map(lambda event: (event[0], {**fields_of(event[0]), **event[1]}))


def drawn(view: Shown, width: int = 80, draw: Draw = live_view) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(_drawn(view, width, draw))
    return captured.get()


@given(events=st.lists(EVENTS, max_size=12), keeps_all=st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_event_ends_a_view(events: list[tuple[str, dict[str, Any]]], keeps_all: bool) -> None:
    view = Progress("a run", keeps_all)
    for event, fields in events:
        view.apply("a", event, 1.0, fields)
    drawn(view)
    train_losses(view)
    assert view.odd <= set(HANDLED)


@pytest.mark.parametrize("event", HANDLED)
def test_an_event_without_fields_is_told_once(event: str) -> None:
    view, said = Progress("a run"), list[str]()
    view.say = said.append
    for _ in range(3):
        view.apply("a", event, 1.0, {})
    assert len([line for line in said if "cannot be shown" in line]) == (event in view.odd)
    view.apply("a", "round_committed", 1.0, {"round": 7, "members": 1})
    assert view.round == 7, "later events are shown"


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_a_loss_that_is_no_number_takes_the_place_of_the_old_one(loss: object) -> None:
    view = Progress("a run")
    view.apply("a", "inner_step", 1.0, {"step": 1, "loss": 5.938})
    view.apply("a", "round_committed", 1.0, {"round": 1, "members": 1, "loss": 5.938, "steps": 6, "skipped": 0})
    assert told(view)[-1].startswith("round 1 committed by 1 member, loss 5.938, state")
    view.apply("a", "inner_step", 1.0, {"step": 2, "loss": loss})
    assert "5.938" not in drawn(view).split("round 1")[0]
    view.apply("a", "round_committed", 2.0, {"round": 2, "members": 1, "loss": loss, "steps": 6, "skipped": 6})
    assert told(view)[-1].startswith("round 2 committed by 1 member, loss - (6 of 6 steps skipped), state")
    view.apply("a", "gossip_alone", 2.0, {"round": 3, "loss": loss, "steps": 6, "skipped": 2})
    assert told(view)[-1] == "a had no partner for round 3, loss - (2 of 6 steps skipped)"


def test_skipped_rounds_and_held_out_losses_of_nan_have_a_remedy() -> None:
    view = Progress("a run")
    view.apply("a", "steps_skipped", 1.0, {"round": 2, "reason": "all 6 steps of round 2 ...: lower [inner] lr"})
    view.apply("a", "val_evaluated", 1.0, {"round": 0, "loss": 5.5})
    view.apply("a", "val_evaluated", 2.0, {"round": 2, "loss": None})
    assert told(view) == [
        "a: all 6 steps of round 2 ...: lower [inner] lr",
        "a measured a held-out loss of NaN or infinity after round 2: lower [inner] lr in a new run",
    ]
    assert view.peers["a"].claims.val_loss is None and view.val_losses[0] == 5.5 and math.isnan(view.val_losses[2])


def test_a_run_that_ends_in_nan_is_not_just_complete() -> None:
    view = Progress("a run")
    view.apply("a", "round_committed", 1.0, {"round": 2, "members": 1, "loss": 2.0})
    assert farewell(view) == "The run is complete."
    view.apply("a", "steps_skipped", 1.0, {"round": 3, "reason": "all"})
    view.apply("a", "round_committed", 1.0, {"round": 3, "members": 1, "loss": None})
    assert farewell(view).startswith("The run is complete, but") and "lower [inner] lr in a new run" in farewell(view)
    assert farewell(Progress("no event yet")) == "The run is complete."
    view = Progress("a run", rounds=3)
    assert farewell(view) == "complete: round 3 of 3"
    view.apply("a", "run_completed", 1.0, {"round": 3})
    assert farewell(view) == "", "a note has said it"


def test_status_names_the_remedy() -> None:
    claims = member("a", 0).claims
    assert claims is not None and "a skipped all 3 steps of its last round" in _skipped_text("a", claims)


def test_a_report_calls_no_old_loss_the_last_one() -> None:
    broken = broken_in_whole({0: 5.5, 2: math.nan}, 2, 100.0)
    assert broken == ["the held-out loss did not fall (5.500 -> -)"]
    (text,) = broken_in_pipeline(**{**COUNTED, "losses": {1: 3.0, 3: 2.5}})
    assert "not measured at both ends" in text
    view = Progress("a run", keeps_all=True)
    for number, loss in enumerate((3.0, None, math.nan, 2.0)):
        view.commits.setdefault("a", {})[number] = RoundCommitted(round=number, loss=loss)
    assert train_losses(view) == {0: 3.0, 3: 2.0}


class Feed:
    def __init__(self, *events: tuple[str, dict[str, Any]]) -> None:
        self.events = list(events)

    def poll(self) -> Any:
        while self.events:
            yield 1.0, *self.events.pop(0)


def test_a_table_that_cannot_be_drawn_is_a_sentence() -> None:
    def fail(view: Progress, width: int) -> NoReturn:
        raise OverflowError("too wide")

    assert "the table cannot be drawn (OverflowError: too wide)" in drawn(Progress("a run"), draw=fail)


def test_a_terminal_that_is_gone_is_no_odd_event() -> None:
    def gone(text: str) -> None:
        raise BrokenPipeError

    view = Progress("a run", say=gone)
    with pytest.raises(BrokenPipeError):
        read_tails(view, {"a": Feed(("worker_died", {"cause": "killed"}))})
