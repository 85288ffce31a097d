"""Token ids from feeders: machines that have text and no accelerator. Whoever issues micro-batches asks them first and
reads its own corpus where none answers.

What a feeder sends cannot be checked against the text without having it; that ids lie in the vocabulary can, and a
feeder that breaks it is struck and asked no more.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Final

import numpy as np
import torch
import trio
from torch import Tensor

from peer.errors import NetworkError, ProtocolViolation
from peer.events import EventLog
from peer.net.host import Host
from peer.net.method import Call
from peer.net.rpc import Rpc
from swarm.pipeline.config import PipelineSettings
from swarm.pipeline.messages import TOKEN_BYTES, AskTokens, PipelineCalls, feed_samples_max
from swarm.protocol.ledger import Range
from swarm.protocol.messages import Done

FEED_S: Final = 5.0
SULK_S: Final = 10.0  # a feeder that failed is not asked for so long
PROGRESS_S: Final = 2.5
ASKERS_MAX: Final = 256

ReadTokens = Callable[[Sequence[Range]], Tensor]
"""The samples of these ranges from the local corpus, (n, T + 1) int64. Called in a thread."""
TokenSource = Callable[[Sequence[Range]], Awaitable[Tensor]]


class FeederStats:
    """What a feeder has read for others. Event `text_fed`: how many micro-batches, and for which peers; at once, with
    each new peer, and now and then."""

    def __init__(self, rules: PipelineSettings, events: EventLog) -> None:
        self._micro_batch, self._events = rules.micro_batch, events
        self._samples = 0
        self._askers: dict[str, None] = {}  # in the order in which they came
        self._told_at = -math.inf
        self.tell()

    def note(self, peer: str, samples: int) -> None:
        """So many were read for that peer."""
        self._samples += samples
        is_new = peer not in self._askers and len(self._askers) < ASKERS_MAX
        if is_new:
            self._askers[peer] = None
        if is_new or trio.current_time() - self._told_at >= PROGRESS_S:
            self.tell()

    def tell(self) -> None:
        """Say it now."""
        self._told_at = trio.current_time()
        self._events.emit("text_fed", micro_batches=self._samples // self._micro_batch, peers=list(self._askers))


def serve_tokens(
    rpc: Rpc,
    rules: PipelineSettings,
    read: ReadTokens,
    note: Callable[[str, int], None] = lambda peer, samples: None,
) -> None:
    """Answer TOKENS from `read`, from now on; `note` hears for which peer, and how many samples."""

    most = feed_samples_max(rules)

    async def on_tokens(call: Call[AskTokens]) -> tuple[Done, memoryview]:
        sizes = [last - first for first, last in call.body.spans]
        samples = sum(sizes)
        if call.body.run_id != rules.run_id or min(sizes, default=0) <= 0 or samples > most:
            raise ProtocolViolation(f"{samples} samples at once: ask for 1 to {most} of this run")
        tokens = await trio.to_thread.run_sync(read, call.body.spans)
        note(call.peer, samples)
        return Done(), tokens.numpy().astype("<u4").data

    rpc.register(PipelineCalls.of(rules).tokens, on_tokens)


class RemoteTokens:
    """A TokenSource: each call goes to the next of `feeders()` in turn; `local` serves where that one fails."""

    def __init__(
        self, host: Host, rules: PipelineSettings, feeders: Callable[[], Sequence[str]], local: ReadTokens
    ) -> None:
        self._host, self._rules, self._feeders, self._local = host, rules, feeders, local
        self._method = PipelineCalls.of(rules).tokens
        self._turn = count()
        self._sulking: dict[str, float] = {}  # until when
        self._struck: set[str] = set()

    async def __call__(self, spans: Sequence[Range]) -> Tensor:
        """(n, T + 1) int64, in the order of `spans`."""
        feeder = self._next()
        if feeder is not None:
            tokens = await self._ask(feeder, spans)
            if tokens is not None:
                return tokens
        return await trio.to_thread.run_sync(self._local, spans)

    def _next(self) -> str | None:
        now = trio.current_time()
        fit = [
            peer
            for peer in sorted(self._feeders())
            if peer not in self._struck and self._sulking.get(peer, 0.0) <= now and peer != self._host.peer_id
        ]
        return fit[next(self._turn) % len(fit)] if fit else None

    async def _ask(self, feeder: str, spans: Sequence[Range]) -> Tensor | None:
        request = AskTokens(self._rules.run_id, tuple(spans))
        try:
            reply = await self._host.rpc.call(feeder, self._method, request, timeout_s=FEED_S)
        except (NetworkError, ProtocolViolation):
            self._sulking[feeder] = trio.current_time() + SULK_S
            return None
        samples, width = sum(last - first for first, last in spans), self._rules.seq_len + 1
        wrong = len(reply.payload) != TOKEN_BYTES * samples * width
        ids = np.empty(0, np.uint32) if wrong else np.frombuffer(reply.payload, "<u4")
        if wrong or int(ids.max()) >= self._rules.vocab_size:
            problem = f"{len(reply.payload)} bytes" if wrong else f"id {ids.max()}"
            self._host.rpc.server.strike(feeder, f"{self._method.name}: {problem} for {samples} samples")
            self._struck.add(feeder)
            return None
        return torch.from_numpy(ids.reshape(samples, width).astype(np.int64))
