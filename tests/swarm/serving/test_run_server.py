"""A training run that is served while it trains: real processes, and a client in this one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import trio

from peer.ipc.sampling_options import Sampling
from swarm.inference.client import ModelClient, open_model
from swarm.run.invite import Invite
from tests.support.forking.command import peer_meanwhile
from tests.support.peer_process import PeerProcess
from tests.swarm.serving.served_run import COUNT, PROMPT, Answer, ask, compared, export_each
from tests.swarm.support.swarm_harness import Swarm, open_swarm

pytestmark = pytest.mark.process

LONG = 100


def serve(swarm: Swarm, name: str, *options: str) -> PeerProcess:
    """Start a server of the swarm's run."""
    arguments = ["serve", str(swarm.invite), "--name", name, "--threads", "1", *options]
    return swarm.group.start(name, arguments)


async def struck(
    model: ModelClient, servers: dict[str, PeerProcess], strike: Callable[[PeerProcess], None]
) -> tuple[PeerProcess, list[int]]:
    """Strike the server of an answer after five tokens; return it, and the tokens of the whole answer."""
    session, tokens, victim = model.session(Sampling()), list[int](), None
    try:
        async for drawn in session.generate(PROMPT, LONG):
            tokens.append(drawn.token)
            if len(tokens) == 5:  # the others are not drawn yet: no server runs so far ahead
                victim = servers[model.servers.records[session.route[0].peer].name]
                strike(victim)
    finally:
        session.close()
    assert victim is not None and session.commit is not None and session.commit.round == 3
    assert session.failovers == 1
    return victim, tokens


async def test_answers_while_the_run_goes_on_are_those_of_the_exports_of_their_commits(tmp_path: Path) -> None:
    """Of two rounds at least, by two clients at once; none fails. A talk goes on with the newest commit: between two of
    its answers the server ends it, and its whole text is then computed with another commit."""
    async with open_swarm(tmp_path, steps=60, min_peers=1) as swarm:
        trainer = swarm.join("trainer")
        await swarm.committed(1, trainer)
        server = serve(swarm, "server")
        first = (await server.wait_for("commit_served")).fields["round"]
        answers, exports = list[Answer](), dict[int, Path]()
        invite = Invite.parse(swarm.invite.read_text())

        async def client() -> None:
            while len(answers) < 6 or len({one.round for one in answers} & exports.keys()) < 2:
                answers.append(await ask(model, 65 + len(answers) % 3))

        async with open_model(invite) as model:
            session = model.session(Sampling())
            try:
                before = [drawn.token async for drawn in session.generate(PROMPT, COUNT)]
                assert session.commit is not None and session.commit.round >= first
                answered_by = session.commit.round
                async with trio.open_nursery() as exporting:
                    exporting.start_soon(export_each, invite, trainer, tmp_path, exports)
                    async with trio.open_nursery() as clients:
                        for _ in range(2):
                            clients.start_soon(client)
                    exporting.cancel_scope.cancel()
                for _ in range(2):  # there is room for two: the one that answered has ended
                    await server.wait_for("commit_served", since=server.mark())
                after = [drawn.token async for drawn in session.generate(PROMPT, COUNT)]
                assert session.commit.round > answered_by and session.failovers == 0
            finally:
                session.close()
        assert len(before) == len(after) == COUNT and len(session.tokens) == 2 * (len(PROMPT) + COUNT)
        folders = [path for path in (server.home / "commits").iterdir() if path.is_dir()]
        assert 1 <= len(folders) <= 3, "two that are served, and one that is being written"
        assert {one.round for one in answers} <= {fact.fields["round"] for fact in server.all("commit_served")}
        assert not server.all("commit_unserved")
    checked, wrong = compared(answers, exports)
    assert checked >= 2 and wrong == 0


async def test_an_answer_is_that_of_the_export_of_its_commit(tmp_path: Path) -> None:
    """Also where its server is killed or leaves on the way. The run is over, and its peers have left: the coordinator
    keeps its last state."""
    import transformers

    async with open_swarm(tmp_path, rounds=3) as swarm:
        trainers = [swarm.join(f"p{i}") for i in range(2)]
        assert [await trainer.wait_exit() for trainer in trainers] == [0, 0]
        servers = {name: serve(swarm, name) for name in ("server", "other", "third")}
        for server in servers.values():
            assert (await server.wait_for("commit_served")).fields["round"] == 3
        async with open_model(Invite.parse(swarm.invite.read_text())) as model:
            killed, tokens = await struck(model, servers, PeerProcess.kill)
            left, same = await struck(model, servers, lambda server: server.process.send_signal(signal.SIGTERM))
            assert same == tokens
            assert killed is not left and await left.wait_exit() == 128 + signal.SIGTERM
        folder = tmp_path / "model"
        done = await peer_meanwhile("export", swarm.invite, "--out", folder)
        assert done.returncode == 0, done.stderr
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([PROMPT])
    told = reference.generate(ids, max_new_tokens=LONG, do_sample=False, attention_mask=torch.ones_like(ids))
    assert tokens == told[0, len(PROMPT) :].tolist()


async def test_blocks_are_taken_by_need_and_the_status_shows_who_serves(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, rounds=1) as swarm:
        trainers = [swarm.join(f"p{i}") for i in range(2)]
        assert [await trainer.wait_exit() for trainer in trainers] == [0, 0]
        await serve(swarm, "last", "--blocks", "1:2").wait_for("commit_served")
        seen = json.loads((await peer_meanwhile("status", swarm.invite, "--json")).stdout)
        assert seen["served_round"] is None and seen["troubles"] == ["no server holds block 0"]
        await serve(swarm, "needed", "--memory", "0.00022").wait_for("commit_served")  # for one block of two commits
        async with open_model(Invite.parse(swarm.invite.read_text())) as model:
            assert (await ask(model, 65)).round == 1
        shown = (await peer_meanwhile("status", swarm.invite)).stdout
        lines = {line.split()[0]: line.split() for line in reversed(shown.splitlines()) if line.split()}
        assert (lines["needed"][2:4], lines["last"][2:4]) == (["0-0", "1"], ["1-1", "1"])
        assert "New answers are those of round 1." in shown


async def test_a_gossip_run_is_refused(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, outer='[outer]\nmethod = "gossip"\nsteps = 5') as swarm:
        for peer in (serve(swarm, "server"), swarm.join("both", "--serve")):
            assert await peer.wait_exit() == 2
            assert "gossip run" in peer.log.read_text()
