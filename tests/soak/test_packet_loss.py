"""Eight real peers, each on a host of its own, that lose a share of all packets in both directions, beside a run of
the same seed that loses none. PEERS (8)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.lan_swarm import LanSwarm, open_lan_swarm
from tests.support.scorecard import scored

PEERS = int(os.environ.get("PEERS", "8"))
ROUNDS, WARM_UP = 20, 2


@dataclass(frozen=True)
class Outcome:
    """Figures of one run after its first rounds."""

    committed_of_begun: float
    round_s: float
    no_longer_heard: int
    peer_hours: float
    loss: float
    """Held out, of the last round."""


async def train(folder: Path, loss: float) -> Outcome:
    async with open_lan_swarm(folder, PEERS, rounds=ROUNDS, loss=loss) as swarm:
        for peer in swarm.peers:
            await peer.wait_for("run_finished", timeout_s=1200.0)
        commits = swarm.commits()[WARM_UP:]
        since, until = commits[0].at, commits[-1].at
        begun = sum(fact.fields["round"] > WARM_UP + 1 for peer in swarm.peers for fact in peer.all("attempt_begun"))
        swarm.check()
        return Outcome(
            committed_of_begun=(len(commits) - 1) / max(1, begun),
            round_s=swarm.round_s(since, until),
            no_longer_heard=swarm.count("peer_suspect", since, until),
            peer_hours=PEERS * (until - since) / 3600,
            loss=_last_loss(swarm),
        )


def _last_loss(swarm: LanSwarm) -> float:
    told = [fact for peer in swarm.peers for fact in peer.all("val_evaluated") if fact.fields["round"] == ROUNDS]
    assert told, "no peer has measured the last round"
    return float(told[-1].fields["loss"])


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize(
    ("loss", "commits_min", "slower_max", "unheard_an_hour"), [(0.02, 0.98, 1.5, 0.0), (0.1, 0.9, 4.0, 1.0)]
)
async def test_lost_packets(
    tmp_path: Path, loss: float, commits_min: float, slower_max: float, unheard_an_hour: float
) -> None:
    with scored(f"{100 * loss:g} % of packets lost") as card:
        lossless = await train(tmp_path / "lossless", 0.0)
        lossy = await train(tmp_path / "lossy", loss)
        card.at_least("committed of begun attempts", lossy.committed_of_begun, commits_min)
        card.note("the same without loss", lossless.committed_of_begun)
        card.at_most("median round, times that without loss", lossy.round_s / lossless.round_s, slower_max)
        may_be = max(1.0, lossy.peer_hours) * unheard_an_hour  # a short run may see the one of its hour
        card.at_most("peers no longer heard", lossy.no_longer_heard, may_be)
        card.at_most("difference of the last losses", abs(lossy.loss / lossless.loss - 1), 0.02)
