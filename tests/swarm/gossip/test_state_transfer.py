"""Which donor a gossip peer chooses, and how far a donor's claim about its round counts."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peer.errors import DeadlineExceeded, NetworkError
from peer.net.rpc import Rpc
from swarm.gossip.messages import StateOffer
from swarm.gossip.pairing import PeerView
from swarm.gossip.state_transfer import AHEAD_MAX, find_donor


class Answers:
    """An Rpc whose peers answer with these rounds; the others are silent."""

    def __init__(self, rounds: Mapping[str, int]) -> None:
        self._rounds = rounds

    async def call(self, peer: str, *call: object, timeout_s: float) -> Any:
        if peer not in self._rounds:
            raise DeadlineExceeded("silent")
        return SimpleNamespace(body=StateOffer(self._rounds[peer], bytes(32)))


async def found(rounds: Mapping[str, int], seen: int = 50) -> int:
    others = {peer: PeerView(seen) for peer in "abcde"}
    return (await find_donor(cast(Rpc, Answers(rounds)), others, 1.0))[1].round


async def test_a_single_donor_is_not_believed_beyond_the_records() -> None:
    for claim in (1 << 53, 50 + AHEAD_MAX + 1):
        with pytest.raises(NetworkError):
            await found({"a": claim})
        assert await found({"a": claim, "b": claim, "c": 51}) == 51


async def test_a_group_may_advance_while_its_records_are_under_way() -> None:
    assert await found({"a": 50 + AHEAD_MAX}) == 50 + AHEAD_MAX
    assert await found({"a": 3, "b": 90, "c": 90}) == 90


async def test_newcomers_do_not_discredit_the_others() -> None:
    for new in (-1, 0):
        others = {"a": PeerView(500), "b": PeerView(new), "c": PeerView(new)}
        assert (await find_donor(cast(Rpc, Answers({"a": 500})), others, 1.0))[0] == "a"
