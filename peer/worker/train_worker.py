"""The "train" program of a worker: inner runs and evaluations of a whole model."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch

from peer.catalogue.machine import MicroBatchHalved
from peer.catalogue.rounds import InnerStep
from peer.checkpoint.inner_state import InnerStateFile, Sum, identity_of
from peer.compute.device import Device, resolve_device
from peer.compute.lr_schedule import learning_rate
from peer.compute.measured_step import hold_to, measured_step
from peer.compute.model_trainer import ModelTrainer, StepOutcome
from peer.compute.train_loop import InnerRun, InnerTrainer, run_inner
from peer.data.corpus import Corpus, sample_numbers
from peer.data.first_samples import FirstSamples
from peer.errors import ConfigError, StageRefused
from peer.footprint.optimizer_state import saved_bytes
from peer.footprint.step_size import StepSize
from peer.ipc.inner_options import ElementRange, InnerRunOptions
from peer.ipc.messages import MEETING, ModelLoaded
from peer.ipc.shared_memory import SharedBuffer
from peer.ipc.span import Span
from peer.ipc.train_messages import (
    InnerResult,
    LoadTrain,
    RunEvaluate,
    RunEvaluateDelta,
    RunInner,
    TrainCommand,
)
from peer.model.frozen_weights import open_frozen
from peer.model.layout import FlatLayout
from peer.worker.control_link import ControlLink
from peer.worker.corpus_worker import read_corpus

_PROGRESS_S = 0.5
_LOOK_S = 0.02


class TrainWorker:
    """Loads once, then runs commands one after the other."""

    commands: ClassVar[Any] = TrainCommand

    def __init__(self, link: ControlLink, load: LoadTrain) -> None:
        self._link = link
        self._load = load
        layout = FlatLayout.of(load.model)
        self._outer = SharedBuffer.attach(load.vectors.outer, layout.numel).tensor
        self._delta = SharedBuffer.attach(load.vectors.delta, layout.numel).tensor
        if (length := load.corpus.data.seq_len) > load.model.max_seq_len:
            raise ConfigError(f"data.seq_len ({length}) exceeds model.max_seq_len ({load.model.max_seq_len}): lower it")
        device = resolve_device(load.compute.device_of(load.rank), load.compute.compile)
        self._corpus = _read_corpus(load)
        first = FirstSamples(self._corpus, link.emit)
        self._batch = first.batch if load.rank == 0 and load.corpus.pages is not None else self._corpus.batch
        self._group = ExitStack()  # never left: the end of the process ends it
        self._trainer, self._saved = self._one_of_several(device) if load.layout.size > 1 else self._alone(device)
        if self._corpus.has_marks:
            self._trainer.take_marks()
        self._trainer.on_smaller = self._tell_smaller
        self._has_local = False  # whether trainer.local holds weights to continue from
        self._idle_s = 0.0  # the time without a command since the last inner run
        link.send(
            ModelLoaded(
                device=device.name,
                bf16=self._trainer.narrow == torch.bfloat16,
                fp16=self._trainer.narrow == torch.float16,
                compiled=self._trainer.compiled,
                windows=self._corpus.windows,
                corpus_digest=self._corpus.digest,
                corpus=self._corpus.facts,
                step_size=self._trainer.step_size,
                memory_bytes=device.memory_bytes,
            )
        )

    def _alone(self, device: Device) -> tuple[ModelTrainer, InnerStateFile]:
        load = self._load
        trainer = InnerTrainer(
            load.model,
            load.inner,
            device,
            load.step_size,
            open_frozen(load.base, load.model, device.torch),
            load.compute.weights,
        )
        saved = self._saved_state(tuple)
        saved.load(trainer.load)
        if device.torch.type == "cuda":
            trainer.resize(measured_step(trainer, load.corpus.data.seq_len, load.compute.memory_bytes or math.inf))
        return trainer, saved

    def _one_of_several(self, device: Device) -> tuple[ModelTrainer, InnerStateFile]:
        from peer.compute.rank_trainer import RankTrainer  # takes long to import, as does what it imports
        from peer.parallel.ranks import open_ranks

        load = self._load
        if device.torch.type == "cuda":
            hold_to(device.torch, load.compute.memory_bytes or math.inf)
        ranks = self._group.enter_context(open_ranks(load.layout, load.rank, device.torch, _meeting(load)))
        # what the ranks cut stays in the machine's memory, mapped from its files: each takes its own part of it
        place = device.torch if load.layout.parts == 1 else torch.device("cpu")
        base = open_frozen(load.base, load.model, place)
        trainer = RankTrainer(load.model, load.inner, device, ranks, load.step_size, base)
        saved = self._saved_state(ranks.sum)
        saved.load(trainer.load)
        return trainer, saved

    def _saved_state(self, sum: Sum) -> InnerStateFile:
        load = self._load
        layout = FlatLayout.of(load.model)
        return InnerStateFile(
            Path(load.corpus.directory),
            load.meeting,
            identity_of(load.run, load.model, Span.whole(load.model.layers), load.inner.optimizer),
            saved_bytes(load.inner.optimizer, layout.shapes),
            load.rank,
            sum,
            self._link,
        )

    def run(self) -> None:
        """Serve commands without end; the control link ends the process."""
        while True:
            waits_since = time.monotonic()
            command: TrainCommand = self._link.commands.get()
            self._idle_s += time.monotonic() - waits_since
            self._tick()
            self._link.forget_stops(command.id)
            try:
                body = self._answer(command)
            except StageRefused as refused:
                self._link.refuse(command, str(refused), refused.reason)
            else:
                self._link.reply(command, body)
                if _learns(command):
                    self._saved.save_large(self._trainer.save)

    def _answer(self, command: TrainCommand) -> InnerResult | float | list[float]:
        match command:
            case RunInner():
                return self._inner(command)
            case RunEvaluate():
                return self._evaluate(command)
            case RunEvaluateDelta():
                return self._evaluate_delta(command)

    def _inner(self, command: RunInner) -> InnerResult:
        options = command.options
        try:
            options.check(len(self._delta))
        except ValueError as error:
            raise StageRefused(str(error), "shape") from error
        self._begin(options)
        reported_at, reported_tokens = time.monotonic(), 0

        def on_step(step: int, outcome: StepOutcome, so_far: InnerResult) -> None:
            nonlocal reported_at, reported_tokens
            self._tick()
            now = time.monotonic()
            if self._load.rank == 0 and now - reported_at >= _PROGRESS_S:
                self._link.emit(
                    InnerStep(
                        step=step,
                        loss=round(outcome.loss, 4) if outcome.is_useful else None,
                        lr=learning_rate(self._load.inner, step),
                        tokens_per_s=round((so_far.tokens - reported_tokens) / (now - reported_at), 1),
                        skipped=so_far.skipped,
                        overflows=so_far.overflows,
                    )
                )
                reported_at, reported_tokens = now, so_far.tokens

        run = InnerRun(
            numbers=sample_numbers(command.ranges),
            first_step=command.first_step,
            deadline_s=command.deadline_s,
            steps=command.steps,
            stopped=lambda steps: self._link.is_stopped(command.id, steps),
            product=options.product,
            on_step=on_step,
        )
        result = run_inner(self._trainer, lambda numbers: self._batch(numbers, self._load.seed), run)
        self._capture(options)
        if _learns(command):
            self._saved.save_small(self._trainer.save)
        idle_s, self._idle_s = self._idle_s, 0.0
        return msgspec.structs.replace(result, idle_s=idle_s)

    def _begin(self, options: InnerRunOptions) -> None:
        """Prepare the local weights. Reads the outer weights only if the options need it: while a tail runs, the
        network process may write them."""
        if options.begin == "outer" or not self._has_local:
            self._trainer.import_from(self._outer)
            self._has_local = True
            return
        self._trainer.mix(self._outer, options.mix, options.alpha)

    def _capture(self, options: InnerRunOptions) -> None:
        """Write the product at the wanted ranges to the beginning of delta."""
        everything: tuple[ElementRange, ...] = ((0, len(self._delta)),)
        at = 0
        for start, stop in everything if options.capture is None else options.capture:
            out = self._delta[at : at + stop - start]
            if options.product == "delta":
                self._trainer.write_delta(self._outer, slice(start, stop), out)
            else:
                self._trainer.mean_gradient(slice(start, stop), out)
            at += stop - start

    def _tell_smaller(self, size: StepSize) -> None:
        self._tick()
        self._link.emit(MicroBatchHalved(sequences=size.sequences, recompute=size.recompute))

    def _evaluate(self, command: RunEvaluate) -> float:
        batches = self._corpus.held_out_batches(self._load.inner.batch_size, command.max_batches)
        with self._trainer.holding(self._outer):
            return self._trainer.evaluate(batches, self._tick) / self._corpus.bytes_per_token

    def _evaluate_delta(self, command: RunEvaluateDelta) -> list[float]:
        batches = self._corpus.held_out_batches(self._load.inner.batch_size, command.max_batches)
        with self._trainer.holding(self._delta):
            return [self._trainer.evaluate([batch], self._tick) for batch in batches]

    def _tick(self) -> None:
        self._link.ticks += 1


def _learns(command: TrainCommand) -> bool:
    """Whether the command changes the optimizer's state."""
    return isinstance(command, RunInner) and command.options.product == "delta"


def _meeting(load: LoadTrain) -> Path:
    return Path(load.corpus.directory) / load.meeting


def _read_corpus(load: LoadTrain) -> Corpus:
    """Read the text; of several ranks the first before the others, which find the ids of a slow tokenizer in its
    files. When it has read the text it makes the file at which they meet, and clears away those of earlier groups."""
    while load.rank > 0 and not _meeting(load).exists():
        time.sleep(_LOOK_S)
    corpus = read_corpus(load.corpus)
    if load.rank == 0:
        for old in Path(load.corpus.directory).glob(f"{MEETING}*"):
            old.unlink()
        if load.layout.size > 1:
            _meeting(load).touch()
    return corpus
