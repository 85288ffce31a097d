"""A stage's commit outlives its replicas: kept by a peer of the stage before, which tells of it and hands it out."""

from __future__ import annotations

from pathlib import Path

import msgspec

from peer.chunks import hash_state
from peer.identity import Identity
from swarm.archive import KEPT, Archive, AskKept, KeptHead, fetch_commit, keep
from swarm.library import serve_shelves
from tests.swarm.kept_commits import STAGE, commit_of, ground_of
from tests.swarm.test_roles import run_of


async def test_a_keeper_tells_what_it_keeps_and_hands_it_out(tmp_path: Path) -> None:
    authority = Identity.generate()
    manifest = msgspec.structs.replace(run_of(3), authority=authority.peer_id)
    head, regroup, state = commit_of(manifest, authority, 7)
    async with ground_of(manifest, tmp_path / "a") as (keeper, _), ground_of(manifest, tmp_path / "b") as (other, _b):
        archive = Archive(keeper, STAGE - 1, dict)
        serve_shelves(keeper.host.rpc, [archive.lent])
        peer = keeper.host.peer_id
        await other.host.connect_address(keeper.host.addresses[0], timeout_s=30)
        assert archive.of == STAGE
        assert await keep(keeper, STAGE, head, regroup, state)

        async def told(stage: int) -> KeptHead:
            return (await other.host.rpc.call(peer, KEPT, AskKept(stage), timeout_s=30)).body

        assert await told(STAGE) == KeptHead(head, regroup)
        assert await told(STAGE + 1) == KeptHead(), "of the next stage only"
        fetched = await fetch_commit(other, STAGE, head, (peer,))
        assert hash_state(fetched.tensors).root == head.state_hash
