"""The engine of one span: sessions, continuous batches, chunked prompts.

A step takes the waiting tokens: one token of each session that generates, up to a number of rows, then a chunk of one
session's prompt, up to a number of tokens. Nothing waits for a batch to fill, and no prompt holds up a session that
generates for longer than a chunk. Address prefixes take turns, and so do the clients of each, and their sessions: one
user may have many keys. A step serves sessions that use the same blocks.

A prefix, and of one prefix a client, may have all pages while no other one needs them. Then sessions of the one that
holds more than its share end, the one first that has rested longest; its last one only once it rests for a while.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from peer.inference.blocks import Segment, SpanBlocks
from peer.inference.cache import CacheFull, CachePool, CacheShape, pages_of
from peer.inference.engine_session import LATELY_STEPS, EngineSession, WaitingTokens
from peer.inference.masked_draws import MaskedDraws, mask_of
from peer.inference.prompt_scorer import PromptScorer, Score
from peer.inference.sampling import sample, top_logprobs
from peer.inference.step_output import StepOutput, StepRefused
from peer.inference.turns import ClientTurns, Owner
from peer.ipc.block_messages import CHUNK_TOKENS, ROWS_MAX
from peer.ipc.sampling_options import Sampling
from peer.ipc.span import Span

REST_S: Final = 10.0
"""A client's last session may end for another client once it has rested this long."""


_Turn = tuple[int, EngineSession, WaitingTokens]
_Key = tuple[str, ...]
"""A prefix, or a prefix and a client of it."""
_Ready = tuple[int, EngineSession]


def _client_of(ready: _Ready) -> Owner:
    return ready[1].client


