"""`peer api` among clients that open what they never use: a client with a key is answered within two seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Final

import pytest
import trio

from swarm.web.places import CONNECTIONS_MAX
from tests.swarm.gateway.scripted import Site
from tests.swarm.gateway.served_model import KEY, NAME, ServedModel, served_model
from tests.swarm.gateway.test_doors import CHAT, NO_WINDOW, PREFACE

pytestmark = [pytest.mark.soak, pytest.mark.process]
SILENT: Final = 600
HTTP2: Final = 100
ENDLESS: Final = 32
AT_ONCE: Final = 100
ANSWER_S: Final = 2.0
ASK: Final = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
BEARER: Final = f"Bearer {KEY}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    with served_model(tmp_path_factory.mktemp("served"), "--at-once", str(AT_ONCE)) as model:
        yield model


async def answered(site: Site) -> float:
    """Ask for a token; return after how many seconds it was there."""
    began = time.monotonic()
    status, _, told = await site.post(CHAT, ASK, Authorization=BEARER)
    assert status == 200, told
    return time.monotonic() - began


async def crowd(site: Site, stack: AsyncExitStack) -> None:
    """Open all that is never used."""
    for number in range(SILENT + HTTP2 + ENDLESS):
        stream = await stack.enter_async_context(await site.open())
        if number >= SILENT + HTTP2:
            await stream.send_all(site.head("POST", CHAT, 1000, Authorization=BEARER) + b"{")
        elif number >= SILENT:
            await stream.send_all(PREFACE + NO_WINDOW)


async def slowest(site: Site, count: int) -> float:
    """Ask so many times at once; return after how many seconds the last one was answered."""
    took = list[float]()

    async def one() -> None:
        took.append(await answered(site))

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(one)
    assert len(took) == count
    return max(took)


async def test_one_request_and_a_hundred_at_once_among_them(served: ServedModel) -> None:
    """The hundred compute for longer than two seconds on two cores: they are held against a hundred by themselves."""
    assert SILENT > CONNECTIONS_MAX
    site = Site(served.url)
    await answered(site)  # it has a route now
    alone_s = await slowest(site, AT_ONCE)
    async with AsyncExitStack() as stack:
        await crowd(site, stack)
        one_s = await answered(site)
        hundred_s = await slowest(site, AT_ONCE)
    beside = f"beside {SILENT + HTTP2 + ENDLESS} connections one took {one_s:.2f} s, {AT_ONCE} {hundred_s:.2f} s"
    print(f"  {beside}, without them {alone_s:.2f} s", flush=True)
    assert one_s < ANSWER_S and hundred_s < max(ANSWER_S, 2 * alone_s)
