"""Which peers a leader excludes after an exchange that timed out."""

from __future__ import annotations

import pytest

from swarm.protocol.exclusion import choose_excluded

TIE_BREAKERS = range(8)


@pytest.mark.parametrize("tie_breaker", TIE_BREAKERS)
def test_owners_that_wait_themselves_are_excused(tie_breaker: int) -> None:
    """Two owners lack a slice of `mute`. A peer without slices of its own, like `mute`, lacks the results of both."""
    waits = {
        "owner1": (["mute"], ["owner2"]),
        "owner2": (["mute"], ["owner1"]),
        "idle": ([], ["owner1", "owner2"]),
        "mute": ([], ["owner1", "owner2"]),
    }
    assert choose_excluded(waits, tie_breaker) == {"mute"}


@pytest.mark.parametrize("tie_breaker", TIE_BREAKERS)
def test_an_owner_without_results_is_excluded(tie_breaker: int) -> None:
    assert choose_excluded({"a": ([], ["mute"]), "b": ([], ["mute"]), "mute": ([], [])}, tie_breaker) == {"mute"}


@pytest.mark.parametrize("tie_breaker", TIE_BREAKERS)
def test_a_peer_that_accuses_the_group_is_excluded(tie_breaker: int) -> None:
    """One honest peer, to which the liar sends nothing, accuses it in turn."""
    honest: dict[str, tuple[list[str], list[str]]] = {"a": (["liar"], []), "b": ([], []), "c": ([], [])}
    assert choose_excluded({**honest, "liar": (["a", "b", "c"], [])}, tie_breaker) == {"liar"}


def test_peers_that_accuse_each_other_are_excluded_in_turn() -> None:
    waits: dict[str, tuple[list[str], list[str]]] = {"a": (["b"], []), "b": (["a"], []), "c": ([], [])}
    choices = [choose_excluded(waits, tie_breaker) for tie_breaker in TIE_BREAKERS]
    assert choices == [{"a"}, {"b"}] * 4, "the wrong choice costs one more exchange at most"


@pytest.mark.parametrize("tie_breaker", TIE_BREAKERS)
def test_a_leader_that_waited_in_vain_excludes_the_other(tie_breaker: int) -> None:
    """A liar sent other bytes to the owner that led next. In half of its attempts the owner chose itself, so it left
    none out and led into the same wait again, each longer than the one before."""
    waits: dict[str, tuple[list[str], list[str]]] = {"liar": ([], []), "me": (["liar"], []), "b": ([], ["me"])}
    assert choose_excluded(waits, tie_breaker, "me") == {"liar"}


@pytest.mark.parametrize("tie_breaker", TIE_BREAKERS)
def test_a_leader_that_waited_for_all_leaves_none_out(tie_breaker: int) -> None:
    """Its own links are at fault."""
    waits: dict[str, tuple[list[str], list[str]]] = {"me": (["a", "b"], []), "a": ([], []), "b": ([], [])}
    assert choose_excluded(waits, tie_breaker, "me") == set()


def test_no_peer_is_excluded_without_an_accusation() -> None:
    assert choose_excluded({"a": ([], []), "b": ([], ["a peer that has left"])}, 0) == set()