class Engine:
    """Serves sessions with the blocks of one span."""

    def __init__(
        self,
        blocks: SpanBlocks,
        pages: int,
        rows_max: int = ROWS_MAX,
        chunk_tokens: int = CHUNK_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pages`: of all caches together. `chunk_tokens`: of a prompt in one step."""
        config, span = blocks.config, blocks.span
        self.blocks = blocks
        shape = CacheShape(
            span.count, config.kv_heads, config.head_size, blocks.dtype, blocks.device, config.max_seq_len
        )
        self.pool = CachePool(shape, pages)
        self.keeps_logits = False
        """Whether outputs bring logits."""
        self.rows_max = rows_max
        """Sessions that generate in one step, at most."""
        self.ended = list[int]()
        """Sessions that have ended because another client needed their pages; the caller takes them out."""
        self._chunk_tokens, self._clock = chunk_tokens, clock
        self._rows_turns, self._prompt_turns = ClientTurns(_client_of), ClientTurns(_client_of)
        self._steps = 0
        self._sessions: OrderedDict[int, EngineSession] = OrderedDict()  # in the order of their turns

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait for their turn."""
        return sum(len(tokens.ids) for session in self._sessions.values() for tokens in session.waiting)

    def have(self, id: int) -> int:
        """Return how many positions of a session are here, waiting ones included."""
        return self._sessions[id].expected if id in self._sessions else 0

    def open(
        self,
        id: int,
        sampling: Sampling,
        names: Sequence[bytes] = (),
        blocks: tuple[int, int] | None = None,
        client: str = "",
        prefix: str = "",
        adapter: int | None = None,
    ) -> int:
        """Begin a session of a client, seen at an address prefix; it uses `blocks` (first, end) of the span, None for
        all, with the `adapter` of that number. Return how many positions it holds already, from one of that client that
        began alike (`names`, as `CachePool.open`). Raises StepRefused."""
        span = self.blocks.span
        first, end = blocks or (span.first, span.end)
        if id in self._sessions:
            raise StepRefused("value", f"session {id} is open already", self.have(id))
        if not span.first <= first < end <= span.end:
            raise StepRefused("value", f"blocks [{first}, {end}) are not in {span}")
        if adapter is not None and adapter >= self.blocks.adapters:
            raise StepRefused("value", f"there is no adapter {adapter} here, but {self.blocks.adapters}")
        if sampling.largest_bias >= self.blocks.config.vocab_size:
            raise StepRefused("value", f"logit_bias has token {sampling.largest_bias}, beyond the vocabulary")
        scorer = None
        if sampling.prompt_logprobs:
            names = ()  # every position is to be computed
            scorer = PromptScorer(sampling.counted_from, sampling.logprobs, self.blocks.config.vocab_size)
        owner = (client, first, end, adapter)
        while True:
            try:
                cache = self.pool.open(names, owner)
                break
            except CacheFull as error:
                if not self._end_for((prefix, client), 1):
                    raise StepRefused("full", str(error)) from error
        self._sessions[id] = EngineSession(
            part=Span(first, end, span.of),
            cache=cache,
            sampling=sampling,
            names=tuple(names),
            owner=owner,
            client=(prefix, client),
            used_at=self._clock(),
            adapter=adapter,
            masked=MaskedDraws() if sampling.masked else None,
            scorer=scorer,
        )
        return cache.length

    def close(self, id: int) -> None:
        """End a session; one that is not open is ended already."""
        session = self._sessions.pop(id, None)
        if session is None:
            return
        self.pool.close(session.cache, session.names, session.owner)
        clients = {other.client for other in self._sessions.values()}
        if session.client not in clients:
            self._rows_turns.keep(clients)
            self._prompt_turns.keep(clients)

    def _end_for(self, client: Owner, pages: int) -> bool:
        """End a session of a prefix, else of a client of the same one, that holds more than its share of the pages, for
        a client that needs `pages` more and stays within its own. Return whether there was one."""
        prefixes = Counter[_Key]({client[:1]: 0})
        clients = Counter[_Key]({client: 0})
        for session in self._sessions.values():
            prefixes[session.client[:1]] += session.cache.pages
            if session.client[:1] == client[:1]:
                clients[session.client] += session.cache.pages
        part = self.pool.pages // len(prefixes)
        return self._end_of(prefixes, client[:1], pages, part) or self._end_of(
            clients, client, pages, part // len(clients)
        )

    def _end_of(self, held: Counter[_Key], mine: _Key, pages: int, share: int) -> bool:
        """The same among those that hold this many pages, and have the same share."""
        greedy = max(held, key=lambda name: held[name])
        if held[mine] + pages > share or held[greedy] <= share:
            return False
        sessions = self._sessions.items()
        theirs = [(bool(s.waiting), s.used_at, id) for id, s in sessions if s.client[: len(greedy)] == greedy]
        waits, used_at, rested = min(theirs)
        if len(theirs) == 1 and (waits or self._clock() - used_at < REST_S):
            return False
        self.close(rested)
        self.ended.append(rested)
        return True

    def rewind(self, id: int, position: int) -> None:
        """Forget a session's positions from this one on. Raises StepRefused."""
        session = self._session(id)
        if not 0 <= position <= session.expected:
            raise StepRefused("gap", f"session {id} has {session.expected} positions", session.expected)
        session.cut(position)

    def submit(self, id: int, position: int, ids: Sequence[int], hidden: Tensor | None, samples: bool) -> None:
        """Add a session's next tokens, and unless it uses the first block, their hidden states (count, C). Tokens that
        it already has are dropped. Raises StepRefused; the session is then as before."""
        session = self._session(id)
        tokens = WaitingTokens(position, ids, hidden, samples)
        self._check(session, tokens)
        tokens = tokens.behind(session.expected - position)
        if not tokens.ids:
            return
        end = tokens.position + len(tokens.ids)
        if end > self.blocks.config.max_seq_len:
            raise StepRefused(
                "shape", f"{end} tokens exceed the context of {self.blocks.config.max_seq_len}", session.expected
            )
        while True:
            try:
                self.pool.grow(session.cache, end)
                break
            except CacheFull as error:
                if not self._end_for(session.client, pages_of(end) - session.cache.pages):
                    raise StepRefused("full", str(error), session.expected) from error
        session.used_at = self._clock()
        session.waiting.append(tokens)
        session.cache.ids += tokens.ids

    def set_mask(self, id: int, position: int, bits: bytes | memoryview) -> StepOutput | None:
        """Take the tokens that may be drawn at a position, a bit each. Return an output without ids if the token was
        waited for. Raises StepRefused."""
        session = self._session(id)
        if session.masked is None or not session.part.is_last:
            raise StepRefused("value", f"session {id} draws no tokens under masks", session.expected)
        try:
            mask = mask_of(bits, self.blocks.config.vocab_size, self.blocks.device)
        except ValueError as error:
            raise StepRefused("value", str(error), session.expected) from error
        logits = session.masked.give(position, mask)
        return None if logits is None else self._draw(id, session, position, (), position, logits)

    def _session(self, id: int) -> EngineSession:
        if id not in self._sessions:
            raise StepRefused("unknown", f"session {id} is not open here")
        return self._sessions[id]

    def _check(self, session: EngineSession, tokens: WaitingTokens) -> None:
        """Raise StepRefused for tokens that cannot come next."""
        config, have, ids, hidden = self.blocks.config, session.expected, tokens.ids, tokens.hidden
        if not 0 <= tokens.position <= have:
            raise StepRefused("gap", f"position {tokens.position} does not follow {have}", have)
        if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise StepRefused("value", f"token ids lie in [0, {config.vocab_size})", have)
        if session.part.is_first:
            if hidden is not None:
                raise StepRefused("shape", "the first block takes token ids without hidden states", have)
            return
        if hidden is None or hidden.shape != (len(ids), config.hidden_size) or hidden.dtype != self.blocks.dtype:
            kind = str(self.blocks.dtype).removeprefix("torch.")
            raise StepRefused("shape", f"a token has a hidden state of {config.hidden_size} {kind} values", have)
        if not bool(torch.isfinite(hidden).all()):
            raise StepRefused("not_finite", "a hidden state has values that are not finite", have)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Compute one batch of what waits, and return what it gives. Empty if nothing waits."""
        plan = self._plan()
        if not plan:
            return []
        segments = [
            Segment(session.cache, tokens.position, len(tokens.ids), session.adapter) for _, session, tokens in plan
        ]
        part = plan[0][1].part
        hidden = self.blocks.forward(self._input(plan, part), segments, part)
        if not part.is_last:
            hidden = hidden.cpu()
        finite = bool(torch.isfinite(hidden).all())
        rows, start = list[Tensor](), 0
        for segment in segments:
            rows.append(hidden[start : start + segment.count])
            start += segment.count
            segment.cache.length = segment.position + segment.count
        logits = self._logits(plan, rows, part)
        return [
            self._output(*turn, found, finite or bool(torch.isfinite(found).all()), logits.get(turn[0]))
            for turn, found in zip(plan, rows, strict=True)
        ]

    def _logits(self, plan: Sequence[_Turn], rows: Sequence[Tensor], part: Span) -> dict[int, Tensor]:
        """Return the logits (V,) after the last token of each session that draws one, by session: the head is read once
        for all."""
        if not part.is_last:
            return {}
        drawing = [(turn[0], found[-1:]) for turn, found in zip(plan, rows, strict=True) if turn[2].samples]
        if not drawing:
            return {}
        logits = self.blocks.logits(torch.cat([last for _, last in drawing]))
        return {id: logits[number] for number, (id, _) in enumerate(drawing)}

    def _plan(self) -> list[_Turn]:
        """Take what comes next: of those that generate, then a part of one prompt. After its turn, a client or session
        goes to the end: a client before its sessions."""
        ready = [(id, session) for id, session in self._sessions.items() if session.waiting]
        if not ready:
            return []
        _, leader = self._rows_turns.ordered(ready)[0]
        ready = [(id, session) for id, session in ready if session.part == leader.part]
        short = self._rows_turns.ordered([turn for turn in ready if len(turn[1].waiting[0].ids) == 1])
        short = short[: self._rows(leader)]
        long = self._prompt_turns.ordered([turn for turn in ready if len(turn[1].waiting[0].ids) > 1])[:1]
        self._rows_turns.had(short)
        self._prompt_turns.had(long)
        plan = [(id, session, session.waiting.popleft()) for id, session in short]
        for id, session in long:
            tokens = session.waiting.popleft()
            if len(tokens.ids) > self._chunk_tokens:
                session.waiting.appendleft(tokens.behind(self._chunk_tokens))
                tokens = tokens.before(self._chunk_tokens)
            plan.append((id, session, tokens))
        self._steps += 1
        now = self._clock()
        for id, session, _ in plan:
            session.turned_at, session.used_at = self._steps, now
            self._sessions.move_to_end(id)
        return plan

    def _rows(self, session: EngineSession) -> int:
        """Return how many sessions that generate may take part in a step: this span's share of those that did recently.
        If one step took all of them, the servers of the other spans would wait meanwhile."""
        lately = self._steps - LATELY_STEPS
        busy = sum(bool(other.waiting) or other.turned_at > lately for other in self._sessions.values())
        return min(self.rows_max, max(1, -(-busy * session.part.count // session.part.of)))

    def _input(self, plan: Sequence[_Turn], part: Span) -> Tensor:
        """Return what goes into the blocks: ids (N,), or hidden states (N, C)."""
        if part.is_first:
            ids = [id for _, _, tokens in plan for id in tokens.ids]
            return torch.tensor(ids, device=self.blocks.device)
        return torch.cat([tokens.hidden for _, _, tokens in plan if tokens.hidden is not None]).to(self.blocks.device)

    def _output(
        self, id: int, session: EngineSession, tokens: WaitingTokens, rows: Tensor, finite: bool, logits: Tensor | None
    ) -> StepOutput:
        position, ids = tokens.position, tokens.ids
        end = position + len(ids)
        if not finite or (logits is not None and not bool(torch.isfinite(logits.max()))):
            return self._broken(id, session, tokens)
        if not session.part.is_last:
            return StepOutput(id, position, ids, rows)
        scored_from, scores = 0, list[Score]()
        if session.scorer is not None:
            try:
                scored_from, scores = session.scorer.take(position, rows, session.cache.ids, self.blocks.logits)
            except ValueError:
                return self._broken(id, session, tokens)
        output = StepOutput(id, position, ids, scored_from=scored_from, scores=scores)
        if logits is None:
            return output
        if session.masked is not None and session.masked.mask(end) is None:
            session.masked.hold(end, logits)
            return output
        drawn = self._draw(id, session, position, ids, end, logits)
        return replace(drawn, scored_from=scored_from, scores=scores) if scores else drawn

    def _draw(
        self, id: int, session: EngineSession, position: int, ids: Sequence[int], end: int, logits: Tensor
    ) -> StepOutput:
        """Draw the token at `end`. The log-probabilities are those of the model: before any mask, bias or filter."""
        sampling = session.sampling
        seen = session.cache.ids[:end] if sampling.looks_back else ()
        token = sample(logits, sampling, end, seen, None if session.masked is None else session.masked.mask(end))
        logprob, likeliest = 0.0, list[tuple[int, float]]()
        if sampling.logprobs:
            logprob, likeliest = top_logprobs(logits, token, sampling.logprobs)
        kept = logits if self.keeps_logits else None
        return StepOutput(id, position, ids, None, token, logprob, likeliest, kept)

    def _broken(self, id: int, session: EngineSession, tokens: WaitingTokens) -> StepOutput:
        """Take tokens back whose output is not finite: finite numbers can be too large to compute with."""
        session.cut(tokens.position)
        message = f"the output at position {tokens.position} is not finite"
        refusal = StepRefused("not_finite", message, tokens.position)
        return StepOutput(id, tokens.position, tokens.ids, refusal=refusal)
