"""What must outlive a failed attempt to leave a head, and what must not outlive a new builder."""

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
    building, began = BuildLock(), trio.Event()
    wrote: list[str] = []

    async def build() -> None:
        with building.ends():
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
        await building.stop()
        assert wrote == ["the last slice"], "whoever comes next must wait for it"
        assert building.stopped


def test_a_state_that_was_built_on_is_not_what_was_sealed() -> None:
    numel, codec = 64, get_codec("fp32")
    state = OuterState([torch.zeros(numel), torch.zeros(numel)], diloco(numel, "fp32"))
    round_info = RoundInfo(1, 0, 1.0)
    state.begin(round_info, state.strategy.coding(round_info, state.tensors))
    voted = codec.encode(torch.ones(numel)).numpy().data
    other = codec.encode(torch.full((numel,), 2.0)).numpy().data
    state.build(0, voted)
    sealed = state.seal()
    state.build(0, other)
    with pytest.raises(RuntimeError):
        state.commit(sealed)
    state.build(0, voted)
    assert state.seal() == sealed
    state.commit(sealed)
    assert state.tree.root == sealed
