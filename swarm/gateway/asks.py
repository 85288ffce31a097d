"""Requests of clients: the bodies of OpenAI's two requests, checked. Unsupported parameters are refused by name.

A parameter that is null counts as absent. The response lists the parameters that are ignored (`swarm.gateway.ignored`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, TypeVar

import msgspec

from peer.decoding import MALFORMED, told
from peer.ipc.grammar_messages import Grammar
from peer.ipc.sampling_options import BIASES_MAX, LIKELIEST_MAX, SEED_MAX, TOKENS_MAX, Sampling, TokenBias, new_seed
from peer.plain_text import plain
from swarm.gateway.errors import ApiError
from swarm.gateway.ignored import NAME_CHARS_MAX, REFUSED, REFUSED_IN_MESSAGES, Unsupported, without_ignored
from swarm.gateway.response_format import read_format
from swarm.gateway.template import ChatMessage
from swarm.gateway.template_variables import NO_VARIABLES, Effort, Variables, read_variables
from swarm.gateway.tools import Tools, read_call_id, read_calls, read_tools

CHAT_TOKENS: Final = 1024
"""Of an answer, if the request does not say."""
TEXT_TOKENS: Final = 16
ANSWERS_MAX: Final = 16
"""Of one request: prompts times n."""
STOPS_MAX: Final = 16
MESSAGES_MAX: Final = 4096
_SEED_MIN: Final = -(1 << 63)
_TEMPERATURE_MAX: Final = 2.0

_Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
_Biases = Annotated[dict[str, Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]], msgspec.Meta(max_length=BIASES_MAX)]
_TOKEN_ID: Final = re.compile("0|[1-9][0-9]{0,7}")
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]

ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
THOUGHT: Final = "reasoning_content"
"""The field of a message that has what the model thought, as DeepSeek, vLLM and llama.cpp name it."""
_MORE_FIELDS: Final = {"assistant": ("tool_calls", THOUGHT), "tool": ("tool_call_id", "name")}
"""Of a message, beside role and content."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parts of a stream beside the answer."""

    include_usage: bool = False


class GenerationBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters that every request may have."""

    model: str
    max_tokens: _Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=_TEMPERATURE_MAX)] = 1.0
    top_p: _Share = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=1 << 24)] = 0
    """-1, as vLLM has it, or 0: all."""
    min_p: _Share = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100.0)] = 1.0
    frequency_penalty: _Penalty = 0.0
    presence_penalty: _Penalty = 0.0
    logit_bias: _Biases = msgspec.field(default_factory=dict)
    response_format: dict[str, Any] | None = None
    seed: int | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=ANSWERS_MAX)] = 1
    stop: _Stop | Annotated[list[_Stop], msgspec.Meta(max_length=STOPS_MAX)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    skip_special_tokens: bool = True
    """As vLLM has it: whether special tokens are left out of the text of an answer."""


class _ChatBody(GenerationBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: _Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=LIKELIEST_MAX)] = 0
    tools: list[Any] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _TextBody(GenerationBody, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: str | Annotated[list[str | _Token | list[_Token]], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    echo: bool = False


Prompt = str | tuple[int, ...]
_BodyT = TypeVar("_BodyT", bound=GenerationBody)


@dataclass(frozen=True)
class GenerationAsk:
    """One request for answers."""

    model: str
    sampling: Sampling
    count: int | None
    """Tokens of an answer, at most; None: `CHAT_TOKENS`, or less where the context ends sooner."""
    n: int
    """Answers to each prompt."""
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: int | None
    """How many of the likeliest tokens are reported for each; None: no log-probabilities at all."""
    special: bool = False
    """Whether special tokens are shown in the text of an answer."""
    echo: bool = False
    """Whether the prompt comes before the answer, with log-probabilities where those are reported."""
    ignored: tuple[str, ...] = ()
    """Names of parameters that were ignored."""
    grammar: Grammar | None = None
    """What each answer must follow; None: any text will do."""
    format_field: str = "response_format"
    """The parameter that brought the grammar."""
    messages: tuple[ChatMessage, ...] = ()
    """Of a chat."""
    prompts: tuple[Prompt, ...] = ()
    """Of a completion."""
    tools: Tools | None = None
    """What the model may call; None for nothing."""
    variables: Variables = NO_VARIABLES
    """Of a chat's template."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of a response that its answer repeats."""


