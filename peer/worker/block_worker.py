"""The "blocks" program of a worker: it serves sessions with a span of a model's blocks.

Its work comes and goes through two rings of records (`peer.ipc.block_messages`), which cost less than commands over the
control socket. The worker sleeps only while no session waits for a step.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from peer.bounds import smoothed
from peer.compute.device import resolve_device
from peer.errors import CheckpointError, ConfigError
from peer.footprint.parameters import EMBEDDING
from peer.footprint.stored import StoredTensor, stored_tensors
from peer.inference.blocks import SpanBlocks
from peer.inference.engine import Engine
from peer.inference.step_output import StepOutput, StepRefused
from peer.inference.wire_rows import TYPES, rows_from, rows_to
from peer.ipc.block_messages import (
    LOGPROB_MIN,
    REASON_MAX,
    SCORES_MAX,
    ComputeTokens,
    FromBlocks,
    LoadAdapter,
    LoadBlocks,
    MaskedToken,
    OpenSession,
    RewindSession,
    ScoredPrompt,
    SessionOpened,
    SetMask,
    SpanOutput,
    StepRefusal,
    ToBlocks,
    WireType,
    WorkerLoad,
    pack,
    row_bytes,
    unpack_to_worker,
)
from peer.ipc.messages import ModelLoaded, Stop
from peer.ipc.ring import Piece, Ring
from peer.loading import Loading
from peer.model.matrices import TensorSource
from peer.model.parameter_files import ParameterFiles
from peer.model.quantize import STORED_TYPES
from peer.worker.control_link import ControlLink

_REPORT_S: Final = 0.5
_FULL_S: Final = 0.001
_UNSENT_MAX: Final = 4096  # records
_SMOOTHING: Final = 0.1
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BlockWorker:
    """Loads once, then computes what comes through the ring, without end; the control link ends the process."""

    commands: ClassVar[Any] = Stop

    def __init__(self, link: ControlLink, load: LoadBlocks) -> None:
        self._link, self._load = link, load
        device = resolve_device(load.device)
        source = _counted(parameters_of(load), Loading(link.emit, "load", loaded_bytes(load)))
        blocks = SpanBlocks(load.model, load.span, source, device.torch, load.window, load.quantization)
        for each in load.adapters:
            blocks.add_adapter(each.adapter, _adapter_source(each))
        self._engine = Engine(blocks, load.pages, load.rows_max, load.chunk_tokens)
        self._incoming = Ring.attach(load.to_worker.fds, load.to_worker.size_bytes)
        self._outgoing = Ring.attach(load.from_worker.fds, load.from_worker.size_bytes)
        self._unsent: deque[tuple[Piece, ...]] = deque()  # what the ring has no room for yet, and what is new
        self._wires: dict[int, WireType] = {}  # of sessions that have chosen one
        self._step_ms = self._rows = 0.0
        self._reported: WorkerLoad | None = None
        self._reported_at = 0.0
        link.send(ModelLoaded(device=device.name, bf16=load.dtype == "bf16", compiled=False))

    def run(self) -> None:
        """Serve records without end."""
        while True:
            self._link.ticks += 1
            if self._flush():
                self._receive(wait=not self._engine.waiting_tokens)
                self._step()
                self._receive(wait=False)  # masks that came meanwhile: their tokens go with the others of the step
                self._report()
            else:  # no step before the network process has read what is there; but it may be waiting for room itself
                time.sleep(_FULL_S)
                if len(self._unsent) < _UNSENT_MAX:
                    self._receive(wait=False)

    # -- what comes ----------------------------------------------------------------------------------------------------

    def _receive(self, wait: bool) -> None:
        """Apply all records that have come. `wait`: for one, but not for long."""
        if wait:
            select.select([self._incoming.fds[1]], [], [], _REPORT_S)
        for record in self._incoming.take():
            message, payload = unpack_to_worker(record)
            try:
                self._apply(message, payload)
            except StepRefused as refused:
                have = self._engine.have(message.session)
                self._send(pack(StepRefusal(message.session, refused.cause, str(refused)[:REASON_MAX], have)))
            while self._engine.ended:
                ended = self._engine.ended.pop()
                self._wires.pop(ended, None)
                self._send(pack(StepRefusal(ended, "full", "another client needs the pages of this session")))
        self._incoming.done()

    def _apply(self, message: ToBlocks, payload: memoryview) -> None:
        """Do what a record says. Raises StepRefused."""
        engine = self._engine
        if isinstance(message, ComputeTokens):
            hidden = self._hidden(message, payload)
            engine.submit(message.session, message.position, message.ids, hidden, message.samples)
        elif isinstance(message, OpenSession):
            span = self._load.span
            first = span.first if message.first is None else message.first
            end = span.end if message.end is None else message.end
            have = engine.open(
                message.session,
                message.sampling,
                message.names,
                (first, end),
                message.client,
                message.prefix,
                adapter=message.adapter,
            )
            if message.wire is not None:
                self._wires[message.session] = message.wire
            self._send(pack(SessionOpened(message.session, have)))
        elif isinstance(message, SetMask):
            drawn = engine.set_mask(message.session, message.position, payload)
            if drawn is not None:
                self._send(*_record(drawn, None))
        elif isinstance(message, RewindSession):
            engine.rewind(message.session, message.position)
        else:
            engine.close(message.session)
            self._wires.pop(message.session, None)

    def _hidden(self, message: ComputeTokens, payload: memoryview) -> Tensor | None:
        """Return a copy of the hidden states (count, C) of a record; None if it has none. Raises StepRefused."""
        load, count, width = self._load, message.count, self._load.model.hidden_size
        wire = self._wires.get(message.session, load.dtype)
        if not count or count != len(message.ids):
            raise StepRefused("shape", f"{len(message.ids)} token ids came for {count} positions")
        if not payload:
            return None
        if len(payload) != count * row_bytes(width, wire):
            raise StepRefused(
                "shape", f"{len(payload)} bytes are no {width} values in {wire} for each of {count} positions"
            )
        return rows_from(payload, width, wire, TYPES[load.dtype])

    # -- what goes -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Make a step, if anything waits for one, and send what it gives."""
        started = time.perf_counter()
        outputs = self._engine.step()
        if not outputs:
            return
        self._link.ticks += 1
        records = [record for output in outputs for record in _records(output, self._wires.get(output.session))]
        if all(output.count == 1 for output in outputs):
            self._note(1000 * (time.perf_counter() - started), len(outputs))
        for record in records:
            self._send(*record)

    def _note(self, step_ms: float, rows: int) -> None:
        """Add a step to the smoothed figures."""
        self._rows = smoothed(self._rows or None, rows, _SMOOTHING)
        self._step_ms = smoothed(self._step_ms or None, step_ms, _SMOOTHING)

    def _report(self) -> None:
        """Report the load, if it has changed and was not just reported."""
        now = time.monotonic()
        if now - self._reported_at < _REPORT_S:
            return
        engine = self._engine
        load = WorkerLoad(
            pages_free=engine.pool.free_pages,
            sessions=engine.sessions,
            waiting_tokens=engine.waiting_tokens,
            step_ms=round(self._step_ms, 3),
            rows=round(self._rows, 2),
        )
        if load != self._reported:
            self._reported, self._reported_at = load, now
            self._send(pack(load))

    def _send(self, *record: Piece) -> None:
        """Let `run` write the record next: after the room of what it answers is given back, so that a client that has
        its answers may send again."""
        self._unsent.append(record)

    def _flush(self) -> bool:
        """Write what is unsent, as far as there is room; return whether all is written."""
        while self._unsent:
            if not self._outgoing.put(*self._unsent[0]):
                return False
            self._unsent.popleft()
        return True


