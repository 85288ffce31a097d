"""SIGTERM of `peer api` in the middle of answers: each stream ends with an error within two seconds."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.swarm.gateway.scripted import Site, answer_of, events_of
from tests.swarm.gateway.served_model import KEY, NAME, served_model

pytestmark = [pytest.mark.soak, pytest.mark.process]
STREAMS: Final = 12
END_S: Final = 2.0
ASK: Final = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4000, "stream": True}


async def test_streams_end_with_an_error_within_two_seconds(tmp_path: Path) -> None:
    with served_model(tmp_path) as served:
        site, body = Site(served.url), json.dumps(ASK).encode()
        took, last = list[float](), list[object]()
        began = 0.0
        flowing = [trio.Event() for _ in range(STREAMS)]

        async def one(number: int) -> None:
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
            began = time.monotonic()
            served.processes[-1].send_signal(signal.SIGTERM)
        print(f"  {STREAMS} streams ended {max(took):.2f} s after SIGTERM", flush=True)
        assert last == ["server_stopping"] * STREAMS and max(took) < END_S
        assert served.processes[-1].wait(60) == 143
