"""All answers to one request, generated at once, each in a session of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import msgspec
import trio

from peer.errors import BarnraiseError
from peer.ipc.sampling_options import SEED_MAX
from swarm.gateway.answer import AnswerPart, TextAnswer, end_session, prompt_then_answer
from swarm.gateway.asks import CHAT_TOKENS, GenerationAsk, Prompt
from swarm.gateway.errors import ApiError, as_api_error
from swarm.gateway.forced_calls import ForcedCalls, forced_calls, with_calls
from swarm.gateway.reading.call_formats import CallFormat
from swarm.gateway.reading.thinking import ThinkingFormat, ThoughtStream
from swarm.gateway.reading.tool_calls import CallStream
from swarm.gateway.template import ChatTemplate
from swarm.inference.client import ModelClient
from swarm.inference.route import Route

SESSIONS_MAX: Final = 48
"""Sessions of this process at once: a server takes 64 of one client."""
_CHARS_PER_TOKEN: Final = 64
"""A text with more characters for each token of the context does not fit, whatever its tokens are."""

Told = tuple[int, AnswerPart] | ApiError


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as tokens, and how many may follow."""

    ids: tuple[int, ...]
    count: int
    text: str = ""
    """Where it is echoed, the prompt as text."""


@dataclass(frozen=True)
class Usage:
    """Tokens of one request."""

    prompt: int
    drawn: int
    thought: int
    """How many of the drawn ones were thinking."""


@dataclass(frozen=True)
class AnswerForm:
    """The form of the answers, as far as a model's template shows it."""

    calls: CallFormat | None = None
    """None for no calls."""
    forced: ForcedCalls | None = None
    """What makes each answer a call."""
    thinking: ThinkingFormat | None = None
    is_thinking: bool = False
    """Whether an answer begins inside its thinking."""


class Answers:
    """The answers to one request: `n` to the first prompt, then to the next."""

    def __init__(
        self,
        model: ModelClient,
        ask: GenerationAsk,
        prompts: Sequence[EncodedPrompt],
        stops: Sequence[str],
        form: AnswerForm = AnswerForm(),
    ) -> None:
        self._model, self._ask, self._prompts, self._stops = model, ask, tuple(prompts), tuple(stops)
        self._form = form
        self._started: dict[int, TextAnswer] = {}

    @property
    def count(self) -> int:
        return len(self._prompts) * self._ask.n

    @property
    def ignored(self) -> tuple[str, ...]:
        """The names of parameters that were ignored."""
        return self._ask.ignored

    @property
    def usage(self) -> Usage:
        """What was used so far."""
        started = self._started.values()
        return Usage(
            sum(len(prompt.ids) for prompt in self._prompts),
            sum(answer.tokens for answer in started),
            sum(answer.thought_tokens for answer in started),
        )

    @property
    def route(self) -> Route:
        """The route of the first answer."""
        return self._started[min(self._started)].route if self._started else ()

    @property
    def failovers(self) -> int:
        return sum(answer.failovers for answer in self._started.values())

    async def run(self, slots: trio.CapacityLimiter, out: trio.MemorySendChannel[Told]) -> None:
        """Generate all answers, and close `out`. The parts of one answer come in order."""
        async with out, trio.open_nursery() as nursery:
            for index in range(self.count):
                nursery.start_soon(self._one, index, slots, out.clone())

    async def _one(self, index: int, slots: trio.CapacityLimiter, out: trio.MemorySendChannel[Told]) -> None:
        number, nth = divmod(index, self._ask.n)
        prompt, asked = self._prompts[number], self._ask.sampling
        sampling = msgspec.structs.replace(asked, seed=(asked.seed + nth) % (SEED_MAX + 1))
        async with out, slots:
            forced = self._form.forced
            grammar = self._ask.grammar if forced is None else forced.grammar
            session = self._model.session(sampling, grammar=grammar)
            special, thinking = self._ask.special, self._thinking()
            answer = TextAnswer(session, self._model, self._stops, special, self._calls(), thinking)
            self._started[index] = answer
            try:
                answered = answer.parts(prompt.ids, prompt.count)
                if self._ask.echo:
                    answer.lists_end = True  # clients count the tokens after the prompt
                    answered = prompt_then_answer(session, answer, prompt.ids, prompt.count, prompt.text)
                async with aclosing(answered) as parts:
                    async for part in parts:
                        await out.send((index, await self._worded(part)))
            except BarnraiseError as error:
                await out.send(as_api_error(error, grammar_of="tools" if forced else self._ask.format_field))
            finally:
                end_session(self._model, session)

    def _calls(self) -> CallStream | None:
        tools = self._ask.tools
        if self._form.calls is None or tools is None:
            return None
        is_exclusive = self._ask.grammar is not None  # which has calls, or JSON whose texts may look like one
        stream = CallStream(self._form.calls, tools.parameters, tools.is_parallel, is_exclusive)
        if self._form.forced is not None:
            stream.push(self._form.forced.begin)
        return stream

    def _thinking(self) -> ThoughtStream | None:
        form = self._form
        return ThoughtStream(form.thinking, form.is_thinking) if form.thinking else None

    async def _worded(self, part: AnswerPart) -> AnswerPart:
        """Return a part with the text of the tokens that it names."""
        if self._ask.logprobs is None or not part.drawn:
            return part
        named = {token for one in part.drawn for token in (one.token, *(token for token, _ in one.likeliest))}
        return dataclasses.replace(part, words=await self._model.text.words(named))


