"""A model that has learnt to call tools, behind the official `openai` client: agents ask what it was not taught.

It is trained here, then served by two processes of one block each. The tools really run, and their results go back with
the history. What the model says is compared with `transformers`, which has its weights and template as files alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import openai
import pytest
import torch
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from swarm.gateway.limits import key_hash
from tests.soak.serving.trained_caller import (
    ANSWER,
    EOS,
    FUNCTIONS,
    KINDS,
    TOOLS,
    Message,
    Talk,
    text_of,
    write_caller,
)
from tests.swarm.gateway.served_model import KEY, NAME, ServedModel
from tests.swarm.gateway.test_tool_answers import Turn, joined

pytestmark = [pytest.mark.soak, pytest.mark.process]
TALKS: Final = 20
SHARE: Final = 0.9
TURNS_MAX: Final = 5
"""Of one question."""
SETTINGS: Final[dict[str, Any]] = {"model": NAME, "temperature": 0}
RESPONSE_TOOLS: Final = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]


@dataclass
class Caller:
    """The served model, and its weights in `transformers`."""

    client: openai.OpenAI
    model: Any
    tokenizer: Any

    def ids_of(self, messages: Sequence[Message]) -> Any:
        """Return the ids (1, count) of the prompt that asks for the next answer of a conversation."""
        return self.tokenizer.encode(text_of(messages, begins_answer=True), return_tensors="pt")

    def reference(self, messages: Sequence[Message]) -> str:
        """Return what `transformers` says next in a conversation."""
        ids = self.ids_of(messages)
        with torch.no_grad():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=100, do_sample=False, pad_token_id=0
            )
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    import transformers

    folder = tmp_path_factory.mktemp("caller")
    model = write_caller(folder / NAME)
    (folder / "keys").write_text(f"{key_hash(KEY)} tests\n")
    served = ServedModel(folder)
    try:
        served.serve("s0", ["--model", folder / NAME, "--memory", "1"], "0:1")
        served.serve("s1", [served.invite, "--memory", "1"], "1:2")
        place: list[str | Path] = ["--listen", "127.0.0.1:0", "--key-file", folder / "keys", "--json"]
        served.start("api", "api", served.invite, *place)
        url = served.event("api", "listening")["url"]
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
            yield Caller(client, model, transformers.AutoTokenizer.from_pretrained(folder / NAME))
    finally:
        served.end()


# -- agents ------------------------------------------------------------------------------------------------------------


def held_out(kinds: Sequence[str]) -> list[Talk]:
    """Return conversations of questions that were not learnt: each of one, and some of another one, too."""
    made, chance = list[Talk](), random.Random(99)
    for number in range(TALKS):
        talk = Talk(chance, held_out=True)
        talk.add_question(kinds[number % len(kinds)])
        if number % 3 == 2:
            talk.add_question(kinds[chance.randrange(len(kinds))])
        made.append(talk)
    return made


def result_of(name: str, arguments: str) -> str:
    """Run a tool. What the model makes up is answered as agents do."""
    try:
        return FUNCTIONS[name](**json.loads(arguments))
    except (KeyError, TypeError) as error:
        return f"Error: {error!r}"


def plain(messages: Sequence[Message]) -> list[Message]:
    """Return messages without ids, their arguments as objects."""
    made = []
    for message in messages:
        one: Message = {"role": message["role"], "content": message["content"] or ""}
        calls = [call["function"] for call in message.get("tool_calls", ())]
        if calls:
            one["tool_calls"] = [{"function": {"name": call["name"], "arguments": _read(call)}} for call in calls]
        made.append(one)
    return made


def _read(call: dict[str, Any]) -> Any:
    return json.loads(call["arguments"]) if isinstance(call["arguments"], str) else call["arguments"]


def in_chat(client: openai.OpenAI, stream: bool, questions: Sequence[str], **first: Any) -> list[Message]:
    """Return the messages of a chat about questions. `first`: options of the first request of each."""
    messages = list[Message]()
    for question in questions:
        messages.append({"role": "user", "content": question})
        for number in range(TURNS_MAX):
            turn = asked(client, stream, messages, **(first if number == 0 else {}))
            assert turn.finish == ("tool_calls" if turn.calls else "stop")
            calls = {"tool_calls": turn.calls} if turn.calls else {}
            messages.append({"role": "assistant", "content": turn.content, **calls})
            if not turn.calls:
                break
            for call in turn.calls:
                content = result_of(call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    return messages


def asked(client: openai.OpenAI, stream: bool, messages: Sequence[Message], **options: Any) -> Turn:
    """Ask once, and have each answer and each chunk checked against OpenAI's types."""
    completions = cast(Any, client.chat.completions)
    ask = {**SETTINGS, "messages": messages, "tools": TOOLS, "max_tokens": 100, **options}
    if stream:
        return joined(strict(chunk) for chunk in completions.create(**ask, stream=True))
    answer = ChatCompletion.model_validate_json(completions.with_raw_response.create(**ask).text, strict=True)
    (choice,) = answer.choices
    calls = [call.model_dump() for call in choice.message.tool_calls or ()]
    return Turn(choice.message.content, calls, choice.finish_reason)


def strict(chunk: ChatCompletionChunk) -> ChatCompletionChunk:
    return ChatCompletionChunk.model_validate_json(json.dumps(chunk.to_dict()), strict=True)


