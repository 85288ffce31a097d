"""Which contributions a member checks by the loss, what it measures, and what it makes of the outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from blake3 import blake3

from peer.errors import ProtocolViolation, WorkerError
from peer.events import Event, EventLog
from peer.identity import Identity
from swarm.protocol.agreement import events
from swarm.protocol.head import Head, Member
from swarm.rounds.context import RoundContext
from swarm.rounds.exchange.audits import Audits
from swarm.rounds.exchange.loss_checks import LossChecks
from swarm.rounds.exchange.slice_exchange import SliceExchange
from swarm.rounds.trainers.trainer import Point

IDENTITY = Identity.generate()
ME, LIAR, OTHERS = "me", "liar", ("p", "q", "liar")
BEFORE = [3.0, 3.2, 2.9, 3.1]
Losses = Callable[[int], list[float]]


def lower(by: float) -> list[float]:
    """Return losses below `BEFORE`, by a little more and less."""
    return [start - by * part for start, part in zip(BEFORE, (1.0, 1.1, 0.9, 1.0), strict=True)]


@dataclass
class Trainer:
    """Notes each point that it is to measure. `losses`: of the three."""

    losses: list[list[float]] = field(default_factory=lambda: [BEFORE, lower(0.1), lower(-0.1)])
    points: list[list[float]] = field(default_factory=list)
    fails: bool = False

    async def losses_of(self, points: Sequence[Point]) -> list[list[float]]:
        if self.fails:
            raise WorkerError("the worker is gone")
        for write in points:
            write(weights := torch.empty(4))
            self.points.append(weights.tolist())
        return self.losses


class Coding:
    """Two slices of two values; an update is one byte a value."""

    def merge(self, index: int, encoded: Sequence[memoryview], weights: Sequence[float]) -> memoryview:
        assert list(weights) == [1.0]
        return encoded[0]

    def updates(self, index: int, encoded: memoryview) -> list[tuple[slice, torch.Tensor]]:
        if bytes(encoded) == b"broken":
            raise ProtocolViolation("a slice does not decode")
        return [(slice(2 * index, 2 * index + 2), torch.tensor(list(encoded), dtype=torch.float32))]


@dataclass
class Scene:
    """One member's checks, and the exchange that it has merged."""

    share: float = 1.0
    trainer: Any = field(default_factory=Trainer)
    told: list[Event] = field(default_factory=list)
    fed: list[events.Event] = field(default_factory=list)
    drawn: list[str | None] = field(default_factory=list)
    mine: list[bytes] = field(default_factory=lambda: [bytes([1, 2]), bytes([3, 4])])
    identity: Identity = IDENTITY
    theirs: list[bytes] | None = field(default_factory=lambda: [bytes([8, 6]), bytes([4, 2])])

    def __post_init__(self) -> None:
        self.theta = torch.tensor([10.0, 20.0, 30.0, 40.0])
        bodies = [SimpleNamespace(member=Member(name, "s"), norm=1.0, steps=20) for name in (ME, *OTHERS)]
        self.bodies = {body.member.peer: body for body in bodies}
        state = SimpleNamespace(theta=self.theta)
        host = SimpleNamespace(rpc=SimpleNamespace(register=lambda method, handler: None))
        context = SimpleNamespace(
            me=Member(ME, "s"),
            identity=self.identity,
            state=state,
            host=host,
            trainer=self.trainer,
            events=EventLog(watch=self.told.append),
        )
        audits = SimpleNamespace(update_of=self.update_of)
        self.checks = LossChecks(cast(RoundContext, context), cast(Audits, audits), self.share, self.fed.append)

    async def update_of(self, exchange: Any, body: Any) -> list[memoryview] | None:
        return None if self.theirs is None else [memoryview(data) for data in self.theirs]

    async def draw(self, number: int = 0) -> Any:
        coding, info = Coding(), SimpleNamespace(round=number)
        order = SimpleNamespace(merged=[*self.bodies.values()], indices=range(2), coding=coding, round_info=info)
        here = lambda index, body: memoryview(self.mine[index]) if index < len(self.mine) else None  # noqa: E731
        exchange = cast(SliceExchange, SimpleNamespace(order=order, input_of=here))
        head = cast(Head, SimpleNamespace(hash=blake3(number.to_bytes(4, "big")).digest()))
        return await self.checks.draw(exchange, head)

    async def check_all(self, rounds: int) -> Counter[str]:
        """Draw and check after so many rounds; return how often each other was checked."""
        for number in range(rounds):
            drawn = await self.draw(number)
            self.drawn.append(drawn and drawn.other.member.peer)
            if drawn is not None:
                await self.checks.check(drawn)
        return Counter(peer for peer in self.drawn if peer)

    def seen(self, name: str) -> list[dict[str, Any]]:
        return [dict(event.fields) for event in self.told if event.name == name]


