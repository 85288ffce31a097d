"""Chat templates: what `transformers` writes, and strangers' programs that get nowhere."""

from __future__ import annotations

import datetime
import subprocess
from typing import Any, cast

import psutil
import pytest
import trio

from peer.model.text.rules import TextRules
from swarm.gateway.template import RENDER_S, ChatMessage, TemplateFailed, open_template

pytestmark = pytest.mark.process

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCT = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim + '\n\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- set ns = namespace(last=none) %}
{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system or '') + message.content + ' [/INST]' }}
        {%- set system = '' %}
    {%- else %}
        {%- generation %}{{ ' ' + message.content | trim + eos_token }}{%- endgeneration %}
    {%- endif %}
    {%- set ns.last = message.role %}
{% endfor %}
{{- {'last': ns.last, 'word': '<é>'} | tojson }}"""
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if tools is not none %}{{- raise_exception('no tools') }}{%- endif %}
{{- "Today: " + date_string }}
{%- for message in messages %}
    {%- if loop.index > 9 %}{%- break %}{%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
TALK = [
    ChatMessage("user", "Is 2 < 3?  <b>"),
    ChatMessage("assistant", " Yes.\n"),
    ChatMessage("user", "„Schön“ {{ 7 * 7 }}"),
]


def golden(source: str, messages: list[ChatMessage]) -> str:
    """Return what `transformers` makes of a conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template

    talk = [{"role": message.role, "content": message.content} for message in messages]
    texts, _ = cast(Any, render_jinja_template)(  # says that it returns a string
        [talk], chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    return str(texts[0])


async def rendered(source: str, messages: list[ChatMessage]) -> str:
    async with open_template(TextRules(bos="<s>", eos="</s>", chat_template=source)) as template:
        return await template.render(messages)


@pytest.mark.parametrize("source", [CHATML, INSTRUCT, HEADERS], ids=["chatml", "instruct", "headers"])
async def test_a_conversation_reads_as_transformers_writes_it(source: str) -> None:
    for messages in (TALK, TALK[:1], [ChatMessage("system", "Be brief."), *TALK]):
        assert await rendered(source, messages) == golden(source, messages)
    assert datetime.date.today().strftime("%Y") in golden(HEADERS, TALK)


async def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        await rendered(INSTRUCT, [TALK[0], TALK[0]])


HOSTILE = {
    "an endless loop": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "processor",
    ),
    "one endless step": ("{{ (10 ** 10) ** (10 ** 10) }}", "processor|memory"),
    "a huge text": ("{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}", "characters"),
    "a huge value": ("{{ 'x' * 10 ** 10 }}", "memory"),
    "a huge list": (
        "{% set ns = namespace(l=[0]) %}{% for i in range(99) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
        "m",
    ),
    "deep recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "classes": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "classes by a filter": ("{{ (messages | attr('__class__')).__mro__ }}", "undefined|unsafe"),
    "globals": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
    "globals of ours": ("{{ strftime_now.__globals__ }}{{ raise_exception.__code__.co_name }}", "unsafe|undefined"),
    "a format string": ("{{ '{0.__class__.__mro__}'.format(messages) }}", "unsafe"),
    "a namespace": ("{% set ns = namespace(__init__=1) %}", "namespace"),
    "our own lists": ("{{ messages.append(1) }}", "unsafe"),
    "no template": ("{% for %}", "xpected"),
    "another file": ("{% include '/etc/passwd' %}", "loader"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_template_is_one_error(name: str) -> None:
    source, reason = HOSTILE[name]
    with pytest.raises(TemplateFailed, match=reason), trio.fail_after(300):
        await rendered(source, TALK)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["an endless loop", "one endless step"])
async def test_a_template_without_end_is_ended_in_time(name: str) -> None:
    with pytest.raises(TemplateFailed), trio.fail_after(60 + RENDER_S):
        await rendered(HOSTILE[name][0], TALK)


async def test_after_a_fault_the_next_conversation_is_written() -> None:
    source = "{% if messages[0].content == 'loop' %}" + HOSTILE["an endless loop"][0] + "{% endif %}fine"
    async with open_template(TextRules(chat_template=source)) as template:
        for _ in range(2):
            assert await template.render(TALK) == "fine"
            with pytest.raises(TemplateFailed, match="more of the processor"):
                await template.render([ChatMessage("user", "loop")])
        assert await template.render(TALK) == "fine"


def children() -> list[int]:
    """Return the processes for templates that this one has started."""
    started = psutil.Process().children()
    return [child.pid for child in started if _runs_a_worker(child)]


def _runs_a_worker(child: psutil.Process) -> bool:
    try:
        return "peer.worker.main" in child.cmdline()
    except psutil.NoSuchProcess:  # it has ended, as one of another test that its parent has not reaped yet
        return False


async def test_the_process_is_started_once_and_ends_with_the_block() -> None:
    async with open_template(TextRules(chat_template=CHATML)) as template:
        assert not children()
        await template.render(TALK)
        first = children()
        await template.render(TALK)
        assert len(first) == 1 and children() == first
    assert not children()


ESCAPE = """
import runpy, socket, sys
from peer.data import chat_template

def attempt(act):
    try:
        act()
        return "done"
    except OSError as error:
        return type(error).__name__

def render(self, messages, tools, variables):
    return ",".join([
        attempt(lambda: open("/etc/passwd")),
        attempt(lambda: open("/tmp/escaped", "w")),
        attempt(lambda: socket.create_connection(("127.0.0.1", 9))),
        attempt(lambda: __import__("os").execv("/bin/true", ["true"])),
    ])

chat_template.ChatTemplateCode.render = render
runpy.run_module("peer.worker.main", run_name="__main__")
"""


async def test_an_escape_from_the_sandbox_would_reach_no_file_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker runs a program of ours in the template's place, with all of Python."""
    spawn: Any = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda line, **rest: spawn([line[0], "-c", ESCAPE, *line[3:]], **rest))
    assert await rendered(CHATML, TALK) == ",".join(["PermissionError"] * 4)


async def test_a_template_may_write_so_much_beside_the_messages_and_no_more() -> None:
    """A long conversation is no fault of the template's."""
    long = [ChatMessage("user", "x" * 300_000)]
    assert len(await rendered("{{ messages[0].content }}{{ 'y' * 65000 }}", long)) == 365_000
    with pytest.raises(TemplateFailed, match="writes more than 65536 characters"):
        await rendered("{{ messages[0].content }}{{ messages[0].content }}", long)


@pytest.mark.parametrize(("rules", "chosen"), [(TextRules(), None), (TextRules(chat_template=CHATML), "plain")])
async def test_without_a_template_a_conversation_is_plain(rules: TextRules, chosen: str | None) -> None:
    async with open_template(rules, chosen) as template:
        assert template.is_plain and template.stops
        text = await template.render([ChatMessage("system", "Be brief."), *TALK[:2], ChatMessage("user", "Why?")])
    assert text == "system: Be brief.\nuser: Is 2 < 3?  <b>\nassistant: Yes.\n\nuser: Why?\nassistant:"
