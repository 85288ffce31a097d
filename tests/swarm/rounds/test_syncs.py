"""How often a member waits for its disk between the exchange of a round and its vote."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from peer.events import Event
from swarm.protocol.agreement.messages import VoteMessage
from swarm.rounds import result_log
from swarm.rounds.messages import AGREE
from tests.swarm.rounds.test_driver import deltas
from tests.swarm.support.driven_group import DrivenReplica, GroupSetting, open_driven_group

ROUNDS = 4


@pytest.mark.parametrize("large", [False, True])
async def test_a_vote_waits_for_few_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """One of its results and one of its records. The bytes of large results go to the disk while the state is hashed,
    and are synced with what says where they lead."""
    synced, at_start, waited = defaultdict[str, list[str]](list), Counter[str](), list[list[str]]()
    sync = os.fsync

    def counted(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if tmp_path in path.parents:
            peer, *where = path.relative_to(tmp_path).parts
            synced[peer].append("".join(where[:1]) + path.suffix)
        sync(fd)

    def note(peer: str, event: Event) -> None:
        if event.name == "phase_entered" and event.fields["phase"] == "exchange":
            at_start[peer] = len(synced[peer])

    def watch(replica: DrivenReplica) -> None:
        rpc: Any = replica.host.rpc
        honest = rpc.call

        async def call(peer: str, method: Any, body: Any, *arguments: Any, **options: Any) -> Any:
            if method is AGREE and any(isinstance(message, VoteMessage) for message in body.messages):
                waited.append(synced[replica.peer][at_start[replica.peer] :])
            return await honest(peer, method, body, *arguments, **options)

        rpc.call = call
        replica.host.events.subscribe(partial(note, replica.peer))

    monkeypatch.setattr(os, "fsync", counted)
    if large:
        monkeypatch.setattr(result_log, "STAGED_BYTES", 1)
    async with open_driven_group(tmp_path, GroupSetting(work_s=0.2)) as group:
        replicas = [await group.enter(deltas) for _ in range(3)]
        await group.until_round(1)
        for replica in replicas:
            watch(replica)
        await group.until_round(1 + ROUNDS)
        group.check()
    assert len(waited) > ROUNDS
    assert all(one.count("results.result") == 1 and one.count("results") == 0 for one in waited)
    assert median(map(len, waited)) == 2, "and one of the records"
