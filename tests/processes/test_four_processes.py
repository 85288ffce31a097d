"""Four real processes over real sockets do what DiLoCo says, to the last bit that fp32 can be held to."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peer.identity import Identity
from tests.support.forking.forked import ForkedProcess
from tests.swarm.support.method_child import delta_of, initial_theta

PEERS, ROUNDS = 4, 3
ROOT = Path(__file__).parents[2]
CHILD = "tests.swarm.support.method_child"
SETUP = {"outer": {"method": "diloco", "steps": 2}, "codec": {"up": "fp32", "down": "fp32"}}


def read_json(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, f"a child ended with {child.wait(60)}"
    return json.loads(line)


def tell(children: list[subprocess.Popen[str]], line: str) -> None:
    for child in children:
        assert child.stdin is not None
        child.stdin.write(line + "\n")
        child.stdin.flush()


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


@pytest.mark.process
def test_the_merged_result_equals_diloco_in_float64(tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path / "authority.key")
    with ExitStack() as stack:
        children: list[subprocess.Popen[str]] = []
        for i in range(PEERS):
            arguments = [str(i), str(ROUNDS), str(tmp_path)]
            child = ForkedProcess(CHILD, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            children.append(stack.enter_context(child))
            stack.callback(child.kill)
        tell(children, json.dumps(SETUP))
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
    theta, momentum = diloco(initial_theta())
    for i in range(PEERS):
        ours = load_file(tmp_path / f"{i}.safetensors")
        assert (ours["theta"].double() - theta).norm() <= 1e-6 * theta.norm()
        assert (ours["momentum"].double() - momentum).norm() <= 1e-6 * momentum.norm()
