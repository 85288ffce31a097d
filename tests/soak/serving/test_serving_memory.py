"""Ten thousand requests to a served model: neither its servers, their workers nor the gateway and its processes grow.

REQUESTS (default 10000) comes from the environment.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import httpx2
import psutil
import pytest
import trio

from tests.support.process_weight import ProcessWeight
from tests.swarm.gateway.served_model import KEY, NAME, ServedModel, served_model

pytestmark = [pytest.mark.soak, pytest.mark.process]
REQUESTS: Final = int(os.environ.get("REQUESTS", "10000"))
AT_ONCE: Final = 8
NAMES: Final = ("first server", "second server", "gateway")
CHILDREN: Final = 4  # a worker of each server; the gateway's tokenizer and its template
SAMPLES: Final = 100
WARM_UP_SHARE: Final = 0.25  # of the requests: the keys and values have touched all of their memory by then
GROWTH_MAX: Final = 0.05
GROWTH_MAX_BYTES: Final = 8e6  # the allocator's arenas, and the 10,000 words that the tokenizers library remembers
FILES_MAX: Final = 4
CACHE_GB: Final = 0.01  # --memory of a server: its pages are soon used and used again


class Requests:
    """Requests of several kinds, so many at once, and what the processes weigh between them."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.weights: dict[str, ProcessWeight] = {}
        self.answered = 0
        self._next = 0

    async def run(self) -> None:
        async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=120) as client:
            for goal in range(REQUESTS // SAMPLES, REQUESTS + 1, REQUESTS // SAMPLES):
                async with trio.open_nursery() as nursery:
                    for _ in range(AT_ONCE):
                        nursery.start_soon(self._ask_until, client, goal)
                self._sample()

    async def _ask_until(self, client: httpx2.AsyncClient, goal: int) -> None:
        while self._next < goal:
            number, self._next = self._next, self._next + 1
            drawn = {"max_tokens": 4 + number % 5, "stream": number % 3 == 0, "temperature": number % 2}
            body: dict[str, Any] = {"model": NAME, **drawn}
            if number % 4:
                path, body["prompt"] = "completions", f"{number} " + "the rain \u20ac " * (number % 7)
            else:
                path, body["messages"] = "chat/completions", [{"role": "user", "content": f"{number} 🙂"}]
            answer = await client.post(f"{self.served.url}/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
            self.answered += 1

    def _sample(self) -> None:
        for name, process in zip(NAMES, self.served.processes, strict=True):
            mine = psutil.Process(process.pid)
            for one in (mine, *mine.children(recursive=True)):
                part = "" if one == mine else f", child {one.pid}"
                self.weights.setdefault(f"{name}{part}", ProcessWeight()).sample(one.pid)


async def test_memory_is_flat_over_ten_thousand_requests(tmp_path: Path) -> None:
    with served_model(tmp_path, memory_gb=CACHE_GB) as served:
        requests = Requests(served)
        await requests.run()
    heavier = []
    for name, weight in requests.weights.items():
        early, late = weight.early_and_late(weight.rss, WARM_UP_SHARE)
        few, many = weight.early_and_late(weight.files, WARM_UP_SHARE)
        print(f"  {name}: memory {early / 1e6:.1f} -> {late / 1e6:.1f} MB, open files {few:g} -> {many:g}", flush=True)
        if late - early > max(GROWTH_MAX * early, GROWTH_MAX_BYTES) or many - few > FILES_MAX:
            heavier.append(name)
    assert requests.answered == REQUESTS
    assert all(len(weight.rss) >= SAMPLES - SAMPLES // 10 for weight in requests.weights.values()), "none was replaced"
    assert len(requests.weights) >= len(NAMES) + CHILDREN
    assert not heavier
