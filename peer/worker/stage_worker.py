"""The compute worker of one stage of a pipeline; `peer.worker.main` runs it where its configuration names a stage.

Commands arrive while others run, so the device never waits for the parent between two micro-batches.
"""

from __future__ import annotations

import queue
import time

import torch

from peer.compute.device import resolve_device, uses_bf16
from peer.compute.inner_optimizer import InnerSpec, state_bytes
from peer.compute.stage import Stage
from peer.errors import ConfigError, StageRefused
from peer.ipc import messages as control
from peer.ipc.shared_memory import SharedBuffer
from peer.ipc.stage_messages import (
    DropDone,
    DropMicroBatch,
    ExportDone,
    ExportProduct,
    ImportWeights,
    MicroBatchDone,
    MoveDone,
    Refusal,
    RunBackward,
    RunForward,
    RunStep,
    StageCommand,
    StageReply,
    TakeDone,
    TakeGradient,
)
from peer.ipc.stage_slots import SlotArea
from peer.worker.control_link import ControlLink
from peer.worker.stage_queue import StageQueue


class StageWorker:
    """Loads once, then runs commands, backward first. It has no weights until it is told to import them."""

    def __init__(self, link: ControlLink, load: control.LoadModel) -> None:
        spec = load.stage
        if spec is None:
            raise ConfigError("a stage's worker needs a stage")
        self._link = link
        self._queue = StageQueue()
        device = resolve_device(load.device)
        self._stage = stage = Stage(load.model, load.inner, device, spec)
        numel = stage.layout.numel
        self._outer = SharedBuffer.attach(load.outer_fd, numel).tensor
        self._delta = SharedBuffer.attach(load.delta_fd, numel).tensor
        kept = state_bytes(InnerSpec.of(load.inner), stage.layout)
        self._inner_state = SharedBuffer.attach(load.inner_state_fd, kept, torch.uint8).tensor
        stage.optimizer.load(self._inner_state)
        hidden_size = load.model.hidden_size
        slots = SharedBuffer.attach(load.slots_fd, SlotArea.size_bytes(spec, hidden_size), torch.uint8)
        self._slots = SlotArea(spec, hidden_size, slots.tensor)
        link.send(
            control.ModelLoaded(
                device=device.name,
                bf16=uses_bf16(device, load.inner),
                compiled=stage.compiled,
                windows=0,
                corpus_digest=b"",
                corpus_truncated=False,
            )
        )

    def run(self) -> None:
        """Serve commands for ever; the listener ends the process."""
        while True:
            self._listen()
            if not len(self._queue):
                continue  # what came was a drop
            command = self._queue.pop()
            self._link.ticks += 1
            try:
                reply = self._serve(command)
            except StageRefused as refused:
                reply = Refusal(command.id, str(refused), refused.reason)
            self._link.send(reply)

    def _listen(self) -> None:
        """Move all that has come into the queue; wait only where there is nothing else to do."""
        wait = not len(self._queue)
        while True:
            try:
                command = self._link.commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            assert isinstance(command, StageCommand)
            if isinstance(command, DropMicroBatch):
                self._drop(command)
            else:
                self._queue.push(command)

    def _drop(self, command: DropMicroBatch) -> None:
        withdrawn = self._queue.withdraw(command.key)
        for waiting in withdrawn:
            message = f"micro-batch {command.key[0]!r} was dropped before its turn"
            self._link.send(Refusal(waiting.id, message, "cancelled"))
        held = self._stage.drop(command.key)
        self._link.send(DropDone(command.id, held or bool(withdrawn)))

    def _serve(self, command: StageCommand) -> StageReply:
        """Raises StageRefused."""
        stage = self._stage
        if isinstance(command, RunForward):
            return self._forward(command)
        if isinstance(command, RunBackward):
            return self._backward(command)
        if isinstance(command, TakeGradient):
            take = stage.take_gradient if command.forget else stage.read_gradient
            return TakeDone(command.id, take(self._delta))
        if isinstance(command, RunStep):
            gradient = self._delta if command.merged else None
            return MoveDone(command.id, stage.step(command.step, gradient, command.norm, command.epoch))
        if isinstance(command, ImportWeights):
            return MoveDone(command.id, stage.import_weights(self._outer, command.epoch, command.rebase))
        assert isinstance(command, ExportProduct)
        stage.export(self._delta, self._outer if command.product == "delta" else None, command.capture)
        stage.optimizer.save(self._inner_state)
        return ExportDone(command.id)

    def _forward(self, command: RunForward) -> MicroBatchDone:
        started = time.monotonic()
        spec, at = self._stage.spec, (command.slot, command.batch, command.length)
        x = self._slots.tokens(*at) if spec.is_first else self._slots.hidden(*at)
        targets = self._slots.targets(*at) if spec.is_last else None
        out = self._stage.forward(command.micro_batch, x, targets, command.keep)
        if not spec.is_last:
            self._slots.hidden(*at).copy_(out)
            return MicroBatchDone(command.id, time.monotonic() - started)
        losses = self._slots.losses(*at)
        losses.copy_(out)
        return MicroBatchDone(command.id, time.monotonic() - started, float(losses.mean()))

    def _backward(self, command: RunBackward) -> MicroBatchDone:
        started = time.monotonic()
        place = self._slots.hidden(command.slot, command.batch, command.length)
        gradient = self._stage.backward(command.micro_batch, None if self._stage.spec.is_last else place)
        if gradient is not None:
            place.copy_(gradient)
        return MicroBatchDone(command.id, time.monotonic() - started, counted=command.micro_batch.count)
