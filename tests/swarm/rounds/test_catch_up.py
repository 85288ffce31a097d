"""Catching up after replay has already brought the state to this peer's own candidate head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio.testing

from optim.codecs import get_codec
from optim.strategies.interface import RoundInfo
from peer.errors import NetworkError
from peer.events import EventLog
from swarm.protocol.head import Member, genesis
from swarm.protocol.quorum import HeadCandidate
from swarm.rounds.engine import Engine
from swarm.rounds.round_state import RoundState
from swarm.state.outer_state import OuterState
from tests.swarm.support.group import diloco

ME = Member("me", "s")
NUMEL = 64


class Listener:
    """Its first donor delivers the round of the candidate, and fails before the next one."""

    def __init__(self, state: OuterState, candidate: bytes) -> None:
        self.state, self.candidate = state, candidate
        self.adopted: list[object] = []

    async def fetch(self, candidate: HeadCandidate, mine: object) -> None:
        self.state.commit(self.candidate)
        raise NetworkError("the donor is gone")

    async def committed(self, head: object, results: list[memoryview]) -> None:
        self.adopted.append(head)


async def test_a_candidate_that_replay_has_committed_is_not_committed_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    state = OuterState([torch.zeros(NUMEL), torch.zeros(NUMEL)], diloco(NUMEL, "fp32"))
    round_info = RoundInfo(1, 0, 1.0)
    state.begin(round_info, state.strategy.coding(round_info, state.tensors))
    state.build(0, get_codec("fp32").encode(torch.ones(NUMEL)).numpy().data)
    head = genesis("run", state.tree.root).regrouped((ME,), 1)
    candidate = genesis("run", state.hash_next()).regrouped((ME,), 2)
    further = genesis("run", b"s2" * 16).regrouped((ME,), 3)

    round_state, listener = RoundState(head, ME), Listener(state, candidate.state_hash)
    round_state.candidate = candidate
    engine: Any = Engine.__new__(Engine)
    engine._state = SimpleNamespace(head=head, regroup=None, phase="")
    engine._context, engine._listener = SimpleNamespace(state=state, events=EventLog()), listener

    async def best_candidate() -> HeadCandidate:
        return HeadCandidate(candidate, (), None)

    monkeypatch.setattr(engine, "best_candidate", best_candidate)
    await engine._catch_up(round_state, HeadCandidate(further, (), None))
    assert listener.adopted == [candidate] and engine.head == candidate
