"""Rounds of four real processes reach the states of the benchmarks' rounds in one process, bit for bit: the figures of
`benchmarks/training/convergence.py` are those of the network's code."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.training.rounds import Rounds
from optim import config
from optim.strategies.interface import OuterStrategy
from optim.strategies.registry import build_strategy
from peer.compute.lr_schedule import learning_rate
from peer.identity import Identity
from peer.model.layout import FlatLayout
from tests.processes.test_four_processes import CHILD, read_json, tell
from tests.support.forking.forked import ForkedProcess
from tests.swarm.state.test_method_bits import METHODS
from tests.swarm.support.method_child import INNER, MODEL, delta_of, initial_theta, seed_of

PEERS, ROUNDS = 4, 3
ROOT = Path(__file__).parents[2]
BOTH_WAYS = "two bits both ways"
RUNS: dict[str, tuple[config.OuterConfig, config.CodecConfig]] = {
    **METHODS,
    BOTH_WAYS: (config.DilocoConfig(steps=2), config.CodecConfig(up="two_bit", down="two_bit")),
}
SOON = (BOTH_WAYS, "streaming")
"""The runs of `make test`; the others are soak."""


def seeded(strategy: OuterStrategy, number: int) -> OuterStrategy:
    """Have the strategy of peer `number` draw what its process draws in each round (ternary codes)."""
    encode = strategy.encode

    def drawn(round_info: Any, *rest: Any) -> list[float]:
        torch.manual_seed(seed_of(number, round_info.round))
        return encode(round_info, *rest)

    strategy.encode = drawn  # type: ignore[method-assign]
    return strategy


def in_one_process(method: config.OuterConfig, codec: config.CodecConfig) -> dict[str, torch.Tensor]:
    """Return theta and the shared vectors after `ROUNDS` rounds of the invented work of `method_child`."""
    numbers = iter(range(PEERS))
    layout = FlatLayout.of(MODEL)
    rounds = Rounds(lambda: seeded(build_strategy(method, codec, layout, INNER), next(numbers)), initial_theta(), PEERS)
    for number in range(1, ROUNDS + 1):
        lr = learning_rate(INNER, method.steps * (number - 1))
        places = rounds.strategies[0].coding(rounds.round_info(lr), rounds.tensors).places
        sizes = [place.stop - place.start for place in places]
        products = []
        for peer in range(PEERS):
            product = torch.zeros(layout.numel)
            for place, part in zip(places, delta_of(peer, number, sum(sizes)).split(sizes), strict=True):
                product[place] = part
            products.append(product)
        rounds.exchange(products, [method.steps] * PEERS, lr)
    return dict(zip(("theta", *rounds.strategies[0].shared), rounds.tensors, strict=True))


@pytest.mark.process
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SOON else pytest.mark.soak) for n in RUNS])
def test_processes_reach_the_bits_of_the_benchmarks_rounds(name: str, tmp_path: Path) -> None:
    method, codec = RUNS[name]
    Identity.load_or_create(tmp_path / "authority.key")
    with ExitStack() as stack:
        children: list[subprocess.Popen[str]] = []
        for i in range(PEERS):
            arguments = [str(i), str(ROUNDS), str(tmp_path)]
            child = ForkedProcess(CHILD, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            children.append(stack.enter_context(child))
            stack.callback(child.kill)
        tell(children, json.dumps(msgspec.to_builtins({"outer": method, "codec": codec})))
        tell(children, json.dumps([read_json(child) for child in children]))
        assert [read_json(child) for child in children] == ["ready"] * PEERS
        tell(children, "go")
        reports = [list(iter(partial(read_json, child), "saved")) for child in children]
        tell(children, "end")
        assert [child.wait(120) for child in children] == [0] * PEERS
    assert all(report["merged"] == PEERS for said in reports for report in said[1:]), reports
    ours, expected = load_file(tmp_path / "0.safetensors"), in_one_process(method, codec)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[vector], expected[vector]) for vector in expected)
