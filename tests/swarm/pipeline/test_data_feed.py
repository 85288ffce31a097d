"""The event of a feeder: for which peers it has read, and how much."""

from __future__ import annotations

from contextlib import AsyncExitStack

from peer.events import Event
from swarm.pipeline.data_feed import FeederStats, serve_tokens
from swarm.pipeline.messages import AskTokens, tokens_method
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
