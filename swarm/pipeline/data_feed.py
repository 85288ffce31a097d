"""Token ids from feeders: machines that have text and no accelerator. A stage-0 replica asks them first, and reads its
own corpus where none answers.

A feeder's data cannot be checked without the text, except that ids lie in the vocabulary. A feeder that sends other ids
is penalized and not asked again.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Final

import trio
from torch import Tensor

from peer.catalogue.stages import TextFed
from peer.errors import NetworkError, ProtocolViolation
from peer.events import EventLog
from peer.net.backoff import Backoff
from peer.net.host import Host
from peer.net.method import Call, Empty
from peer.net.rpc import Rpc
from swarm.pipeline.config import PipelineSettings
from swarm.pipeline.messages import (
    TOKEN_BYTES,
    AskTokens,
    decode_tokens,
    encode_tokens,
    feed_samples_max,
    tokens_method,
)
from swarm.protocol.ledger import Range

FEED_S: Final = 5.0
COOLDOWN_S: Final = 10.0  # for which a feeder that failed is not asked
PROGRESS_S: Final = 2.5
ASKERS_MAX: Final = 256

ReadTokens = Callable[[Sequence[Range]], Awaitable[Tensor]]
"""Reads the samples of these ranges from the local corpus, (n, T + 1) int64, once they are here."""


class FeederStats:
    """Counts what a feeder has read for others. Event `text_fed`: how many micro-batches, and for which peers; sent at
    the start, with each new peer, and every `PROGRESS_S` at most."""

    def __init__(self, settings: PipelineSettings, events: EventLog) -> None:
        self._micro_batch, self._events = settings.micro_batch, events
        self._samples = 0
        self._askers: dict[str, None] = {}  # in the order in which they came
        self._told_at = -math.inf
        self.tell()

    def note(self, peer: str, samples: int) -> None:
        """Count samples that were read for `peer`."""
        self._samples += samples
        is_new = peer not in self._askers and len(self._askers) < ASKERS_MAX
        if is_new:
            self._askers[peer] = None
        if is_new or trio.current_time() - self._told_at >= PROGRESS_S:
            self.tell()

    def tell(self) -> None:
        """Send the event now."""
        self._told_at = trio.current_time()
        self._events.emit(TextFed(micro_batches=self._samples // self._micro_batch, peers=tuple(self._askers)))


def serve_tokens(
    rpc: Rpc,
    settings: PipelineSettings,
    read: ReadTokens,
    note: Callable[[str, int], None] = lambda peer, samples: None,
) -> None:
    """Register the handler of TOKENS, which reads with `read`. `note(peer, samples)` is called for each answer."""
    most = feed_samples_max(settings)

    async def on_tokens(call: Call[AskTokens]) -> tuple[Empty, memoryview]:
        sizes = [last - first for first, last in call.body.ranges]
        samples = sum(sizes)
        if call.body.run_id != settings.run_id or min(sizes, default=0) <= 0 or samples > most:
            raise ProtocolViolation(f"{samples} samples at once: ask for 1 to {most} of this run")
        tokens = await read(call.body.ranges)
        note(call.peer, samples)
        return Empty(), encode_tokens(tokens)

    rpc.register(tokens_method(settings), on_tokens)


class RemoteTokens:
    """Reads tokens for a `MicroBatchSource`. Asks the `feeders()` in rotation; `local` serves where one fails."""

    def __init__(
        self, host: Host, settings: PipelineSettings, feeders: Callable[[], Sequence[str]], local: ReadTokens
    ) -> None:
        self._host, self._settings, self._feeders, self._local = host, settings, feeders, local
        self._method = tokens_method(settings)
        self._numbers = count()
        self._cooling = Backoff(COOLDOWN_S, COOLDOWN_S, factor=1)
        self._refused: set[str] = set()

    async def __call__(self, ranges: Sequence[Range]) -> Tensor:
        """Return (n, T + 1) int64, in the order of `ranges`."""
        feeder = self._next()
        if feeder is not None:
            tokens = await self._ask(feeder, ranges)
            if tokens is not None:
                return tokens
        return await self._local(ranges)

    def _next(self) -> str | None:
        fit = [
            peer
            for peer in sorted(self._feeders())
            if peer not in self._refused and not self._cooling.paused(peer) and peer != self._host.peer_id
        ]
        return fit[next(self._numbers) % len(fit)] if fit else None

    async def _ask(self, feeder: str, ranges: Sequence[Range]) -> Tensor | None:
        request = AskTokens(self._settings.run_id, tuple(ranges))
        try:
            reply = await self._host.rpc.call(feeder, self._method, request, timeout_s=FEED_S)
        except (NetworkError, ProtocolViolation):
            self._cooling.failed(feeder)
            return None
        samples, width = sum(last - first for first, last in ranges), self._settings.seq_len + 1
        try:
            if len(reply.payload) != TOKEN_BYTES * samples * width:
                raise ProtocolViolation(f"{len(reply.payload)} bytes")
            return decode_tokens(reply.payload, self._settings, width - 1)
        except ProtocolViolation as problem:
            self._host.rpc.server.penalize(feeder, f"{self._method.name}: {problem} for {samples} samples")
            self._refused.add(feeder)
            return None
