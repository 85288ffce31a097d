"""Replicas that die, freeze, send garbage or lose an answer in the middle of micro-batches: a retry each, and every
micro-batch counted once in every stage."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
import trio

from swarm.protocol.ledger import count
from tests.swarm.support.pipeline_children import open_children
from tests.swarm.support.pipeline_harness import MICRO, Table, dispatch_all, open_replicas, rules_of, spans

pytestmark = [
    pytest.mark.soak,  # half a minute; each of its faults is in tests/soak/test_pipeline_faults.py, too
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="stages run in worker processes, supervised through /proc"),
]


async def test_faults_in_the_middle_cost_a_retry_each(tmp_path: Path) -> None:
    """Of three replicas of stage 1 one is killed with a gradient in its hands, one frozen before a forward, and one
    counts a micro-batch and loses the answer."""
    drop = tmp_path / "drop"
    drop.write_text("drop:pipeline_answer:5")
    faults = ["kill:pipeline_backward:3", "stop:pipeline_forward:4", f"@{drop}"]
    rules = rules_of(3)
    dispatched = spans(0, 60)
    async with (
        open_replicas(tmp_path, [1, 0, 1]) as stages,
        open_children(tmp_path, 3, 1, faults) as children,
    ):
        first, last = stages[0][0], stages[2][0]
        table: Table = {child.peer: child.hello for child in children}
        async with first.serving(rules, table), last.serving(rules, table):
            for child in children:
                assert await child.ask(json.dumps(table)) == {"serving": True}
            killed, frozen, dropper = children
            await dispatch_all(first, dispatched)
            assert killed.process.wait(60) == -signal.SIGKILL
            with trio.fail_after(300):
                await frozen.stopped()
            assert not drop.exists(), "it is read; what was never answered came through, so it was sent once more"
            thawed_at = frozen.thaw()
            counted, thawed = await dropper.counted(), await frozen.counted()
            together = {*counted, *thawed}
            assert len(dispatched) - 2 <= len(together) <= len(dispatched), "the killed one fell with its third"
            # What its worker had in hand as it froze was retried without its word: both may have counted that, and the
            # leader of the round takes one of their contributions. After its thaw it counts nothing that another has.
            assert not [span for span, begun in thawed.items() if begun > thawed_at and span in counted]
            assert (
                count(first.server.accounting.counted)
                == count(last.server.accounting.counted)
                == MICRO * len(dispatched)
            )
            for replica in (first, last):
                assert len((await replica.worker_group.take_gradient()).micro_batches) == len(dispatched)
                assert not replica.struck()
