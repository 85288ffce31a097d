"""Whom a leader leaves out after an exchange that ran out of time."""

from __future__ import annotations

from swarm.leader import whom_to_blame


def test_owners_that_wait_themselves_are_excused() -> None:
    """Two owners lack a slice of `frozen`; a peer that owns nothing lacks the results of both."""
    assert whom_to_blame({"owner1": ["frozen"], "owner2": ["frozen"], "idle": ["owner1", "owner2"]}) == {"frozen"}


def test_an_owner_that_delivers_nothing_is_blamed() -> None:
    assert whom_to_blame({"a": ["mute"], "b": ["mute"], "mute": []}) == {"mute"}


def test_a_peer_that_blames_most_of_the_group_is_left_out() -> None:
    assert whom_to_blame({"a": [], "b": [], "c": [], "liar": ["a", "b", "c"]}) == {"liar"}


def test_peers_that_wait_for_each_other_are_both_blamed() -> None:
    assert whom_to_blame({"a": ["b"], "b": ["a"], "c": []}) == {"a", "b"}


def test_nobody_is_blamed_for_nothing() -> None:
    assert whom_to_blame({"a": [], "b": []}) == set()
