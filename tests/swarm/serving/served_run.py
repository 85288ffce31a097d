"""Answers of a run that trains, held against the exports of the commits that gave them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import trio

from cli.commands.export import Target, facts_of
from peer.errors import BarnraiseError
from peer.ipc.sampling_options import Sampling
from swarm.client.download import download_head
from swarm.inference.client import ModelClient
from swarm.run.invite import Invite
from tests.support.peer_process import PeerProcess

PROMPT: Final = list(b"def test")
COUNT: Final = 24


class Answer(NamedTuple):
    """The tokens behind PROMPT and one byte more, by the commit of that round."""

    round: int
    own: int
    tokens: list[int]


async def ask(model: ModelClient, own: int) -> Answer:
    """Ask for the likeliest tokens."""
    session = model.session(Sampling())
    try:
        tokens = [drawn.token async for drawn in session.generate([*PROMPT, own], COUNT)]
    finally:
        session.close()
    assert session.commit is not None and len(tokens) == COUNT
    return Answer(session.commit.round, own, tokens)


async def export_each(invite: Invite, trainer: PeerProcess, folder: Path, exports: dict[int, Path]) -> None:
    """Export each commit as it is made, as `peer export INVITE` does, but in this process: a new one imports torch."""
    while True:
        await trainer.wait_for("round_committed", since=trainer.mark())
        out = folder / f"model-{trainer.round}"
        out.mkdir(exist_ok=True)
        try:
            found = await download_head(invite, folder / "state.part")
        except BarnraiseError:  # the group has gone on meanwhile
            continue
        what = (found.manifest, found.tokenizer, found.theta, facts_of(found))
        await trio.to_thread.run_sync(Target(out, None, True).write, *what)  # a server ends the answer of a mute client
        exports.setdefault(found.heads[0].round, out)


def compared(answers: Iterable[Answer], exports: dict[int, Path]) -> tuple[int, int]:
    """Return how many answers were compared with `transformers` on the export of their commit, and how many
    differed."""
    import transformers

    models: dict[int, Any] = {}
    told: dict[tuple[int, int], list[int]] = {}
    checked = wrong = 0
    for number, own, tokens in answers:
        if number not in exports:
            continue
        if number not in models:
            models[number] = transformers.AutoModelForCausalLM.from_pretrained(exports[number]).eval()
        if (number, own) not in told:
            ids = torch.tensor([[*PROMPT, own]])
            mask = torch.ones_like(ids)
            made = models[number].generate(ids, max_new_tokens=COUNT, do_sample=False, attention_mask=mask)
            told[number, own] = made[0, ids.shape[1] :].tolist()
        checked += 1
        wrong += tokens != told[number, own]
    return checked, wrong
