"""A conversation of several turns: one session for as long as its tokens only grow."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, cast

import pytest

from peer.errors import ConfigError
from peer.ipc.sampling_options import Sampling
from swarm.gateway.conversation import Conversation
from swarm.gateway.template import ChatMessage, ChatTemplate
from swarm.inference.client_view import NoServers
from tests.swarm.gateway.scripted import CONTEXT, ScriptedModel


def talk(model: Any, tokens_max: int = 100) -> Conversation:
    return Conversation(model, ChatTemplate(), Sampling(), tokens_max)


async def say(conversation: Conversation, text: str, pieces: int = 1000) -> str:
    said = ""
    async with aclosing(conversation.answer(text)) as parts:
        async for part in parts:
            said += part.text
            pieces -= 1
            if not pieces:
                break
    return said


async def test_a_second_turn_goes_on_in_the_same_session() -> None:
    model = ScriptedModel(b" Fine.")
    conversation = talk(model)
    assert (await say(conversation, "Hello"), await say(conversation, "Again")) == (" Fine.", " Fine.")
    assert bytes(model.sessions[0].tokens) == b"user: Hello\nassistant: Fine.\nuser: Again\nassistant: Fine."
    assert len(model.sessions) == 1 and not model.sessions[0].closed.is_set()
    conversation.close()
    assert model.sessions[0].closed.is_set()


async def test_thinking_is_apart_from_the_answer_and_from_the_next_prompt() -> None:
    model = ScriptedModel(b"<think>\nHm.\n</think>\n\nFine.")
    conversation = Conversation(cast(Any, model), ChatTemplate(source="</think>"), Sampling(), 100)
    async with aclosing(conversation.answer("Hello")) as parts:
        told = [(part.thought, part.text) async for part in parts]
    assert "".join(thought for thought, _ in told) == "Hm." and "".join(text for _, text in told) == "Fine."
    assert conversation.messages == [ChatMessage("user", "Hello"), ChatMessage("assistant", "Fine.", thought="Hm.")]
    assert await say(conversation, "Again", pieces=1) == ""
    assert bytes(model.sessions[-1].tokens).startswith(b"user: Hello\nassistant: Fine.\nuser: Again\nassistant:")
    assert conversation.messages[-1].content == "" and "H" in conversation.messages[-1].thought


async def test_other_words_begin_another_session() -> None:
    model = ScriptedModel(b" Fine.")
    conversation = talk(model)
    await say(conversation, "Hello")
    conversation.system = "Be brief."
    await say(conversation, "Again")
    assert bytes(model.sessions[1].tokens).startswith(b"system: Be brief.\nuser: Hello\nassistant: Fine.\nuser: Again")
    conversation.reset()
    await say(conversation, "New")
    assert bytes(model.sessions[2].tokens) == b"system: Be brief.\nuser: New\nassistant: Fine."
    assert [session.closed.is_set() for session in model.sessions] == [True, True, False]


async def test_an_answer_that_is_stopped_counts_as_far_as_it_came() -> None:
    conversation = talk(ScriptedModel(b" One two three"))
    assert await say(conversation, "Count", pieces=4) == " One"
    assert conversation.messages == [ChatMessage("user", "Count"), ChatMessage("assistant", " One")]


async def test_a_message_without_an_answer_was_not_said() -> None:
    model = ScriptedModel(NoServers("no server takes block 3: try again later"))
    conversation = talk(model)
    with pytest.raises(NoServers):
        await say(conversation, "Hello")
    assert conversation.messages == []
    model.script = (b" Fine.",)
    assert await say(conversation, "Hello") == " Fine."


async def test_an_answer_ends_where_the_context_does() -> None:
    model = ScriptedModel(b" " + b"x" * 999)
    conversation = talk(model, 1000)
    prompt = "user: Hello\nassistant:"
    assert len(await say(conversation, "Hello")) == CONTEXT - len(prompt)
    with pytest.raises(ConfigError, match="begin a new one"):
        await say(conversation, "Again")