def parameters_of(load: LoadBlocks) -> TensorSource:
    """Return where the parameters of a span come from, as copies in the type to compute in, quantized ones as they are
    stored. Raises ConfigError, at once if one is missing."""
    if load.span.of != load.model.layers:
        raise ConfigError(f"the span is {load.span} and the model has {load.model.layers} blocks: choose it again")
    stored, folders = {tensor.name: tensor for tensor in _needed(load)}, ", ".join(load.folders)
    try:
        files = ParameterFiles(map(Path, load.folders))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    for name in stored:
        if name not in files.names:
            raise ConfigError(
                f"no .safetensors file in {folders} holds {name}: name a folder with the files of blocks {load.span}"
            )

    def source(name: str) -> Tensor:
        try:
            tensor = files.tensor(name)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        wanted = stored[name]
        if tensor.shape != wanted.shape:
            raise ConfigError(
                f"{name} in {folders} has shape {tuple(tensor.shape)}, not {wanted.shape}: use the matching config.json"
            )
        dtype = STORED_TYPES[wanted.type]
        if tensor.dtype not in (_FLOATS if dtype in _FLOATS else (dtype,)):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(f"{name} in {folders} is of the type {kind}: take a checkpoint in fp32, bf16 or fp16")
        return tensor.to(dtype, copy=True)  # a mapped file may change, and lies at any address

    return source


