"""Models that call tools, as far as a gateway sees them: their chat templates, and what they write to call."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from peer.data.tokenizer import ByteTokenizer
from peer.model.text.rules import TextRules
from peer.worker.text_client import ModelText
from tests.swarm.gateway.scripted import ScriptedModel, Site, events_of, open_site

Calls = Sequence[tuple[str, dict[str, Any]]]

WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> in „Köln“",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
ADD: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds",
        "parameters": {"type": "object", "properties": {"terms": {"type": "array", "items": {"type": "number"}}}},
    },
}
CLOCK: Final[dict[str, Any]] = {"type": "function", "function": {"name": "clock"}}

HERMES: Final = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object within XML tags:\\n<tool_call>\\n" }}
    {{- "{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""In the shape of Qwen2.5's."""

LLAMA: Final = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first_user_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {{- "Do not use variables.\\n\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""In the shape of Llama 3.1's, which takes one call a message."""

MISTRAL: Final = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}
{%- endfor %}
"""
"""In the shape of Mistral 7B v0.3's, which takes ids of nine letters."""

_PLAIN: Final = """{{ tools | tojson }}
{% for message in messages %}{{ message | tojson }}{% endfor %}"""
TEMPLATES: Final = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=one>\n" + _PLAIN,
    "pythonic": "Answer with [func_name1(params_name1=params_value1), func_name2()]" + _PLAIN,
}


def written(form: str, calls: Calls) -> str:
    """Return calls as a model of this form writes them."""
    named = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in named)
    if form == "llama3_json":
        return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)
    if form == "mistral":
        return f"[TOOL_CALLS] {json.dumps(named)}"
    if form == "pythonic":
        return "[" + ", ".join(f"{name}({_keywords(arguments)})" for name, arguments in calls) + "]"
    assert form == "qwen3_coder"
    return "\n".join(
        f"<tool_call>\n<function={name}>\n{_tags(arguments)}</function>\n</tool_call>" for name, arguments in calls
    )


def _keywords(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _tags(arguments: dict[str, Any]) -> str:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    return "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in texts.items())


class MarkedText(ModelText):
    """A tokenizer of bytes, with one token more for each of some texts, from 256 on."""

    def __init__(self, *marks: str) -> None:
        super().__init__()
        self._marks = marks

    async def decode(self, *sequences: Sequence[int]) -> list[str]:
        return [self._decoded(ids) for ids in sequences]

    def _decoded(self, ids: Sequence[int]) -> str:
        """Return the text of ids, of which bytes in a row are decoded together."""
        texts, row = list[str](), list[int]()
        for id in (*ids, None):
            if id is not None and id < 256:
                row.append(id)
                continue
            texts.append(ByteTokenizer().decode(row))
            row = []
            texts.append("" if id is None else self._marks[id - 256])
        return "".join(texts)


def model_of(form: str, *script: Any) -> ScriptedModel:
    """Return a model of a form whose tokens are bytes, of which 0 ends an answer."""
    model = ScriptedModel(*script, text=TextRules(bos="<s>", eos="</s>", stops=(0,), chat_template=TEMPLATES[form]))
    model.manifest.model.max_seq_len = 30_000
    return model


@asynccontextmanager
async def site_of(form: str, *script: Any) -> AsyncIterator[tuple[Site, ScriptedModel]]:
    model = model_of(form, *script)
    async with open_site(model) as site:
        yield site, model


def streamed_events(body: bytes) -> list[Any]:
    *events, done = events_of(body)
    assert done == "[DONE]"
    return events