async def test_each_other_contributor_is_drawn_in_that_share_of_the_rounds() -> None:
    scene = Scene(share=0.25, trainer=Trainer([BEFORE, lower(0.1), lower(0.1)]))
    found = await scene.check_all(800)
    assert set(found) == set(OTHERS) and 150 < found.total() < 250
    assert all(0.2 < count / found.total() < 0.47 for count in found.values())


async def test_no_other_peer_can_foresee_a_draw() -> None:
    honest = [BEFORE, lower(0.1), lower(0.1)]
    members = [Scene(identity=Identity.generate(), share=0.5, trainer=Trainer(honest)) for _ in range(2)]
    for member in members:
        await member.check_all(64)
    assert members[0].drawn != members[1].drawn


async def test_a_suspect_is_checked_in_every_round_and_before_any_other() -> None:
    scene = Scene(share=1e-9)
    assert await scene.draw() is None
    scene.checks._judgements.note(LIAR, True)
    assert await scene.check_all(5) == {LIAR: 5}


@pytest.mark.parametrize("why", ["share", "trainer", "two", "not merged", "own is nothing", "others are nothing"])
async def test_where_a_check_says_nothing_none_is_drawn(why: str) -> None:
    scene = Scene(share=0.0 if why == "share" else 1.0, trainer=object() if why == "trainer" else Trainer())
    scene.checks._judgements.note(LIAR, True)
    bodies = scene.bodies
    if why == "two":
        del bodies["p"], bodies["q"]
    elif why == "not merged":
        del bodies[ME]
    elif why == "own is nothing":
        bodies[ME].norm = 0.0
    elif why == "others are nothing":
        for other in OTHERS:
            bodies[other].norm = 0.0
    assert await scene.draw() is None


async def test_one_check_at_a_time() -> None:
    scene = Scene()
    drawn = await scene.draw(0)
    assert drawn is not None and await scene.draw(1) is None
    await scene.checks.check(drawn)
    assert await scene.draw(2) is not None


async def test_three_points_are_measured_from_the_weights_before_the_round() -> None:
    scene = Scene()
    scene.bodies[ME].norm = 2.0  # the other one is half as long: that length is the measure
    drawn = await scene.draw()
    scene.theta.fill_(-1.0)  # the commit
    await scene.checks.check(drawn)
    assert scene.trainer.points == [
        [10.0, 20.0, 30.0, 40.0],
        [10.0 - 0.25, 20.0 - 0.5, 30.0 - 0.75, 40.0 - 1.0],
        [10.0 - 4.0, 20.0 - 3.0, 30.0 - 2.0, 40.0 - 1.0],
    ]


async def test_two_harmful_outcomes_are_told_and_leave_a_member_out() -> None:
    scene = Scene()
    for name in ("p", "q"):
        scene.bodies[name].norm = 0.0  # only one is left to draw
    await scene.check_all(2)
    assert scene.fed == [events.Judged(()), events.Judged((LIAR,))]
    assert [(fact["peer"], fact["left_out"]) for fact in scene.seen("contribution_judged")] == [
        (LIAR, False),
        (LIAR, True),
    ]
    assert [fact["is_harmful"] for fact in scene.seen("contribution_checked")] == [True, True]
    scene.trainer.losses = [BEFORE, lower(0.1), lower(0.1)]
    await scene.check_all(1)
    assert scene.fed[-1] == events.Judged(()) and len(scene.seen("contribution_judged")) == 2


async def test_a_check_without_an_outcome_changes_nothing() -> None:
    scene = Scene(trainer=Trainer([BEFORE, [3.1, 3.1, 3.0, 3.0], lower(-0.1)]))
    await scene.check_all(3)
    assert not scene.fed and [fact["is_harmful"] for fact in scene.seen("contribution_checked")] == [None] * 3


@pytest.mark.parametrize(("steps", "is_harmful"), [(20, True), (4, False)])
async def test_less_is_expected_of_a_member_that_made_fewer_steps(steps: int, is_harmful: bool) -> None:
    scene = Scene(trainer=Trainer([BEFORE, lower(0.1), lower(0.015)]))
    for name in OTHERS:
        scene.bodies[name].steps = steps
    await scene.check_all(1)
    assert [fact["is_harmful"] for fact in scene.seen("contribution_checked")] == [is_harmful]


@pytest.mark.parametrize("what", ["theirs", "mine", "worker", "broken"])
async def test_what_cannot_be_had_or_measured_is_no_outcome_and_the_next_check_is_made(what: str) -> None:
    scene = Scene()
    if what == "theirs":
        scene.theirs = None
    elif what == "mine":
        scene.mine = scene.mine[:1]
    elif what == "worker":
        scene.trainer.fails = True
    else:
        scene.theirs = [b"broken"] * 2
    await scene.check_all(1)
    assert not scene.fed and not scene.seen("contribution_checked")
    assert bool(scene.seen("loss_check_failed")) == (what in ("worker", "broken"))
    assert await scene.draw(1) is not None