def _adapter_source(load: LoadAdapter) -> TensorSource:
    """Return where the tensors of an adapter come from, as copies. Raises ConfigError if its file is missing."""
    try:
        files = ParameterFiles([Path(load.folder)])
    except CheckpointError as error:
        raise ConfigError(str(error)) from error

    def source(name: str) -> Tensor:
        try:
            return files.tensor(name).clone()
        except CheckpointError as error:
            raise ConfigError(str(error)) from error

    return source


def loaded_bytes(load: LoadBlocks) -> int:
    """Return the size of a span's parameters in the type to compute in."""
    return sum(tensor.size_bytes for tensor in _needed(load))


def _counted(source: TensorSource, loaded: Loading) -> TensorSource:
    """Return the source, which reports the bytes taken from it."""

    def counted(name: str) -> Tensor:
        tensor = source(name)
        loaded.add(tensor.nbytes)
        return tensor

    return counted


def _needed(load: LoadBlocks) -> Iterator[StoredTensor]:
    """Yield the tensors that a span cannot do without."""
    model, dtype = load.model, load.dtype
    yield from stored_tensors(model, load.span.blocks, dtype, load.quantization)
    if load.span.is_last and not load.span.is_first and model.tie_embeddings:
        yield from (tensor for tensor in stored_tensors(model, range(1), dtype, None) if tensor.name == EMBEDDING)


def _records(output: StepOutput, wire: WireType | None) -> Iterator[tuple[Piece, ...]]:
    """Yield the records of a step's output: the scores of its prompt, and itself."""
    for start in range(0, len(output.scores), SCORES_MAX):
        part = output.scores[start : start + SCORES_MAX]
        scores = tuple((max(LOGPROB_MIN, logprob), _bounded(likeliest)) for logprob, likeliest in part)
        yield (pack(ScoredPrompt(output.session, output.scored_from + start, scores)),)
    yield _record(output, wire)


def _bounded(likeliest: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    return tuple((token, max(LOGPROB_MIN, logprob)) for token, logprob in likeliest)


def _record(output: StepOutput, wire: WireType | None) -> tuple[Piece, ...]:
    """Return a record of an output. `wire`: the type that its session has chosen for the wire."""
    if output.refusal is not None:
        cause, reason = output.refusal.cause, str(output.refusal)[:REASON_MAX]
        return (pack(StepRefusal(output.session, cause, reason, output.refusal.have)),)
    head = pack(_told(output, wire))
    return (head,) if output.hidden is None else (head, rows_to(output.hidden, wire))


def _told(output: StepOutput, wire: WireType | None) -> FromBlocks:
    logprob, likeliest = max(LOGPROB_MIN, output.logprob), _bounded(output.likeliest)
    if not output.count and output.token is not None:
        return MaskedToken(output.session, output.position, output.token, logprob, likeliest)
    return SpanOutput(
        session=output.session,
        position=output.position,
        count=output.count,
        token=output.token,
        logprob=logprob,
        likeliest=likeliest,
        ids=tuple(output.ids),
        wire=wire,
    )
