"""Training while an exchange is in flight: a real worker process against the same steps in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import trio
import trio.testing

from optim.config import CodecConfig, StreamingConfig
from optim.strategies.interface import RoundInfo
from optim.strategies.registry import build_strategy
from peer.compute.device import resolve_device
from peer.compute.train_loop import InnerTrainer
from peer.data.text_corpus import TextCorpus, load_corpus
from peer.data.tokenizer import ByteTokenizer
from peer.events import Event
from peer.ipc.inner_options import InnerRunOptions
from peer.model.layout import FlatLayout, init_flat
from peer.worker.client import WorkerGroup
from swarm.protocol.head import Member
from swarm.protocol.plan import Assignment
from swarm.rounds.trainers.overlapped_trainer import OverlapTrainer, StreamingPolicy, trainer_of
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult
from swarm.rounds.trainers.worker_trainer import WorkerTrainer
from tests.peer.support.worker_harness import HOUR_S, INNER, MODEL, Log, freeze, open_test_worker_group

pytestmark = pytest.mark.process

BATCH = INNER.batch_size
NUMEL = FlatLayout.of(MODEL).numel
HALVES = (slice(0, NUMEL // 2), slice(NUMEL // 2, NUMEL))
STEPS, TAU, MIX = 40, 3, 0.25
MANY = 1_000_000


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for k in range(20):
        (folder / f"{k}.txt").write_text("".join(f"{k} bottles of beer on wall {line}.\n" for line in range(60)))
    return folder


@dataclass
class Scene:
    """A trainer under test, what it reports, and a twin of its worker in this process."""

    worker_group: WorkerGroup
    trainer: WorkerTrainer
    log: Log
    events: list[Event]
    corpus: TextCorpus
    twin: InnerTrainer

    def new_outer(self, seed: int, changed: tuple[slice, ...] | None) -> torch.Tensor:
        theta = init_flat(MODEL, seed=seed)
        self.trainer.adopt(theta, changed)
        return theta

    async def train(
        self, number: int, place: slice, *, ahead: int = 0, steps: int = STEPS, first: int = 0
    ) -> TrainResult:
        """Train round `number` on the samples after those of the previous round, or from sample `first` on."""
        begin = first or (number - 1) * STEPS * BATCH
        end = begin + steps * BATCH
        promised = ((end, end + ahead * BATCH),) if ahead else ()
        assignment = Assignment(Member("me", "here"), ((begin, end),), steps, promised)
        round_info = RoundInfo(number, (number - 1) * STEPS, INNER.lr)
        return await self.trainer.train(TrainRequest(assignment, round_info, (place,), 4, HOUR_S))

    async def train_at_once(self, number: int, place: slice, *, ahead: int) -> TrainResult:
        """As `train`, before the worker makes a step of its tail. The worker is frozen while this process sends."""
        works: list[TrainResult] = []

        async def train() -> None:
            works.append(await self.train(number, place, ahead=ahead))

        worker = self.worker_group.worker_pid
        assert worker is not None
        async with trio.open_nursery() as nursery:
            freeze(worker)
            try:
                nursery.start_soon(train)
                await trio.testing.wait_all_tasks_blocked()
            finally:
                os.kill(worker, signal.SIGCONT)
        return works[0]

    def steps(self, first: int, last: int) -> None:
        """Let the twin make the run's steps `first` to `last` - 1, each on its own samples."""
        for step in range(first, last):
            samples = list(range(step * BATCH, (step + 1) * BATCH))
            self.twin.step(self.corpus.batch(samples, 0), step)

    def mix(self, theta: torch.Tensor, place: slice) -> None:
        self.twin.local[place] = MIX * self.twin.local[place] + (1 - MIX) * theta[place]

    def check(self, work: TrainResult, place: slice, steps: int = STEPS) -> None:
        assert (work.steps, work.samples) == (steps, steps * BATCH)
        assert torch.equal(work.product, self.worker_group.outer[place] - self.twin.local[place])

    @property
    def ahead(self) -> int:
        """Steps of the last round made ahead of it."""
        trained = [event for event in self.events if event.name == "round_trained"]
        return int(trained[-1].fields["steps_ahead"])  # type: ignore[arg-type]

    async def tail_over(self) -> None:
        """Wait until the tail has ended: the worker takes one command after the other."""
        await trio.testing.wait_all_tasks_blocked()
        await self.worker_group.evaluate(1)


@asynccontextmanager
async def _scene(directory: Path, text: Path, outer: StreamingConfig) -> AsyncIterator[Scene]:
    torch.set_num_threads(1)  # like the worker: more threads would add in another order
    async with open_test_worker_group(directory, text) as (worker_group, log):
        strategy = build_strategy(outer, CodecConfig(), worker_group.layout, INNER)
        corpus = load_corpus(worker_group.config.data, ByteTokenizer(), str(text))
        twin, events = InnerTrainer(MODEL, INNER, resolve_device("cpu")), list[Event]()
        scene = Scene(worker_group, trainer_of(worker_group, outer, strategy, log), log, events, corpus, twin)
        async with trio.open_nursery() as nursery:
            with log.subscribed(events.append):
                nursery.start_soon(scene.trainer.run)
                scene.twin.local.copy_(scene.new_outer(0, None))
                yield scene
            nursery.cancel_scope.cancel()