def in_responses(client: openai.OpenAI, stream: bool, questions: Sequence[str], **first: Any) -> list[Message]:
    """Return the messages of a chat by Responses."""
    history, messages = list[Any](), list[Message]()
    for question in questions:
        history.append({"role": "user", "content": question})
        messages.append(history[-1])
        for number in range(TURNS_MAX):
            response = responded(client, stream, history, **(first if number == 0 else {}))
            assert response.status == "completed"
            found: list[Any] = [item for item in response.output if item.type == "function_call"]
            functions = [{"function": {"name": one.name, "arguments": one.arguments}} for one in found]
            calls = {"tool_calls": functions} if functions else {}
            messages.append({"role": "assistant", "content": response.output_text, **calls})
            history += response.output  # as OpenAI's examples do
            if not found:
                break
            for one in found:
                output = result_of(one.name, one.arguments)
                history.append({"type": "function_call_output", "call_id": one.call_id, "output": output})
                messages.append({"role": "tool", "content": output})
    return messages


def responded(client: openai.OpenAI, stream: bool, history: Sequence[Any], **options: Any) -> Response:
    ask = {**SETTINGS, "input": history, "tools": RESPONSE_TOOLS, "max_output_tokens": 100, **options}
    responses = cast(Any, client.responses)
    if not stream:
        return Response.model_validate_json(responses.with_raw_response.create(**ask).text, strict=True)
    with responses.stream(**ask) as events:
        texts = dict[str, str]()
        for event in events:
            if event.type.endswith(".delta"):
                texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        done = cast(Response, events.get_final_response())
    items: list[Any] = done.output
    whole = {item.id: item.arguments if item.type == "function_call" else item.content[0].text for item in items}
    assert texts == whole
    return done


Agent = Callable[..., list[Message]]


def spoken(agent: Agent, caller: Caller, talks: Sequence[Talk], stream: bool, **first: Any) -> list[list[Message]]:
    """Return what an agent hears in these conversations, of which nearly all must be right."""
    said = []
    for talk in talks:
        questions = [message["content"] for message in talk.messages if message["role"] == "user"]
        said.append(plain(agent(caller.client, stream, questions, **first)))
    wrong = [one for one, talk in zip(said, talks, strict=True) if one != plain(talk.messages)]
    print(f"  {len(said) - len(wrong)} of {len(said)} conversations are right", flush=True)
    assert len(wrong) <= (1 - SHARE) * len(said), wrong
    return said


# -- tests -------------------------------------------------------------------------------------------------------------


def test_an_agent_of_three_tools_gets_its_answers(caller: Caller) -> None:
    """Whole and streamed the same ones; each turn is what `transformers` says after the same prompt."""
    talks = held_out(KINDS)
    whole = spoken(in_chat, caller, talks, stream=False)
    assert spoken(in_chat, caller, talks, stream=True) == whole
    for messages in whole:
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before, text = messages[:number], caller.reference(messages[:number])
                assert text_of([*before, message]) == text_of(before) + f"{ANSWER}{text}{EOS}\n"


def test_prompts_are_those_of_transformers(caller: Caller) -> None:
    """As far as their counts show it: with calls, as JSON in a text, and results of tools."""
    for talk in held_out(KINDS):
        for end in [number for number, message in enumerate(talk.messages) if message["role"] == "assistant"]:
            given = sent(talk.messages[:end])
            create = cast(Any, caller.client.chat.completions.create)
            answer = create(**SETTINGS, messages=given, tools=TOOLS, max_tokens=1)
            assert answer.usage.prompt_tokens == len(caller.ids_of(talk.messages[:end])[0])


def sent(messages: Sequence[Message]) -> Any:
    """Return messages as a client sends them: with ids of calls, and arguments as texts."""
    made, ids = list[Message](), list[str]()
    for message in messages:
        one = dict(message)
        if "tool_calls" in message:
            ids.append(f"call_{len(ids)}")
            (call,) = message["tool_calls"]
            function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
            one["tool_calls"] = [{"id": ids[-1], "type": "function", "function": function}]
        elif message["role"] == "tool":
            one["tool_call_id"] = ids[-1]
        made.append(one)
    return made


def test_an_agent_gets_the_same_by_responses(caller: Caller) -> None:
    talks = held_out(KINDS)
    whole = spoken(in_responses, caller, talks, stream=False)
    assert spoken(in_responses, caller, talks, stream=True) == whole
    assert whole == spoken(in_chat, caller, talks, stream=False)


@pytest.mark.parametrize("agent", [in_chat, in_responses], ids=["chat", "responses"])
def test_an_agent_that_forces_the_first_call_gets_the_same(caller: Caller, agent: Agent) -> None:
    """A grammar lets the model write a call alone, which it would have written anyway."""
    talks = held_out([kind for kind in KINDS if kind != "greeting"])
    forced = spoken(agent, caller, talks, stream=False, tool_choice="required")
    assert spoken(agent, caller, talks, stream=True, tool_choice="required") == forced
    assert forced == spoken(agent, caller, talks, stream=False)


def test_a_greeting_is_answered_by_a_call_only_if_one_is_forced(caller: Caller) -> None:
    messages: list[Message] = [{"role": "user", "content": "Hello!"}]
    assert not asked(caller.client, False, messages).calls
    for choice in ("required", {"type": "function", "function": {"name": "convert"}}):
        whole, streamed = (asked(caller.client, stream, messages, tool_choice=choice) for stream in (False, True))
        assert whole.named == streamed.named and whole.content is streamed.content is None
        ((name, arguments),) = whole.named
        parameters = next(tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == name)
        assert list(arguments) == parameters["required"] and (choice == "required" or name == "convert")
