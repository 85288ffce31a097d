"""Four real processes over real sockets do what DiLoCo says, to the last bit that fp32 can be held to. And they reach
the states of the benchmarks' rounds in one process, bit for bit: the figures of `benchmarks/training/convergence.py`
are those of the network's code."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
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
from optim.strategies.interface import Coding, OuterStrategy, RoundInfo
from optim.strategies.registry import build_strategy
from peer.compute.lr_schedule import learning_rate
from peer.identity import Identity
from peer.model.layout import FlatLayout
from tests.support.forking.forked import ForkedProcess
from tests.swarm.state.test_method_bits import METHODS
from tests.swarm.support.method_child import INNER, MODEL, delta_of, initial_theta, seed_of

PEERS, ROUNDS = 4, 3
ROOT = Path(__file__).parents[2]
CHILD = "tests.swarm.support.method_child"
DILOCO, BOTH_WAYS = "diloco in fp32", "two bits both ways"
RUNS: dict[str, tuple[config.OuterConfig, config.CodecConfig]] = {
    **METHODS,
    DILOCO: (config.DilocoConfig(steps=2), config.CodecConfig(up="fp32", down="fp32")),
    BOTH_WAYS: (config.DilocoConfig(steps=2), config.CodecConfig(up="two_bit", down="two_bit")),
}
SOON = (BOTH_WAYS, "streaming")
"""The runs of `make test`; the others are soak."""


def read_json(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, f"a child ended with {child.wait(60)}"
    return json.loads(line)


def tell(children: Sequence[subprocess.Popen[str]], line: str) -> None:
    for child in children:
        assert child.stdin is not None
        child.stdin.write(line + "\n")
        child.stdin.flush()


def run(name: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Run the processes; return each one's last state."""
    method, codec = RUNS[name]
    Identity.load_or_create(folder / "authority.key")
    with ExitStack() as stack:
        children: list[subprocess.Popen[str]] = []
        for i in range(PEERS):
            arguments = [str(i), str(ROUNDS), str(folder)]
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
    rounds = [[report["round"] for report in said] for said in reports]
    assert rounds == [list(range(ROUNDS + 1))] * PEERS, reports
    assert all(report["members"] == PEERS for said in reports for report in said), reports
    assert all(report["merged"] == PEERS for said in reports for report in said[1:]), reports
    assert len({said[-1]["state_hash"] for said in reports}) == 1
    return [load_file(folder / f"{i}.safetensors") for i in range(PEERS)]


def diloco(theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Independent of ours, in float64: the mean of the pseudo-gradients, then SGD with Nesterov momentum."""
    parameter = torch.nn.Parameter(theta.double())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for round_number in range(1, ROUNDS + 1):
        everyone = [delta_of(i, round_number, theta.numel()).double() for i in range(PEERS)]
        parameter.grad = torch.stack(everyone).mean(0)
        optimizer.step()
    momentum: torch.Tensor = optimizer.state[parameter]["momentum_buffer"]
    return parameter.detach(), momentum


class Seeded:
    """The `encode` of peer `number`'s strategy, which draws what its process draws in each round (ternary codes)."""

    def __init__(self, strategy: OuterStrategy, number: int) -> None:
        self._encode, self._number = strategy.encode, number

    def __call__(
        self, round_info: RoundInfo, coding: Coding, product: torch.Tensor, out: Sequence[torch.Tensor]
    ) -> list[float]:
        torch.manual_seed(seed_of(self._number, round_info.round))
        return self._encode(round_info, coding, product, out)


def in_one_process(method: config.OuterConfig, codec: config.CodecConfig) -> dict[str, torch.Tensor]:
    """Return theta and the shared vectors after `ROUNDS` rounds of the invented work of `method_child`."""
    layout = FlatLayout.of(MODEL)
    rounds = Rounds(lambda: build_strategy(method, codec, layout, INNER), initial_theta(), PEERS)
    for peer, strategy in enumerate(rounds.strategies):
        strategy.encode = Seeded(strategy, peer)  # type: ignore[method-assign]
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
def test_the_merged_result_equals_diloco_in_float64(tmp_path: Path) -> None:
    theta, momentum = diloco(initial_theta())
    for ours in run(DILOCO, tmp_path):
        assert (ours["theta"].double() - theta).norm() <= 1e-6 * theta.norm()
        assert (ours["momentum"].double() - momentum).norm() <= 1e-6 * momentum.norm()


@pytest.mark.process
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SOON else pytest.mark.soak) for n in RUNS])
def test_processes_reach_the_bits_of_the_benchmarks_rounds(name: str, tmp_path: Path) -> None:
    ours, expected = run(name, tmp_path)[0], in_one_process(*RUNS[name])
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[vector], expected[vector]) for vector in expected)