STREAMING = StreamingConfig(steps=2 * STEPS, fragments=2, tau=TAU, mix=MIX)
PLAIN = StreamingConfig(steps=STEPS, fragments=1, tau=0, mix=0.0)


async def test_every_promised_sample_is_trained_on_once(tmp_path: Path, text: Path) -> None:
    async with _scene(tmp_path, text, STREAMING) as scene:
        assert isinstance(scene.trainer, OverlapTrainer)
        work = await scene.train(1, HALVES[0], ahead=STEPS)
        scene.steps(0, STEPS)
        scene.check(work, HALVES[0])
        assert scene.ahead == 0

        # an exchange that takes no time: tau steps are made before its result is mixed in
        theta = scene.new_outer(1, (HALVES[0],))
        work = await scene.train_at_once(2, HALVES[1], ahead=STEPS)
        assert TAU <= scene.ahead < STEPS
        scene.steps(STEPS, STEPS + scene.ahead)
        scene.mix(theta, HALVES[0])
        scene.steps(STEPS + scene.ahead, 2 * STEPS)
        scene.check(work, HALVES[1])

        # an exchange that takes longer than all the work; and a round in which this peer had no part
        await scene.tail_over()
        scene.new_outer(2, (HALVES[1],))
        theta = scene.new_outer(3, (HALVES[0],))
        work = await scene.train(3, HALVES[0])
        assert scene.ahead == STEPS
        scene.steps(2 * STEPS, 3 * STEPS)
        scene.mix(theta, HALVES[1])
        scene.mix(theta, HALVES[0])
        scene.check(work, HALVES[0])


async def test_void_steps_ahead_are_reported(tmp_path: Path, text: Path) -> None:
    async with _scene(tmp_path, text, STREAMING) as scene:
        await scene.train(1, HALVES[0], ahead=STEPS)
        scene.steps(0, STEPS)
        await scene.tail_over()
        scene.steps(STEPS, 2 * STEPS)
        theta = scene.new_outer(1, None)  # fetched: steps from the old weights are void
        work = await scene.train(2, HALVES[1], ahead=STEPS)
        assert [(e.name, e.fields["steps"]) for e in scene.events if "void" in e.name] == [("steps_ahead_void", STEPS)]
        scene.twin.local.copy_(theta)
        scene.steps(STEPS, 2 * STEPS)
        scene.check(work, HALVES[1])

        await scene.tail_over()
        work = await scene.train(3, HALVES[0], first=MANY)  # a plan that breaks the promise
        assert [e.fields["round"] for e in scene.events if e.name == "steps_ahead_void"] == [2, 3]
        assert work.samples == STEPS * BATCH and scene.ahead == 0


async def test_a_worker_that_dies_or_is_paused_in_a_tail_costs_only_the_tail(tmp_path: Path, text: Path) -> None:
    async with _scene(tmp_path, text, STREAMING) as scene:
        await scene.train(1, HALVES[0], ahead=MANY)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.log.wait_for, "worker_failed")
            await trio.testing.wait_all_tasks_blocked()
            assert scene.worker_group.worker_pid is not None
            os.kill(scene.worker_group.worker_pid, signal.SIGKILL)
        work = await scene.train(2, HALVES[1], steps=5, ahead=MANY)
        assert (work.steps, scene.ahead) == (5, 0)

        await scene.trainer.pause()
        assert not scene.worker_group.worker_pids
        assert (await scene.train(3, HALVES[0], steps=5, first=MANY)).steps == 0
        await scene.trainer.resume()
        work = await scene.train(3, HALVES[0], steps=5, first=MANY)
        assert (work.steps, scene.ahead) == (5, 0)


async def test_finishing_early_ends_the_round_but_not_the_tail(tmp_path: Path, text: Path) -> None:
    async with _scene(tmp_path, text, STREAMING) as scene:
        await scene.train(1, HALVES[0], ahead=STEPS)
        scene.trainer.finish_early()  # for a round whose contribution it has submitted
        await scene.tail_over()
        await scene.train(2, HALVES[1])
        assert scene.ahead == STEPS

        works: list[TrainResult] = []

        async def endless() -> None:
            works.append(await scene.train(3, HALVES[0], steps=MANY))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(endless)
            await trio.testing.wait_all_tasks_blocked()
            scene.trainer.finish_early()
        assert works[0].steps < MANY and works[0].samples == works[0].steps * BATCH


