"""Forty scripted faults on running pipelines: SIGKILL, SIGSTOP, a lost reply or garbage, at forward, backward, merge
and move. The run goes on, soon, and no micro-batch is merged twice or lost.

The bars are for a machine that has a core to spare: where others load it they are stretched by as much.
SOAK_FAULTS, a regular expression, chooses some of them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.swarm.support.pipeline_faults import Strike, play
from tests.swarm.support.pipeline_run import open_pipeline

pytestmark = [pytest.mark.soak, pytest.mark.process]

LOCAL = '[outer]\nmethod = "diloco"\nsteps = 20'
SYNCHRONOUS = '[outer]\nmethod = "allreduce"\nbatch = 64'

CALLS = [
    Strike("forward", "kill:pipeline_forward", 0),
    Strike("forward", "kill:pipeline_forward", 1),
    Strike("forward", "stop:pipeline_forward", 2),
    Strike("forward", "drop:pipeline_forward", 1),
    Strike("forward", "drop:pipeline_forward", 2),
    Strike("forward", "garble:pipeline_send", 0),
    Strike("forward", "garble:pipeline_send", 1),
    Strike("backward", "kill:pipeline_backward", 1),
    Strike("backward", "kill:pipeline_answer", 2),
    Strike("backward", "stop:pipeline_backward", 0),
    Strike("backward", "stop:pipeline_answer", 1),
    Strike("backward", "drop:pipeline_answer", 1),
    Strike("backward", "drop:pipeline_answer", 2),
    Strike("backward", "garble:pipeline_answer", 1),
    Strike("backward", "garble:pipeline_answer", 2),
]
MERGES = [
    Strike("merge", "kill:before_send", 0),
    Strike("merge", "kill:during_exchange", 1),
    Strike("merge", "kill:before_vote", 2),
    Strike("merge", "stop:before_send", 1),
    Strike("merge", "stop:before_vote", 0),
    Strike("merge", "drop:answer/exchange.contribution", 0),
    Strike("merge", "drop:answer/round.vote", 2),
    Strike("merge", "garble:call/exchange.contribution", 1),
    Strike("merge", "garble:call/exchange.result", 2),
]
MOVES = [
    Strike("move", "kill:leaving"),
    Strike("move", "stop:leaving"),
    Strike("move", "kill:during_fetch"),
    Strike("move", "stop:arriving"),
    Strike("move", "kill:during_state_transfer", donor=True),
    Strike("move", "drop:answer/state.chunk", donor=True),
    Strike("move", "garble:answer/state.chunk", donor=True),
]
IN_STEP = [  # synchronous
    Strike("forward", "kill:pipeline_forward", 2),
    Strike("forward", "stop:pipeline_forward", 1),
    Strike("forward", "garble:pipeline_send", 1),
    Strike("backward", "kill:pipeline_backward", 0),
    Strike("backward", "drop:pipeline_answer", 2),
    Strike("backward", "garble:pipeline_answer", 1),
    Strike("merge", "kill:during_exchange", 2),
    Strike("merge", "stop:before_vote", 1),
    Strike("merge", "drop:answer/round.vote", 0),
]


def chosen(strikes: list[Strike]) -> list[Strike]:
    return [strike for strike in strikes if re.search(os.environ.get("SOAK_FAULTS", ""), str(strike))]


def show(line: str) -> None:
    print(line, flush=True)


def test_there_are_forty() -> None:
    assert len(CALLS + MERGES + MOVES + IN_STEP) == 40


async def test_replicas_are_struck_at_work(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path, LOCAL, [0, 0, 1, 1, 2, 2, 0]) as pipeline:
        await play(pipeline, chosen(CALLS + MERGES), show)


async def test_replicas_are_struck_on_the_move(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path, LOCAL, [0, 0, 1, 1, 2, 2, None]) as pipeline:
        await play(pipeline, chosen(MOVES), show)


async def test_replicas_of_a_synchronous_run_are_struck(tmp_path: Path) -> None:
    async with open_pipeline(tmp_path, SYNCHRONOUS, [0, 0, 1, 1, 2, 2, 1]) as pipeline:
        await play(pipeline, chosen(IN_STEP), show)
