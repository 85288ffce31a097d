"""A run that is asked for answers while it trains: 200 requests in 20 rounds, and what they cost the training."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import trio

from swarm.inference.client import ModelClient, open_model
from swarm.run.invite import Invite
from tests.support.peer_process import PeerProcess
from tests.support.scorecard import scored
from tests.swarm.serving.served_run import Answer, ask, compared, export_each
from tests.swarm.support.swarm_harness import open_swarm

pytestmark = [pytest.mark.soak, pytest.mark.process]

ROUNDS = int(os.environ.get("ROUNDS", "20"))
REQUESTS_A_ROUND = 10
CLIENTS = 4
QUIET_ROUNDS = 8  # without a server, for the ratio
STEPS = 150  # inner steps a round


async def test_requests_during_training_are_answered_by_the_export_of_their_commit(tmp_path: Path) -> None:
    with scored("requests during training") as card:
        quiet_s = await quiet_round_s(tmp_path / "quiet")
        folder = tmp_path / "served"
        folder.mkdir()
        async with open_swarm(folder, steps=STEPS) as swarm:
            trainer, both = swarm.join("trainer"), swarm.join("both", "--serve")
            server = swarm.group.start("server", ["serve", str(swarm.invite), "--name", "server", "--threads", "1"])
            for peer in (both, server):
                await peer.wait_for("commit_served", where=lambda fields: fields["round"] > 0)
            first, asked, exports = trainer.round, Asked(trainer.round + ROUNDS), dict[int, Path]()
            async with trio.open_nursery() as nursery:
                invite = Invite.parse(swarm.invite.read_text())
                nursery.start_soon(export_each, invite, trainer, folder, exports)
                async with open_model(invite) as model, trio.open_nursery() as clients:
                    for number in range(CLIENTS):
                        clients.start_soon(asked.ask, model, trainer, number)
                nursery.cancel_scope.cancel()
            served_s = round_s(trainer, first + 1, first + ROUNDS)
        checked, wrong = compared(asked.answers, exports)
        card.note("commits that answered", len({number for number, _, _ in asked.answers}))
        card.at_least("requests", len(asked.answers), REQUESTS_A_ROUND * ROUNDS)
        card.at_most("that failed", asked.failed, 0)
        card.at_least("share of answers whose commit was exported in time", checked / len(asked.answers), 0.5)
        card.at_most("of these, with other tokens than the export", wrong, 0)
        card.note("seconds a round without a server", quiet_s)
        card.note("seconds a round with two servers and the requests", served_s)
        card.note("times as long", served_s / quiet_s)


async def quiet_round_s(folder: Path) -> float:
    """Return the length of a round of the same two trainers without a server."""
    folder.mkdir()
    async with open_swarm(folder, steps=STEPS) as swarm:
        trainers = [swarm.join("trainer"), swarm.join("both")]
        await swarm.committed(QUIET_ROUNDS, *trainers)
        return round_s(trainers[0], 2, QUIET_ROUNDS)


def round_s(peer: PeerProcess, first: int, last: int) -> float:
    """Return the median length of these rounds."""
    times = [fact.at for fact in peer.commits if first <= fact.fields["round"] <= last]
    return median(after - before for before, after in pairwise(times))


class Asked:
    """Requests of some clients, spread over the rounds until one round."""

    def __init__(self, last: int) -> None:
        self._last = last
        self.answers = list[Answer]()
        self.failed = 0

    async def ask(self, model: ModelClient, trainer: PeerProcess, number: int) -> None:
        """Ask until the trainer is at the last round."""
        while trainer.round < self._last:
            try:
                self.answers.append(await ask(model, 65 + len(self.answers) % 26))
            except Exception as error:  # noqa: BLE001 - counted, and shown
                self.failed += 1
                sys.stderr.write(f"client {number}: {error!r}\n")
            await trio.sleep(0.2)
