"""The "stage" program of a worker: one stage of a pipeline.

Commands arrive while others run, so the device never waits for the network process between two micro-batches. Of
several ranks each computes its share of every command. None writes to a slot before all have read it: the sum that
checks whether a result is finite comes between.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch

from peer.checkpoint.inner_state import InnerStateFile, identity_of
from peer.compute.device import narrow_type, resolve_device
from peer.compute.stage import Stage
from peer.compute.stage_checks import check_size
from peer.errors import StageRefused
from peer.footprint.optimizer_state import saved_bytes
from peer.ipc.messages import MEETING, ModelLoaded
from peer.ipc.shared_memory import SharedBuffer
from peer.ipc.stage_messages import (
    DropMicroBatch,
    ExportProduct,
    ImportWeights,
    LoadStage,
    MicroBatchDone,
    RunBackward,
    RunForward,
    RunStep,
    StageCommand,
    TakeGradient,
)
from peer.ipc.stage_slots import SlotArea
from peer.ipc.stage_spec import Moved, Taken
from peer.model.frozen_weights import open_frozen
from peer.parallel.ranks import open_ranks
from peer.worker.control_link import ControlLink
from peer.worker.stage_queue import StageTurns


class StageWorker:
    """Loads once, then runs commands, backward first. It has no weights until a command to import them."""

    commands: ClassVar[Any] = StageCommand

    def __init__(self, link: ControlLink, load: LoadStage) -> None:
        spec = load.stage
        self._link = link
        device = resolve_device(load.compute.device_of(load.rank), load.compute.compile)
        self._group = ExitStack()  # never left: the end of the process ends it
        self._ranks = self._group.enter_context(open_ranks(load.layout, load.rank, device.torch, _meeting(load)))
        self._turns = StageTurns(link.commands, self._ranks)
        base = open_frozen(load.base, load.model, device.torch, spec.span.blocks)
        self._stage = stage = Stage(load.model, load.inner, device, spec, self._ranks, base)
        numel = stage.layout.numel
        self._outer = SharedBuffer.attach(load.vectors.outer, numel).tensor
        self._delta = SharedBuffer.attach(load.vectors.delta, numel).tensor
        self._saved = InnerStateFile(
            Path(load.directory),
            load.meeting,
            identity_of(load.run, load.model, spec.span, load.inner.optimizer),
            saved_bytes(load.inner.optimizer, stage.layout.shapes),
            load.rank,
            self._ranks.sum,
            link,
        )
        self._saved.load(stage.optimizer_state.load)
        self._model = load.model
        hidden_size = load.model.hidden_size
        slots = SharedBuffer.attach(load.slots_fd, SlotArea.size_bytes(spec, hidden_size), torch.uint8)
        self._slots = SlotArea(spec, hidden_size, slots.tensor)
        link.send(
            ModelLoaded(
                device=device.name,
                bf16=narrow_type(device, load.inner) == torch.bfloat16,
                fp16=stage.scaler is not None,
                compiled=stage.compiled,
                memory_bytes=device.memory_bytes,
            )
        )

    def run(self) -> None:
        """Serve commands without end; the control link ends the process."""
        while True:
            command, withdrawn = self._turns.next()
            self._link.ticks += 1
            if isinstance(command, DropMicroBatch):
                self._link.reply(command, self._stage.drop(command.key) or withdrawn)
                continue
            if withdrawn:
                assert isinstance(command, RunForward | RunBackward)
                message = f"micro-batch {command.micro_batch.id!r} was dropped before its turn"
                self._link.refuse(command, message, "cancelled")
                continue
            try:
                body = self._serve(command)
            except StageRefused as refused:
                self._link.refuse(command, str(refused), refused.reason)
            else:
                self._link.reply(command, body)
                if isinstance(command, ExportProduct):
                    self._saved.save_large(self._stage.optimizer_state.save)

    def _serve(self, command: StageCommand) -> MicroBatchDone | Taken | Moved | None:
        """Run one command and return its result. Raises StageRefused."""
        stage = self._stage
        if isinstance(command, RunForward):
            return self._forward(command)
        if isinstance(command, RunBackward):
            return self._backward(command)
        if isinstance(command, TakeGradient):
            take = stage.take_gradient if command.clear else stage.read_gradient
            return take(self._delta)
        if isinstance(command, RunStep):
            return stage.step(command.step)
        if isinstance(command, ImportWeights):
            return stage.import_weights(self._outer, command.epoch, command.rebase)
        assert isinstance(command, ExportProduct)
        stage.export(self._delta, self._outer if command.product == "delta" else None, command.capture)
        self._saved.save_small(stage.optimizer_state.save)
        return None

    def _forward(self, command: RunForward) -> MicroBatchDone:
        started = time.monotonic()
        spec, at = self._stage.spec, self._place(command)
        x = self._slots.tokens(*at) if spec.is_first else self._slots.hidden(*at)
        targets = self._slots.targets(*at) if spec.is_last else None
        out = self._stage.forward(command.micro_batch, x, targets, command.keep)
        if not spec.is_last:
            self._stage.share.rows(self._slots.hidden(*at)).copy_(out)
            return MicroBatchDone(time.monotonic() - started)
        losses = self._slots.losses(*at)
        self._stage.share.rows(losses).copy_(out)
        (total,) = self._ranks.sum((float(out.sum()),))
        return MicroBatchDone(time.monotonic() - started, total / losses.numel())

    def _backward(self, command: RunBackward) -> MicroBatchDone:
        started, before = time.monotonic(), self._stage.overflows
        region = self._slots.hidden(*self._place(command))
        gradient = self._stage.backward(command.micro_batch, None if self._stage.spec.is_last else region)
        if gradient is not None:
            self._stage.share.rows(region).copy_(gradient)
        overflows = self._stage.overflows - before
        return MicroBatchDone(time.monotonic() - started, counted=command.micro_batch.count, overflows=overflows)

    def _place(self, command: RunForward | RunBackward) -> tuple[int, int, int]:
        """Return slot, batch and length of a command. Raises StageRefused if they leave the slots."""
        spec = self._stage.spec
        if not 0 <= command.slot < spec.slots:
            raise StageRefused(f"there is no slot {command.slot}: choose one of {spec.slots}", "shape")
        check_size(spec, self._model, command.batch, command.length)
        return command.slot, command.batch, command.length


def _meeting(load: LoadStage) -> Path:
    """Return the file at which the ranks meet; the first one clears away those of earlier groups."""
    folder = Path(load.directory)
    if load.rank == 0:
        for old in folder.glob(f"{MEETING}*"):
            if old.name != load.meeting:
                old.unlink()
    return folder / load.meeting
