"""What a round keeps when a peer returns to its head, and who may write the next state."""

from __future__ import annotations

import pytest
import torch
import trio

from optim.codecs import get_codec
from optim.strategies.interface import RoundInfo
from swarm.protocol.head import Member, genesis
from swarm.rounds.exchange import BuildLock
from swarm.rounds.round_state import RoundState
from swarm.state.outer_state import OuterState
from tests.swarm.support.group import diloco

ME = Member("me", "s")
HEAD = genesis("run", b"s0" * 16).regrouped((ME,), 1)
NEXT = HEAD.regrouped((ME,), 2)


async def test_coming_back_to_a_head_keeps_promises_and_votes() -> None:
    round_state = RoundState(HEAD, ME)
    assert round_state.acceptor.accept(5, NEXT, b"roster")
    again = RoundState(HEAD, ME, round_state)
    assert again.acceptor.accepted == round_state.acceptor.accepted
    assert not again.acceptor.promise(4)
    assert RoundState(NEXT, ME, again).acceptor.promise(0), "another head is another decision"


async def test_one_builder_at_a_time() -> None:
    lock, began = BuildLock(), trio.Event()
    wrote: list[str] = []

    async def build() -> None:
        with lock.hold():
            began.set()
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await trio.lowlevel.checkpoint()
                wrote.append("the last slice")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(build)
        await began.wait()
        await lock.cancel()
        assert wrote == ["the last slice"], "the next builder must wait for it"
        assert lock.cancelled


def test_a_state_changed_after_hashing_is_not_committed() -> None:
    numel, codec = 64, get_codec("fp32")
    state = OuterState([torch.zeros(numel), torch.zeros(numel)], diloco(numel, "fp32"))
    round_info = RoundInfo(1, 0, 1.0)
    state.begin(round_info, state.strategy.coding(round_info, state.tensors))
    voted = codec.encode(torch.ones(numel)).numpy().data
    other = codec.encode(torch.full((numel,), 2.0)).numpy().data
    state.build(0, voted)
    hashed = state.hash_next()
    state.build(0, other)
    with pytest.raises(RuntimeError):
        state.commit(hashed)
    state.build(0, voted)
    assert state.hash_next() == hashed
    state.commit(hashed)
    assert state.tree.root == hashed
