"""Token ids on the wire, and the event of a feeder: for which peers it has read, and how much."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.errors import ProtocolViolation
from peer.events import Event
from swarm.pipeline.data_feed import FeederStats, serve_tokens
from swarm.pipeline.messages import AskTokens, decode_tokens, encode_tokens, tokens_method
from tests.swarm.pipeline.test_source import RULES, hosts, read
from tests.swarm.support.pipeline_harness import MICRO


async def test_feeder_reports_what_it_has_read() -> None:
    async with AsyncExitStack() as stack:
        ann, bob, feeder = await hosts(stack, 3)
        told: list[Event] = []
        stack.enter_context(feeder.events.subscribed(told.append))
        fed = FeederStats(RULES, feeder.events)
        serve_tokens(feeder.rpc, RULES, read, fed.note)
        for asker, first in ((ann, 0), (ann, 1), (bob, 2)):
            request = AskTokens(RULES.run_id, ((MICRO * first, MICRO * (first + 1)),))
            await asker.rpc.call(feeder.peer_id, tokens_method(RULES), request, timeout_s=30)
        fed.tell()
        facts = [event.fields for event in told if event.name == "text_fed"]
        assert facts[0] == {"micro_batches": 0, "peers": []}
        assert {"micro_batches": 1, "peers": [ann.peer_id]} in facts, "a new peer is told of at once"
        assert facts[-1] == {"micro_batches": 3, "peers": [ann.peer_id, bob.peer_id]}


@given(st.lists(st.integers(-256, 255), min_size=3, max_size=60))
def test_ids_and_marks_come_as_they_were_sent(values: list[int]) -> None:
    tokens = torch.tensor(values[: len(values) // 3 * 3]).view(-1, 3)
    assert torch.equal(decode_tokens(encode_tokens(tokens), replace(RULES, marked=True, vocab_size=256), 2), tokens)


@pytest.mark.parametrize(
    ("value", "marked"),
    [(256, False), (256, True), (-1, False), (-257, True), (-(1 << 31), True), ((1 << 31) - 1, True)],
)
def test_ids_outside_the_vocabulary_are_refused(value: int, marked: bool) -> None:
    settings = replace(RULES, marked=marked, vocab_size=256)
    with pytest.raises(ProtocolViolation, match="in a vocabulary of 256"):
        decode_tokens(encode_tokens(torch.tensor([[3, value, 5]])), settings, 2)