@pytest.mark.parametrize("outer", [STREAMING, PLAIN], ids=["overlaps", "plain"])
async def test_a_request_to_finish_early_makes_no_step(tmp_path: Path, text: Path, outer: StreamingConfig) -> None:
    async with _scene(tmp_path, text, outer) as scene:
        place = HALVES[0] if outer is STREAMING else slice(0, NUMEL)
        assignment = Assignment(Member("me", "here"), ((0, MANY * BATCH),), MANY)
        request = TrainRequest(assignment, RoundInfo(1, 0, INNER.lr), (place,), 4, HOUR_S, cut_short=True)
        work = await scene.trainer.train(request)
        assert (work.steps, work.samples) == (0, 0)
        theta = scene.new_outer(1, (place,))
        work = await scene.train(1, place)
        if outer is PLAIN:
            scene.twin.local.copy_(theta)
            scene.steps(0, STEPS)
            scene.check(work, place)
        assert work.steps == STEPS


async def test_a_round_cancelled_during_capture_blocks_no_later_round(tmp_path: Path, text: Path) -> None:
    async with _scene(tmp_path, text, STREAMING) as scene:
        assert isinstance(scene.trainer, OverlapTrainer)
        captured = scene.trainer._policy.captured
        with trio.CancelScope() as scope:

            def cancelled_meanwhile(delta: torch.Tensor, peers: int) -> InnerRunOptions:
                trio.from_thread.run_sync(scope.cancel)
                return captured(delta, peers)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(scene.trainer._policy, "captured", cancelled_meanwhile)
                await scene.train(1, HALVES[0], ahead=STEPS)
        assert scope.cancelled_caught
        with trio.fail_after(300):
            for number in (1, 2):
                work = await scene.train(number, HALVES[0], ahead=STEPS)
                assert work.steps == STEPS


@pytest.mark.parametrize("outer", [STREAMING, PLAIN], ids=["overlaps", "plain"])
async def test_finishing_early_during_validation_ends_the_round(
    tmp_path: Path, text: Path, outer: StreamingConfig
) -> None:
    async with _scene(tmp_path, text, outer) as scene:
        scene.trainer.validate_round = 1
        works: list[TrainResult] = []

        async def endless() -> None:
            works.append(await scene.train(1, HALVES[0], steps=MANY))

        with trio.fail_after(300):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(endless)
                await _measuring(scene)
                scene.trainer.finish_early()
        assert (works[0].steps, works[0].samples) == (0, 0)
        assert scene.trainer.val_loss is not None and scene.trainer.validate_round is None


async def test_an_interrupted_validation_is_repeated(tmp_path: Path, text: Path) -> None:
    async with _scene(tmp_path, text, PLAIN) as scene:
        scene.trainer.validate_round = 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.trainer.validate)
            await _measuring(scene)
            nursery.cancel_scope.cancel()
        assert scene.trainer.val_loss is None
        for _ in range(2):
            await scene.trainer.validate()
        assert [e.fields["round"] for e in scene.events if e.name == "val_evaluated"] == [1]


async def _measuring(scene: Scene) -> None:
    """Wait until the worker has a command."""
    while not scene.worker_group._supervisor._pending:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("overlaps", [False, True])
async def test_one_fragment_without_mixing_is_diloco(tmp_path: Path, text: Path, overlaps: bool) -> None:
    """Bit-identical with the plain trainer, which such a run uses, and with the overlapping one without tails."""
    everything = slice(0, NUMEL)
    async with _scene(tmp_path, text, PLAIN) as scene:
        assert type(scene.trainer) is WorkerTrainer
        if overlaps:
            scene.trainer = OverlapTrainer(
                scene.worker_group, StreamingPolicy(scene.worker_group, tau=0, mix=0.0), scene.log
            )
        for number in (1, 2, 3):
            theta = scene.new_outer(number, None if number == 1 else (everything,))
            work = await scene.train(number, everything)
            scene.twin.local.copy_(theta)
            scene.steps((number - 1) * STEPS, number * STEPS)
            scene.check(work, everything)


async def test_idle_time_of_the_worker_is_measured(tmp_path: Path, text: Path) -> None:
    """`idle_s` is the worker's own time without a command (`tests.peer.worker.test_worker_clock`), `busy_s` that of
    its steps; evaluation is neither."""
    async with _scene(tmp_path, text, STREAMING) as scene:
        began = trio.current_time()  # before the worker's last answer, from which on it may be idle
        await scene.train(1, HALVES[0], ahead=STEPS)
        await scene.tail_over()
        await scene.train(2, HALVES[1])
        took_s = trio.current_time() - began
        trained = [event.fields for event in scene.events if event.name == "round_trained"]
        idle_s, busy_s = trained[-1]["idle_s"], trained[-1]["busy_s"]
        assert isinstance(idle_s, float) and isinstance(busy_s, float)
        assert 0 <= idle_s < took_s - busy_s and busy_s > 0
