"""Which heads an authority accepts as the start of a new term."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import trio

from peer.identity import Identity
from swarm.coordinator.durable_state import DurableState
from swarm.coordinator.history import GroupHistory
from swarm.coordinator.rules import GroupRules
from swarm.coordinator.run_progress import RunProgress
from swarm.protocol.head import Head, Member
from tests.swarm.coordinator.regroup_scene import FIRST, after, begun, first_of

ROUNDS = (5, 6, 7, 8, 13, 14, 20, 21)
END = 20
UNSEEN = b"u" * 32


class History:
    """The memory of an authority that saw rounds 6 and 7. "member" is a member, "before" was one in round 6."""

    def __init__(self, stage: int | None, others_at: int) -> None:
        me = Identity.generate()
        start, signed = begun(me, (Member("member", "s"),))
        self.earlier = msgspec.structs.replace(start, round=6, members=(Member("before", "s"),))
        self.last = msgspec.structs.replace(start, round=7, previous=self.earlier.hash)
        beside = msgspec.structs.replace(first_of("beside"), round=others_at)
        progress = RunProgress()
        progress.add(SimpleNamespace(group="beside", head=beside, peers=1, completed=trio.Event()))
        rules = GroupRules(genesis=FIRST, stage=stage, rounds=END)
        self.history = GroupHistory(rules, after(self.earlier, signed), me.peer_id, progress)
        for head in (self.earlier, self.last):
            self.history.see(head)

    def believed(self, peer: str, head: bytes) -> list[int]:
        return [round for round in ROUNDS if self.history.believes(peer, head, round)]


def test_heads_of_a_stage_that_are_believed() -> None:
    stage, ahead = History(1, others_at=7), History(1, others_at=12)
    assert stage.believed("member", UNSEEN) == [5, 6, 7, 8, 13, 14, 20], "up to the end of the run"
    assert stage.believed("before", UNSEEN) == [8, 13, 14, 20], "what the authority did not see"
    assert History(1, others_at=8).believed("stranger", UNSEEN) == []
    assert ahead.believed("stranger", UNSEEN) == [8, 13], "the other stages have gone on with that stage"
    for head in (stage.earlier, stage.last):
        assert head.round in stage.believed("stranger", head.hash)


def test_heads_of_a_whole_run_that_are_believed() -> None:
    run = History(None, others_at=12)
    assert run.believed("member", UNSEEN) == [5, 6, 7, 8, 13, 14, 20]
    assert run.believed("stranger", UNSEEN) == run.believed("before", UNSEEN) == [7, 8, 13, 14, 20]
    assert 6 in run.believed("before", run.earlier.hash), "a former member may take the run back to what was seen"
    assert 6 not in run.believed("stranger", run.earlier.hash)


@pytest.mark.parametrize("seen", [3, 9])
def test_the_last_head_is_the_later_of_signed_and_seen(seen: int) -> None:
    me = Identity.generate()
    start, signed = begun(me, (Member("a", "s"),))
    head: Head = msgspec.structs.replace(start, term=0 if seen == 3 else 1, round=seen)
    history = GroupHistory(GroupRules(genesis=FIRST), after(head, signed), me.peer_id, RunProgress())
    assert history.head == (start if seen == 3 else head) and history.signed_head == start


def test_without_a_memory_the_first_head_is_the_last() -> None:
    history = GroupHistory(GroupRules(genesis=FIRST), DurableState(), Identity.generate().peer_id, RunProgress())
    assert history.head == FIRST and history.signed is None and history.signed_head is None
