"""What a stage has lost comes again, a peer that moves drains, and receipts say whose gradients were taken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

from optim.config import DilocoConfig
from peer.identity import open_body
from swarm.pipeline import local_steps
from swarm.pipeline.messages import RECEIPT, AskReceipt
from swarm.pipeline.recovery.redispatch import _inside
from swarm.pipeline.sender import _Attempt
from swarm.protocol.ledger import count
from swarm.protocol.receipts import RECEIPT_KIND, ReceiptBody, latest
from tests.swarm.support.pipeline_harness import (
    HIDDEN_BYTES,
    MICRO,
    dispatch_all,
    head_at,
    ids_of,
    open_impostor,
    open_replicas,
    pass_to,
    rules_of,
    serving,
    spans,
    without_haste,
)
from tests.swarm.support.stage_replicas import Setting
from tests.swarm.support.stage_scene import kill_worker, scene_of, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="stages run in worker processes, supervised through /proc"),
]


async def test_what_a_later_stage_has_lost_is_counted_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only replica of stage 1 loses its worker, and with it what stage 0 merges."""
    monkeypatch.setattr(local_steps, "REDISPATCH_SHARE", 1.0)
    rounds = 3
    async with scene_of(tmp_path, Setting(2, DilocoConfig(steps=4), rounds), [1, 1]) as scene:
        (first,), (last,) = scene.stages
        with trio.fail_after(400):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scene.run)
                await until(lambda: last.replica.server.accounting.counted)
                kill_worker(last)
                await until(lambda: last.replica.seen("pipeline_lost"))
            scene.check(rounds)
        assert last.heads[-1].ledger.lost == 0 and last.heads[-1].tokens == first.heads[-1].tokens
        assert last.heads[-1].senders == (first.replica.peer,), "its contributions had receipts of stage 0"


async def test_draining_replica_takes_no_more_and_ends_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_haste(monkeypatch)
    rules = rules_of(2)
    async with (
        open_replicas(tmp_path, [1, 2]) as stages,
        serving(stages, rules),
        open_impostor(rules, 0, {}, None) as caller,
    ):
        (source,), (leaves, stays) = stages
        await dispatch_all(source, spans(0, 4))
        server = leaves.server
        held = count(server.accounting.counted)
        assert held and not server.drained
        server.handlers.drain()
        await dispatch_all(source, spans(4, 4))
        assert count(server.accounting.counted) == held
        assert count(stays.server.accounting.counted) == 8 * MICRO - held
        caller.book.add(leaves.peer, leaves.host.addresses)
        hidden = ids_of((0, MICRO)) + bytes(HIDDEN_BYTES)
        answer = await pass_to(caller, rules, leaves.peer, 1, hidden, samples=(40 * MICRO, 41 * MICRO))
        assert (answer.outcome, answer.cause) == ("elsewhere", "closing")
        sender, first = source.server.runner.sender, server.accounting.counted[0][0]
        assert sender is not None
        attempt = _Attempt(again=True, until=trio.current_time() + 60)
        holder = await sender._find_holder((first, first + MICRO), attempt)
        assert holder == leaves.peer, "it is asked what it has counted"
        server.accounting.capture()
        server.accounting.reset(head_at(rules, 1, 1))
        assert server.drained


async def test_receipts_are_for_the_gradients_that_were_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_haste(monkeypatch)
    rules = rules_of(2)
    async with (
        open_replicas(tmp_path, [1, 2]) as stages,
        serving(stages, rules),
        open_impostor(rules, 1, {}, None) as liar,
    ):
        (source,), later = stages
        await dispatch_all(source, spans(0, 6))
        head = head_at(rules, 1)
        for replica in later:
            counted = replica.server.accounting.counted
            (receipt,), proof = await replica.server.receipts.ask(head, counted)
            body = open_body(receipt, RECEIPT_KIND, ReceiptBody)
            assert body == ReceiptBody(head.hash, replica.peer, counted) and receipt.signer == source.peer
            assert proof == (), "the harness proves no heads"
        liar.book.add(source.peer, source.host.addresses)
        asked = AskReceipt(head.hash, ((0, 6 * MICRO),))
        reply = await liar.rpc.call(source.peer, RECEIPT, asked, timeout_s=60)
        assert open_body(reply.body.receipt, RECEIPT_KIND, ReceiptBody).ranges == ()


def test_receipts_name_whose_gradient_came_last() -> None:
    taken = {0: "a", 2: "b", 4: "a", 8: "a"}
    assert latest(taken, "a", ((0, 6),), 2) == ((0, 2), (4, 6))
    assert latest(taken, "b", ((0, 2),), 2) == ()


def test_claims_count_for_whole_micro_batches() -> None:
    assert _inside([(0, 4), (5, 8), (10, 1 << 50)], [0, 2, 4, 6, 8, 10, 12], 2) == {0, 2, 6, 10, 12}
