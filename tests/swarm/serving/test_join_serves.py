"""A peer that trains and serves at the same time, as a real process, and a client in this one."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch
import trio

from peer.ipc.sampling_options import Sampling
from swarm.inference.client import ModelClient, open_model
from swarm.run.invite import Invite
from tests.support.peer_process import PeerProcess
from tests.support.process_group import REPO
from tests.swarm.support.swarm_harness import open_swarm

pytestmark = pytest.mark.process

PROMPT = list(b"def test")
COUNT = 24


async def answer(model: ModelClient) -> tuple[int, list[int]]:
    """Return the round of the commit that answered, and the tokens."""
    session = model.session(Sampling())
    try:
        tokens = [drawn.token async for drawn in session.generate(PROMPT, COUNT)]
    finally:
        session.close()
    assert session.commit is not None
    return session.commit.round, tokens


def rounds_served(peer: PeerProcess) -> set[int]:
    return {fact.fields["round"] for fact in peer.all("commit_served")}


async def served_round(peer: PeerProcess) -> int:
    """Return the last round of a peer that commits no more, once it serves that."""
    while True:
        last = peer.round
        with trio.move_on_after(4.0):
            await peer.wait_for("round_committed", since=peer.mark())
            continue
        await peer.until(lambda: last in rounds_served(peer), f"service of round {last}")  # noqa: B023 - awaited here
        if peer.round == last:
            return last


async def test_a_peer_that_trains_answers_with_the_commits_that_it_makes(tmp_path: Path) -> None:
    """The answer to the last one has the tokens of that commit's export."""
    import transformers

    async with open_swarm(tmp_path) as swarm:
        both, other = swarm.join("both", "--serve"), swarm.join("other")
        await both.wait_for("commit_served", where=lambda fields: fields["round"] > 0)
        answers: dict[int, list[int]] = {}
        async with open_model(Invite.parse(swarm.invite.read_text())) as model:
            while len(answers) < 3:
                number, tokens = await answer(model)
                assert answers.setdefault(number, tokens) == tokens, "two answers of one commit"
                with trio.move_on_after(2.0):
                    await both.wait_for("commit_served", since=both.mark())
            other.kill()  # of two members the one that is left commits nothing
            last = await served_round(both)
            while (found := await answer(model))[0] < last:
                await trio.sleep(0.5)
        rounds = [fact.fields["round"] for fact in both.commits]
        assert rounds == sorted(rounds) and len(rounds) >= 3, "it trains on"
        assert not both.all("commit_unserved") and not both.all("worker_died")
        both.process.send_signal(signal.SIGINT)
        assert await both.wait_exit() == 130
        folder = tmp_path / "model"
        command = [sys.executable, "-m", "cli.main", "export", "--home", str(both.home), "--out", str(folder)]
        done = await trio.run_process(command, cwd=REPO, capture_stdout=True, capture_stderr=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        assert found[0] == last == both.round
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([PROMPT])
    told = reference.generate(ids, max_new_tokens=COUNT, do_sample=False, attention_mask=torch.ones_like(ids))
    assert found[1] == told[0, len(PROMPT) :].tolist()
