"""A compute worker: the child process that owns a device and runs forward, backward and inner steps.

Started by `peer.worker.client` as `python -m peer.worker.main CONTROL_FD PARENT_PID`. The main thread computes; a
second one listens on the control socket, so that a stop is heard during a step and the end of the parent ends this
process at once. Nothing here catches an error: a worker that fails dies with its traceback in worker.log, and the
parent starts another.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec
import torch

from peer.compute.device import resolve_device, uses_bf16
from peer.compute.inner_optimizer import InnerSpec, state_bytes
from peer.compute.mixing import mix_into
from peer.compute.train_loop import InnerRun, InnerTrainer, StepOutcome, run_inner
from peer.data.corpus import load_corpus, sample_numbers
from peer.data.tokenizer import load_tokenizer
from peer.errors import ConfigError
from peer.ipc import messages as control
from peer.ipc.inner_orders import InnerRunOptions, Span
from peer.ipc.shared_memory import SharedBuffer
from peer.model.generate import generate
from peer.model.layout import FlatLayout
from peer.worker.control_link import ControlLink
from peer.worker.stage_worker import StageWorker

_PROGRESS_S = 0.5
_PR_SET_PDEATHSIG = 1
_NICE = 10


class Worker:
    """Loads once, then runs commands one after the other."""

    def __init__(self, link: ControlLink, load: control.LoadModel) -> None:
        self._link = link
        self._load = load
        layout = FlatLayout.of(load.model)
        kept = state_bytes(InnerSpec.of(load.inner), layout)
        self._outer = SharedBuffer.attach(load.outer_fd, layout.numel).tensor
        self._delta = SharedBuffer.attach(load.delta_fd, layout.numel).tensor
        self._inner_state = SharedBuffer.attach(load.inner_state_fd, kept, torch.uint8).tensor
        self._tokenizer = load_tokenizer(load.tokenizer)
        if self._tokenizer.vocab_size > load.model.vocab_size:
            raise ConfigError(
                f"the tokenizer has {self._tokenizer.vocab_size} ids and the model only {load.model.vocab_size}: "
                "raise model.vocab_size or choose another tokenizer"
            )
        if load.data.seq_len > load.model.max_seq_len:
            raise ConfigError(
                f"data.seq_len ({load.data.seq_len}) exceeds model.max_seq_len ({load.model.max_seq_len}): lower it"
            )
        device = resolve_device(load.device)
        self._corpus = load_corpus(load.data, self._tokenizer, Path(load.directory))
        self._trainer = InnerTrainer(load.model, load.inner, device, load.micro_batch_size)
        self._trainer.optimizer.load(self._inner_state)
        self._has_local = False  # whether trainer.local holds anything to go on from
        self._idle_s = 0.0  # without a command, since the last inner run
        link.send(
            control.ModelLoaded(
                device=device.name,
                bf16=uses_bf16(device, load.inner),
                compiled=self._trainer.compiled,
                windows=self._corpus.windows,
                corpus_digest=self._corpus.digest,
                corpus_truncated=self._corpus.truncated,
            )
        )

    def run(self) -> None:
        """Serve commands for ever; the listener ends the process."""
        while True:
            waits_since = time.monotonic()
            command = self._link.commands.get()
            self._idle_s += time.monotonic() - waits_since
            self._tick()
            self._link.forget_stops(command.id)
            if isinstance(command, control.RunInner):
                self._link.send(control.InnerDone(command.id, self._inner(command)))
            elif isinstance(command, control.RunEvaluate):
                self._link.send(control.Evaluated(command.id, self._evaluate(command)))
            else:
                assert isinstance(command, control.RunSample)
                self._link.send(control.Sampled(command.id, self._sample(command)))

    def _inner(self, command: control.RunInner) -> control.InnerResult:
        orders = command.orders
        self._begin(orders)
        reported_at, reported_tokens = time.monotonic(), 0

        def on_step(step: int, outcome: StepOutcome, so_far: control.InnerResult) -> None:
            nonlocal reported_at, reported_tokens
            self._tick()
            now = time.monotonic()
            if now - reported_at >= _PROGRESS_S:
                rate = (so_far.tokens - reported_tokens) / (now - reported_at)
                self._link.send(self._trainer.progress(step, outcome, rate, so_far.skipped))
                reported_at, reported_tokens = now, so_far.tokens

        run = InnerRun(
            numbers=sample_numbers(command.ranges),
            first_step=command.first_step,
            deadline_s=command.deadline_s,
            steps=command.steps,
            stopped=lambda steps: self._link.is_stopped(command.id, steps),
            product=orders.product,
            on_step=on_step,
        )
        result = run_inner(self._trainer, lambda numbers: self._corpus.batch(numbers, self._load.seed), run)
        self._capture(orders)
        if orders.product == "delta":
            self._trainer.optimizer.save(self._inner_state)
        idle_s, self._idle_s = self._idle_s, 0.0
        return msgspec.structs.replace(result, idle_s=idle_s)

    def _begin(self, orders: InnerRunOptions) -> None:
        """The local weights before the first step. Reads the outer weights only where it must: while a tail runs, the
        network process may write them."""
        local = self._trainer.local
        if orders.begin == "outer" or not self._has_local:
            local.copy_(self._outer)
            self._has_local = True
            return
        for start, stop in orders.mix:
            mix_into(local[start:stop], self._outer[start:stop], orders.alpha)

    def _capture(self, orders: InnerRunOptions) -> None:
        """Write the product at the wanted spans to the beginning of delta."""
        everything: tuple[Span, ...] = ((0, len(self._delta)),)
        at = 0
        for start, stop in everything if orders.capture is None else orders.capture:
            out = self._delta[at : at + stop - start]
            if orders.product == "delta":
                torch.sub(self._outer[start:stop], self._trainer.local[start:stop].cpu(), out=out)
            else:
                self._trainer.mean_gradient(slice(start, stop), out)
            at += stop - start

    def _evaluate(self, command: control.RunEvaluate) -> float:
        batches = self._corpus.held_out_batches(self._load.inner.batch_size, command.max_batches)
        with self._trainer.holding(self._outer):
            return self._trainer.evaluate(batches, self._tick) / self._corpus.bytes_per_token

    def _sample(self, command: control.RunSample) -> str:
        prompt = self._tokenizer.encode(command.prompt or "\n")
        with self._trainer.holding(self._outer):
            ids = generate(
                self._trainer.model,
                prompt,
                vocab_size=self._tokenizer.vocab_size,
                max_new_tokens=command.max_new_tokens,
                temperature=command.temperature,
                seed=command.seed,
                on_token=self._tick,
            )
        return self._tokenizer.decode(ids)

    def _tick(self) -> None:
        self._link.ticks += 1


def _follow_parent(parent_pid: int) -> None:
    """Have the kernel kill this process with its parent; where it cannot, the end of the control socket does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(0)


def _yield_to_others() -> None:
    """The network process must stay quick, and where memory runs out it is the worker that should go."""
    os.nice(_NICE)
    if sys.platform == "linux":
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")


def main() -> None:
    control_fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    _follow_parent(parent_pid)
    _yield_to_others()
    link = ControlLink(socket.socket(fileno=control_fd))
    load = link.receive_load()
    threading.Thread(target=link.listen, name="control", daemon=True).start()
    try:
        if load.stage is None:
            worker: Worker | StageWorker = Worker(link, load)
        else:
            worker = StageWorker(link, load)
    except ConfigError as error:
        link.send(control.Rejected(str(error)))
        return
    worker.run()


if __name__ == "__main__":
    main()
