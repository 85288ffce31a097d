"""SIGTERM of `peer api` in the middle of answers: each stream ends with an error within two seconds, also one that
follows a schema, and one whose schema is still being compiled."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import trio

from tests.swarm.gateway.scripted import Site, answer_of, events_of
from tests.swarm.gateway.served_model import KEY, NAME, served_model

pytestmark = [pytest.mark.soak, pytest.mark.process]
STREAMS: Final = 12
HOSTILE: Final = 3
END_S: Final = 2.0
ASK: Final = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4000, "stream": True}


def bound_by(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the ask for an answer that follows a schema."""
    form = {"name": "form", "strict": True, "schema": schema}
    return ASK | {"response_format": {"type": "json_schema", "json_schema": form}}


def answering(pid: int) -> list[psutil.Process]:
    """Return the processes of answers that follow schemas."""
    programs = psutil.Process(pid).children()
    return [fork for program in programs for fork in program.children()]


LONG: Final = bound_by({"type": "array", "minItems": 3000, "items": {"type": "integer"}})
WIDE: Final = bound_by({"type": "object", "properties": {f"p{n}": {} for n in range(6000)}})
"""It takes seconds to compile, and is refused."""


async def test_streams_end_with_an_error_within_two_seconds(tmp_path: Path) -> None:
    with served_model(tmp_path) as served:
        site = Site(served.url)
        took, last = list[float](), list[object]()
        began = 0.0
        asked = trio.Event()
        flowing = [trio.Event() for _ in range(STREAMS)]

        async def hostile() -> None:
            body = json.dumps(WIDE).encode()
            async with await site.open() as stream:
                head = site.head("POST", "/v1/chat/completions", len(body), Authorization=f"Bearer {KEY}")
                await stream.send_all(head + body)
                asked.set()
                _, _, rest = await answer_of(stream, b"")
                took.append(time.monotonic() - began)
                assert b"server_stopping" in rest

        async def one(number: int) -> None:
            body = json.dumps(LONG if number % 2 else ASK).encode()
            async with await site.open() as stream:
                head = site.head("POST", "/v1/chat/completions", len(body), Authorization=f"Bearer {KEY}")
                await stream.send_all(head + body)
                begin = b""
                while b"data: " not in begin:
                    begin += await stream.receive_some()
                flowing[number].set()
                _, _, rest = await answer_of(stream, begin)
                took.append(time.monotonic() - began)
                last.append(events_of(rest)[-1]["error"]["code"])

        async with trio.open_nursery() as nursery:
            for number in range(STREAMS):
                nursery.start_soon(one, number)
            for event in flowing:
                await event.wait()
            for _ in range(HOSTILE):
                nursery.start_soon(hostile)
            await asked.wait()
            while len(answering(served.processes[-1].pid)) < STREAMS // 2 + HOSTILE:
                await trio.sleep(0.01)
            began = time.monotonic()
            served.processes[-1].send_signal(signal.SIGTERM)
        print(f"  {STREAMS} streams ended {max(took):.2f} s after SIGTERM", flush=True)
        assert last == ["server_stopping"] * STREAMS and max(took) < END_S
        assert served.processes[-1].wait(60) == 143
