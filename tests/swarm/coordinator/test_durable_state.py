"""What an authority remembers of the heads it saw, and for how long."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.errors import CheckpointError, ResourceError
from peer.identity import Identity, sign_body
from swarm.coordinator.durable_state import FILE_BYTES_MAX, HEADS_MAX, DurableState, FileState, SeenHead
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.messages import REGROUP_KIND
from swarm.run.home import Home

BACK_S = 100.0


def head_of(round: int, *peers: str) -> Head:
    members = tuple(Member(peer, "s") for peer in peers)
    return genesis("run", round.to_bytes(32, "big")).regrouped(members, round)


def test_older_heads_are_forgotten() -> None:
    heads = [head_of(round, f"p{round}", "always") for round in range(4)]
    seen = SeenHead(heads[0])
    for head, at in zip(heads, (0.0, 50.0, 120.0, 140.0), strict=True):
        seen = seen.then(head, at, BACK_S)
    assert seen.head == heads[3]
    assert [head.hash in seen.heads for head in heads] == [False, True, True, True]
    assert set(seen.members) == {"p1", "p2", "p3", "always"}


def test_the_commit_before_a_seen_one_is_remembered() -> None:
    unseen = head_of(1)
    durable = DurableState()
    durable.see(unseen.regrouped((Member("p", "s"),), 2), BACK_S)
    assert durable.saw(unseen.hash) and not durable.saw(head_of(3).hash)
    assert durable.knew("p") and not durable.knew("q")


def test_of_too_many_heads_the_latest_are_kept() -> None:
    seen = SeenHead(head_of(0))
    for round in range(HEADS_MAX):
        seen = seen.then(head_of(round), 0.0, BACK_S)
    assert len(seen.heads) == HEADS_MAX
    assert head_of(HEADS_MAX - 1).hash in seen.heads and head_of(0).hash not in seen.heads


@pytest.mark.parametrize("name", ["seen.msgpack", "regroup.msgpack"])
def test_a_damaged_file_is_an_error(tmp_path: Path, name: str) -> None:
    home, me = Home(tmp_path), Identity.generate()
    durable = FileState(home)
    durable.keep(sign_body(me, REGROUP_KIND, head_of(1, me.peer_id)))
    durable.see(head_of(1, me.peer_id), BACK_S)
    path = tmp_path / name
    whole = path.read_bytes()
    for damaged in (whole[:-1], b"", b"\xff" * 100, b"\x00" * (FILE_BYTES_MAX + 1)):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="restore it from a backup"):
            FileState(home)
    path.write_bytes(whole)
    assert FileState(home).saw(head_of(1, me.peer_id).hash)


def test_a_head_that_could_not_be_written_does_not_count(tmp_path: Path) -> None:
    durable = FileState(Home(tmp_path))
    durable.see(head_of(1, "p"), BACK_S)
    (tmp_path / "seen.msgpack").unlink()
    (tmp_path / "seen.msgpack").mkdir()
    with pytest.raises(ResourceError):
        durable.see(head_of(2, "q"), BACK_S)
    assert durable.seen is not None and durable.seen.head == head_of(1, "p") and not durable.knew("q")
