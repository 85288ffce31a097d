"""Whom a leader leaves out after an exchange that ran out of time."""

from __future__ import annotations

import pytest

from swarm.protocol.exclusion import choose_excluded

TURNS = range(8)


@pytest.mark.parametrize("turn", TURNS)
def test_owners_that_wait_themselves_are_excused(turn: int) -> None:
    """Two owners lack a slice of `mute`; a peer that owns nothing, like `mute`, lacks the results of both."""
    waits = {
        "owner1": (["mute"], ["owner2"]),
        "owner2": (["mute"], ["owner1"]),
        "idle": ([], ["owner1", "owner2"]),
        "mute": ([], ["owner1", "owner2"]),
    }
    assert choose_excluded(waits, turn) == {"mute"}


@pytest.mark.parametrize("turn", TURNS)
def test_an_owner_that_delivers_nothing_is_blamed(turn: int) -> None:
    assert choose_excluded({"a": ([], ["mute"]), "b": ([], ["mute"]), "mute": ([], [])}, turn) == {"mute"}


@pytest.mark.parametrize("turn", TURNS)
def test_a_peer_that_blames_the_group_is_left_out(turn: int) -> None:
    """Also where it earns the complaint of the one peer that it sends nothing."""
    honest = {"a": (["liar"], []), "b": ([], []), "c": ([], [])}
    assert choose_excluded({**honest, "liar": (["a", "b", "c"], [])}, turn) == {"liar"}


def test_of_two_that_accuse_each_other_each_has_its_turn() -> None:
    waits: dict[str, tuple[list[str], list[str]]] = {"a": (["b"], []), "b": (["a"], []), "c": ([], [])}
    choices = [choose_excluded(waits, turn) for turn in TURNS]
    assert choices == [{"a"}, {"b"}] * 4, "whoever else is there: it costs one more exchange at most"


def test_nobody_is_blamed_for_nothing() -> None:
    assert choose_excluded({"a": ([], []), "b": ([], ["somebody who is gone"])}, 0) == set()