async def prepare(model: ModelClient, template: ChatTemplate, ask: GenerationAsk) -> Answers:
    """Encode what a request asks for. Raises ApiError."""
    largest, biased = model.manifest.model.vocab_size - 1, ask.sampling.largest_bias
    if biased > largest:
        raise ApiError(
            400,
            f"logit_bias names token {biased} and the model's token ids end with {largest}: send only these",
            code="invalid_value",
            param="logit_bias",
        )
    form, forced = AnswerForm(), None
    if ask.messages:
        try:
            calls = template.form if ask.tools else None
            tools = ask.tools.given if ask.tools else ()
            if calls is not None and ask.tools is not None:
                if ask.tools.forced:
                    forced = forced_calls(calls, ask.tools)
                elif ask.grammar is not None:
                    both = await with_calls(ask.grammar, calls, ask.tools, model.text, ask.format_field)
                    ask = dataclasses.replace(ask, grammar=both)
            variables, unread = ask.variables.read_by(template.names)
            ask = dataclasses.replace(ask, ignored=(*ask.ignored, *unread))
            prompt = await template.render(ask.messages, tools, variables)
        except BarnraiseError as error:
            raise as_api_error(error) from error
        prompts: tuple[Prompt, ...] = (prompt + ("" if forced is None else forced.begin),)
        is_free = forced is None and ask.grammar is None  # a grammar leaves no room for thinking
        thinking = template.thinking if is_free else None
        form = AnswerForm(calls, forced, thinking, thinking is not None and thinking.is_open(prompt))
        stops, special = (*ask.stops, *template.stops), template.is_plain
    else:
        prompts, stops, special = ask.prompts, ask.stops, True
    try:
        encoded = [_fitted(model, await _encode(model, prompt, special), ask.count) for prompt in prompts]
        if ask.echo:
            encoded = [await _echoed(model, *one, ask.special) for one in zip(prompts, encoded, strict=True)]
    except BarnraiseError as error:
        raise as_api_error(error) from error
    return Answers(model, ask, encoded, stops, form)


async def _encode(model: ModelClient, prompt: Prompt, special: bool) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        largest = model.manifest.model.vocab_size - 1
        if any(token > largest for token in prompt):
            raise ApiError(400, f"the model's token ids end with {largest}: send only these", param="prompt")
        return prompt
    context = model.manifest.model.max_seq_len
    if len(prompt) > _CHARS_PER_TOKEN * context:
        raise _too_long(f"a text of {len(prompt)} characters", context)
    return tuple(await model.text.encode(prompt, special=special))


async def _echoed(model: ModelClient, prompt: Prompt, encoded: EncodedPrompt, special: bool) -> EncodedPrompt:
    """Return a prompt with its text: as it came, else that of its tokens. `special`: with special ones."""
    text = prompt
    if not isinstance(text, str):
        (text,) = await model.text.decode([id for id in encoded.ids if special or id not in model.special])
    return dataclasses.replace(encoded, text=text)


def _fitted(model: ModelClient, ids: tuple[int, ...], count: int | None) -> EncodedPrompt:
    """Return a prompt and the length of its answer, which fit the context together. Raises ApiError."""
    context = model.manifest.model.max_seq_len
    if not ids:
        raise ApiError(400, "the prompt is empty: send at least one token", param="prompt")
    if len(ids) + (1 if count is None else count) > context:
        wanted = f" and an answer of {count}" if count else ""
        raise _too_long(f"a prompt of {len(ids)} tokens{wanted}", context)
    return EncodedPrompt(ids, min(CHAT_TOKENS, context - len(ids)) if count is None else count)


def _too_long(what: str, context: int) -> ApiError:
    return ApiError(
        400,
        f"{what} exceeds this model's context of {context} tokens: send less, or ask for a shorter answer",
        code="context_length_exceeded",
    )
