"""A server that is killed or frozen in the midst of calls of tools: the answers continue, with the same calls."""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from tests.swarm.gateway.served_model import KEY, NAME, served_model
from tests.swarm.gateway.tool_models import TEMPLATES

pytestmark = [pytest.mark.soak, pytest.mark.process]
ANSWERS: Final = 8  # each takes one of two servers for the second half of the blocks
NOTE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 120, "maxLength": 200}, "stars": {"enum": [1, 2, 3]}},
    "required": ["text", "stars"],
    "additionalProperties": False,
}
ASK: Final[dict[str, Any]] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Hello"}],
    "tools": [{"type": "function", "function": {"name": "note", "parameters": NOTE}}],
    "tool_choice": "required",
    "max_tokens": 600,
    "temperature": 1.0,
    "seed": 7,
    "n": ANSWERS,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def calls(client: openai.OpenAI) -> tuple[dict[int, str], int]:
    """Return the arguments of each answer's call, and how often a server was replaced."""
    found, failovers = defaultdict[int, str](str), 0
    for chunk in client.chat.completions.create(**ASK):
        failovers = (chunk.model_extra or {}).get("barnraise", {}).get("failovers", failovers)
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                found[choice.index] += (call.function and call.function.arguments) or ""
            if choice.finish_reason:
                assert choice.finish_reason == "tool_calls" and not choice.delta.content
    return dict(found), failovers


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_calls_go_on_without_a_server(tmp_path: Path, strike: signal.Signals) -> None:
    template = tmp_path / "hermes.jinja"
    template.write_text(TEMPLATES["hermes"])
    with served_model(tmp_path, "--template", str(template)) as served:
        served.serve("s2", [served.invite, "--memory", "1"], "3:6")
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=300) as client:
            calls(client)  # the client learns of the new server, and the grammar's process starts
            began = time.monotonic()
            wanted, failovers = calls(client)
            took = time.monotonic() - began
            assert len(set(wanted.values())) == ANSWERS and failovers == 0
            struck = served.processes[1]
            timer = threading.Timer(0.4 * took, struck.send_signal, [strike])
            timer.start()
            found, failovers = calls(client)
            timer.join()
            print(
                f"  {failovers} of {ANSWERS} answers replaced their server; undisturbed they took {took:.1f} s",
                flush=True,
            )
            assert found == wanted and 0 < failovers <= ANSWERS
            struck.send_signal(signal.SIGCONT)
