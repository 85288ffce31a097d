"""Every method over real sockets: four processes, thirty rounds, one of them killed on the way. What a round sends
again is in its traffic, so this is for a machine that does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from peer.identity import Identity

PEERS, ROUNDS, KILLED_AFTER, SETTLED_AFTER = 4, 30, 12, 20
WITHIN = 1.03  # of what the coding says
ROOT = Path(__file__).parents[2]

Section = dict[str, Any]
RUNS: dict[str, tuple[Section, Section]] = {
    "diloco topk": ({"method": "diloco", "steps": 5}, {"up": "topk"}),
    "diloco sign": ({"method": "diloco", "steps": 5}, {"up": "sign"}),
    "diloco powersgd": ({"method": "diloco", "steps": 5, "lr": 1.0, "momentum": 0.0}, {"up": "powersgd"}),
    "diloco lgreco": ({"method": "diloco", "steps": 5}, {"up": "lgreco"}),
    "streaming": ({"method": "streaming", "steps": 6, "fragments": 3, "tau": 1, "mix": 0.5}, {"up": "int4"}),
    "eager": ({"method": "eager", "steps": 5}, {}),
    "demo": ({"method": "demo"}, {}),
    "sparseloco": ({"method": "sparseloco", "steps": 5}, {}),
    "lion majority": ({"method": "lion"}, {}),
    "lion average": ({"method": "lion", "vote": "average"}, {}),
    "allreduce": ({"method": "allreduce", "batch": 8}, {"up": "fp16", "down": "fp16"}),
}


def read_json(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, "a peer ended before it said anything more"
    return json.loads(line)


def tell(child: subprocess.Popen[str], message: object) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(message) + "\n")
    child.stdin.flush()


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.parametrize("name", RUNS)
def test_thirty_rounds_and_one_kill(name: str, tmp_path: Path) -> None:
    outer, codec = RUNS[name]
    Identity.load_or_create(tmp_path / "authority.key")
    with ExitStack() as stack:
        children = []
        for i in range(PEERS):
            command = [sys.executable, "-m", "tests.swarm.support.method_child", str(i), str(ROUNDS), str(tmp_path)]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            children.append(stack.enter_context(child))
            stack.callback(child.kill)
            tell(child, {"outer": outer, "codec": codec})
        group = [read_json(child) for child in children]
        for child in children:
            tell(child, group)
        assert [read_json(child) for child in children] == ["ready"] * PEERS
        for child in children:  # only now: who cannot be called yet is left out of the first round
            tell(child, "go")
        reports: list[dict[int, Section]] = [{0: {"round": 0}} for _ in children]
        for number in range(1, ROUNDS + 1):
            for child, said in zip(children, reports, strict=True):
                while child.returncode is None and max(said) < number:
                    report = read_json(child)
                    if report["round"]:
                        said[report["round"]] = report
            if number == KILLED_AFTER:
                children[-1].kill()
                children[-1].wait()
        assert [read_json(child) for child in children[:-1]] == ["saved"] * (PEERS - 1)
        for child in children[:-1]:
            tell(child, "end")
        assert [child.wait(120) for child in children[:-1]] == [0] * (PEERS - 1)

    hashes = [{said[number]["state_hash"] for said in reports if number in said} for number in range(1, ROUNDS + 1)]
    assert all(len(seen) == 1 for seen in hashes), "a round with two states, or none"
    assert len(set.union(*hashes)) == ROUNDS, "every round moves the weights"
    survivors, last = reports[:-1], reports[0][ROUNDS]
    assert survivors[0][min(n for n in survivors[0] if n)]["members"] == PEERS and last["members"] == PEERS - 1

    begin = min(n for n in range(SETTLED_AFTER, ROUNDS) if all(n in said for said in survivors))
    sent = sum(said[ROUNDS]["bulk_bytes_up"] - said[begin]["bulk_bytes_up"] for said in survivors)
    rounds = [next(said[n] for said in survivors if n in said) for n in range(begin + 1, ROUNDS + 1)]
    ideal = sum(report["ideal_bytes"] for report in rounds)
    assert ideal <= 1.001 * sent and sent <= WITHIN * ideal, f"{sent} bytes for {ideal}"
