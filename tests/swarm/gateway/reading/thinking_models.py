"""Models that think, as far as a gateway sees them: their chat templates, and answers that are written down."""

from __future__ import annotations

from typing import Any, Final

from peer.model.text.rules import TextRules
from tests.swarm.gateway.scripted import ScriptedModel
from tests.swarm.gateway.tool_models import HERMES

QWEN3: Final = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content is string %}
        {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""In the shape of Qwen3's, whose answers begin with the tag."""
OPEN: Final = f"{QWEN3}{{{{- '<think>\\n' }}}}"
"""In the shape of the templates of QwQ and DeepSeek-R1, which write the tag themselves."""
TOOLS: Final = HERMES.replace("message.content %}", "message.content.split('</think>')[-1] %}")
"""In the shape of Qwen2.5's, with thinking left out of the history."""


def model_of(template: str, *script: Any) -> ScriptedModel:
    """Return a model with this template whose tokens are bytes, of which 0 ends an answer."""
    model = ScriptedModel(*script, text=TextRules(stops=(0,), chat_template=template))
    model.manifest.model.max_seq_len = 10_000
    return model
