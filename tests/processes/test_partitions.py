"""Four real peers on hosts of their own while links are cut: those with a majority go on, the others wait, and all
have one history.

Runs where network namespaces can be made (root, ip, tc, iptables); else it says why not. tests/soak has eight peers,
all kinds of cuts, and looks at the clock.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.support.cuts import COORDINATOR, between
from tests.support.lan_swarm import LanSwarm, committed_in, now_s, open_lan_swarm
from tests.support.peer_process import PeerProcess

IN_FLIGHT_S = 1.0  # a commit that was certified before a cut may be told after it
NO_MAJORITY_S = 8.0  # longer than the failure detector takes, and several turns


@pytest.mark.soak  # tests/simulation cuts links in all ways
@pytest.mark.process
@pytest.mark.parametrize("more", [False, True])
async def test_partitions_heal_and_make_no_second_history(tmp_path: Path, more: bool) -> None:
    """Two halves; `more`: one peer alone before, and then two halves and a coordinator alone, where nobody goes on."""
    async with open_lan_swarm(tmp_path, 4) as swarm:
        if more:
            *three, one = swarm.peers
            cut_at = await swarm.cut(*between([one.name], [COORDINATOR, *(peer.name for peer in three)]))
            await _more_commits(three, cut_at)
            await _heals(swarm, cut_at, waiting=[one])

        left, right = swarm.peers[:2], swarm.peers[2:]
        halves = between([peer.name for peer in left], [peer.name for peer in right])
        cut_at = await swarm.cut(*halves, *between([COORDINATOR], [peer.name for peer in right]))
        await _more_commits(left, cut_at)  # two of four members, and the witness
        await _heals(swarm, cut_at, waiting=right)

        if more:
            cut_at = await swarm.cut(*halves, *between([COORDINATOR], swarm.names))
            await trio.sleep(NO_MAJORITY_S)
            await _heals(swarm, cut_at, waiting=swarm.peers)
        assert swarm.terms() == {1}


async def _more_commits(peers: list[PeerProcess], since: float) -> None:
    for peer in peers:
        await peer.until(lambda peer=peer: len(committed_in(peer, since)) >= 3, "commits without the others")  # type: ignore[misc]


async def _heals(swarm: LanSwarm, cut_at: float, waiting: list[PeerProcess]) -> None:
    """`waiting` have committed nothing since the cut; once it is healed, all commit with all as members."""
    healed_at = now_s()
    for peer in waiting:
        assert not committed_in(peer, cut_at + IN_FLIGHT_S, healed_at), peer.transcript()
    behind = max(peer.round for peer in swarm.peers)
    await swarm.heal()
    for peer in swarm.peers:
        everybody = lambda fields: fields["members"] == len(swarm.names) and fields["round"] > behind  # noqa: E731
        await peer.wait_for("round_committed", everybody)
    swarm.check()
