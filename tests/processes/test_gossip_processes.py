"""Four real processes gossip over real sockets; one is killed in the middle and the others go on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from swarm.gossip.engine import SLOTS, draw
from tests.support.forking.forked import ForkedProcess
from tests.swarm.support.gossip_child import BATCH, RUN, STEPS, initial_theta

PEERS, NUMEL, ROUNDS, KILLED_AT = 4, 200_000, 30, 10
ROOT = Path(__file__).parents[2]
CHILD = "tests.swarm.support.gossip_child"
Events = list[dict[str, Any]]


def read_json(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, f"a child ended with {child.wait(60)}"
    return json.loads(line)


def tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()


def read_until(child: subprocess.Popen[str], over: Callable[[dict[str, Any]], bool]) -> Events:
    events = [read_json(child)]
    while not over(events[-1]):
        events.append(read_json(child))
    return events


def gossip(folder: Path, codec: str) -> list[Events]:
    """The events of those that were not killed."""
    with ExitStack() as stack:
        children = []
        for i in range(PEERS):
            arguments = [str(i), str(NUMEL), codec, str(folder)]
            child = ForkedProcess(CHILD, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            children.append(stack.enter_context(child))
            stack.callback(child.kill)
        group = json.dumps([read_json(child) for child in children])
        for child in children:
            tell(child, group)
        victim = children.pop()
        read_until(victim, lambda event: event.get("round", 0) >= KILLED_AT)
        victim.kill()
        stories = [read_until(child, lambda event: event.get("round", 0) >= ROUNDS) for child in children]
        for child in children:  # only now: who is slow would be left alone by those that had ended
            tell(child, "end")
        for child, events in zip(children, stories, strict=True):
            events += read_until(child, lambda event: event["event"] == "end")
        assert [child.wait(120) for child in children] == [0] * (PEERS - 1)
        return stories


def of(events: Events, *names: str) -> Events:
    return [event for event in events if event["event"] in names]


def spread(thetas: list[Any]) -> float:
    """The largest relative distance between two replicas."""
    return max(float((a - b).norm() / a.norm()) for a, b in combinations(thetas, 2))


@pytest.mark.process
def test_replicas_stay_close_and_draw_together_as_the_rate_falls(tmp_path: Path) -> None:
    stories = gossip(tmp_path, "int8")
    before = spread([initial_theta(i, NUMEL) for i in range(PEERS - 1)])
    survivors = {str(events[-1]["peer"]) for events in stories}
    for events in stories:
        assert not of(events, "peer_penalized", "bug"), events
        rounds = of(events, "gossip_met", "gossip_alone")
        met = of(events, "gossip_met")
        assert rounds[-1]["round"] >= ROUNDS
        assert len(met) >= 0.8 * len(rounds), [(e["event"], e["round"]) for e in rounds]
        # the other survivors; who of them meets the one that is killed in its ten rounds is chance
        assert survivors - {events[-1]["peer"]} <= {event["partner"] for event in met}
        # what crossed the wire is what the codec says
        end = events[-1]
        assert all(event["payload_bytes"] == end["message_bytes"] for event in met)
        first, last = met[0], met[-1]
        down = last["bytes_down"] - first["bytes_down"]
        begun = len(met) - 1 + len(of(events, "exchange_failed"))  # a message each at most; the rest is talk
        assert (len(met) - 1) * end["message_bytes"] <= down <= 1.25 * begun * end["message_bytes"], (down, end, begun)
        # whom it meets last is closer than whom it met first, when both were as they had begun
        assert last["distance"] < first["distance"], (first, last)
        samples = [tuple(span) for span in end["samples"]]
        turns = [first // (SLOTS * STEPS * BATCH) for first, _ in samples]
        assert turns == sorted(set(turns)), turns  # whoever finds the others ahead leaves turns out
        assert samples == [draw(RUN, end["peer"], turn, STEPS * BATCH)[0] for turn in turns]
    after = spread([load_file(tmp_path / f"{i}.safetensors")["theta"] for i in range(PEERS - 1)])
    assert after < 0.1 * before, (before, after)  # and no further than int8 can tell apart