def read_chat(body: bytes) -> GenerationAsk:
    """Read the body of a chat completion. Raises ApiError."""
    read, ignored = read_parameters(read_object(body), _ChatBody)
    if read.max_tokens and read.max_completion_tokens and read.max_tokens != read.max_completion_tokens:
        raise _wrong("max_tokens", "max_tokens and max_completion_tokens differ: send one of them")
    if read.top_logprobs and not read.logprobs:
        raise _wrong("top_logprobs", "top_logprobs needs logprobs: send logprobs=true, too")
    tools, beside = read_tools(read.tools, read.tool_choice, read.parallel_tool_calls)
    messages, inside = list[ChatMessage](), dict.fromkeys(beside)
    called: dict[str, str] = {}
    for index, message in enumerate(read.messages):
        messages.append(_message(index, message, called, inside))
    ask = ask_of(read, read.max_completion_tokens or read.max_tokens, read.top_logprobs if read.logprobs else None)
    variables = read_variables(read.reasoning_effort, read.chat_template_kwargs)
    ignored = (*ignored, *inside)
    return replace(ask, messages=tuple(messages), tools=tools, ignored=ignored, variables=variables)


def read_completion(body: bytes) -> GenerationAsk:
    """Read the body of a text completion. Raises ApiError."""
    read, ignored = read_parameters(read_object(body), _TextBody)
    prompts = _prompts(read.prompt)
    if len(prompts) * read.n > ANSWERS_MAX:
        raise _wrong("n", f"{len(prompts)} prompts with n={read.n} are more than {ANSWERS_MAX} answers: send fewer")
    if read.max_tokens == 0 and not read.echo:
        raise _wrong("max_tokens", "max_tokens is 0, and nothing is to be answered: send 1 at least, or echo=true")
    ask = ask_of(read, TEXT_TOKENS if read.max_tokens is None else read.max_tokens, read.logprobs)
    if read.echo and read.logprobs is not None:
        ask = replace(ask, sampling=msgspec.structs.replace(ask.sampling, prompt_logprobs=True))
    return replace(ask, prompts=prompts, echo=read.echo, ignored=ignored)


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ApiError."""
    try:
        content = msgspec.json.decode(body)
    except MALFORMED as error:
        raise ApiError(400, f"the body is no JSON ({told(error)}): send a JSON object") from error
    if not isinstance(content, dict):
        raise ApiError(400, "the body is no JSON object: send one")
    return content


def read_parameters(
    content: dict[str, Any], kind: type[_BodyT], refused: Mapping[str, tuple[Any, ...]] = REFUSED
) -> tuple[_BodyT, tuple[str, ...]]:
    """Return the parameters of a request, and the names of those that are ignored. `refused`: parameters that are not
    supported, each with the values that change nothing. Raises ApiError."""
    given, ignored = _split(content, kind, refused=refused)
    if isinstance(options := given.get("stream_options"), dict):
        given["stream_options"], more = _split(options, StreamOptions, "stream_options")
        ignored += more
    try:
        read = msgspec.convert(given, kind)
    except MALFORMED as error:
        name = re.search(r"`\$\.(\w+)", str(error)) or re.search(r"field `(\w+)`", str(error))
        param = name[1] if name else None
        raise _wrong(param, f"{param or 'the body'} is not what it should be ({told(error)}): correct it") from error
    if read.seed is not None and not _SEED_MIN <= read.seed <= SEED_MAX:
        raise _wrong("seed", f"seed is {read.seed}: send a number of 64 bits")
    return read, tuple(ignored)


def _split(
    content: dict[str, Any],
    kind: type[msgspec.Struct],
    inside: str = "",
    refused: Mapping[str, tuple[Any, ...]] = REFUSED,
) -> tuple[dict[str, Any], list[str]]:
    """Return the parameters of `kind`, and the names of the others, which are ignored. `inside`: the parameter that has
    these."""
    try:
        given, ignored = without_ignored(content, kind.__struct_fields__, refused)
    except Unsupported as error:
        name = f"{inside}.{error}" if inside else str(error)
        message = f"{plain(name, NAME_CHARS_MAX)} is not supported by this server: leave it out"
        raise _wrong(inside or name, message, "unsupported_parameter") from error
    return given, [f"{inside}.{name}" if inside else name for name in ignored]


def ask_of(
    body: GenerationBody, count: int | None, logprobs: int | None, format_field: str = "response_format"
) -> GenerationAsk:
    """Return what these parameters ask for. `count`, `logprobs`, `format_field`: as `GenerationAsk` has them. Raises
    ApiError."""
    sampling = Sampling(
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        seed=new_seed() if body.seed is None else body.seed % (SEED_MAX + 1),
        logprobs=0 if logprobs is None else max(1, logprobs),
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=_biases(body.logit_bias),
    )
    return GenerationAsk(
        model=body.model,
        sampling=sampling,
        count=count,
        n=body.n,
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stream=body.stream,
        include_usage=body.stream_options.include_usage,
        logprobs=logprobs,
        special=not body.skip_special_tokens,
        grammar=read_format(body.response_format, format_field),
        format_field=format_field,
    )


def _biases(given: dict[str, float]) -> tuple[TokenBias, ...]:
    for name in given:
        if not _TOKEN_ID.fullmatch(name) or int(name) >= TOKENS_MAX:
            raise _wrong(
                "logit_bias", f"logit_bias names {plain(name, NAME_CHARS_MAX)!r}, no token id: name ids of tokens"
            )
    return tuple(sorted((int(name), bias) for name, bias in given.items()))


def _message(index: int, message: dict[str, Any], called: dict[str, str], inside: dict[str, None]) -> ChatMessage:
    """Return a message; add the functions of its calls by id to `called`, and the names of the fields in it that are
    ignored to `inside`."""
    place, role = f"messages[{index}]", message.get("role")
    more = _MORE_FIELDS.get(role, ()) if isinstance(role, str) else ()
    try:
        kept, ignored = without_ignored(message, ("role", "content", *more), REFUSED_IN_MESSAGES)
    except Unsupported as error:
        refused = f"{place}.{error} is not supported by this server: leave it out"
        raise _wrong("messages", refused, "unsupported_parameter") from error
    inside.update(dict.fromkeys(f"messages.{name}" for name in ignored))
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong("messages", f"{place}.role is not one of {', '.join(ROLES)}: choose one of them")
    content = kept.get("content")
    calls = read_calls(place, kept.get("tool_calls", []), inside)
    thought = kept.get(THOUGHT, "")
    if not isinstance(thought, str):
        raise _wrong("messages", f"{place}.{THOUGHT} is no text: send a string")
    called.update((call.id, call.name) for call in calls)
    if content is None and role == "assistant":
        content = ""  # of only calls, or a refusal; many templates take no null
    if role != "tool":
        return ChatMessage(ROLES[role], read_text(f"{place}.content", content), calls, thought=thought)
    id = read_call_id(f"{place}.tool_call_id", kept.get("tool_call_id"))
    if id not in called:
        raise _wrong("messages", f"{place}.tool_call_id is that of no call before it: send the call, too")
    return ChatMessage(role, read_text(f"{place}.content", content), tool_call_id=id, name=called[id])


def read_text(place: str, content: Any, param: str = "messages", kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message: a string, or parts that are text. `kinds`: the types of these. Raises ApiError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(param, f"{place} is no text: send a string, or a list of text parts")
    texts = list[str]()
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise _wrong(param, f"{place} has a part of type {str(kind)[:40]!r}: send text", "unsupported_parameter")
        texts.append(part["text"])
    return "".join(texts)


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if all(isinstance(one, int) for one in prompt):
        return (tuple(one for one in prompt if isinstance(one, int)),)
    if any(isinstance(one, int) for one in prompt):
        raise _wrong(
            "prompt", "prompt mixes token ids with texts: send a text, texts, token ids, or lists of token ids"
        )
    return tuple(one if isinstance(one, str) else tuple(one) for one in prompt if not isinstance(one, int))


def _wrong(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)
