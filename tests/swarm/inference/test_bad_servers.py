"""One bad server beside honest ones of the same blocks: every answer is right, and soon as quick as without it.

The session, its judge and what the client knows of servers are the real ones; the servers are scripted, and time is the
mock clock's. With real processes: tests/soak.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from peer.errors import NetworkError
from peer.ipc.sampling_options import Sampling
from swarm.inference.conduct import ServerConduct
from swarm.inference.messages import PassTokens
from tests.swarm.inference.scripted_servers import BadServer, Scene, ScriptedServer, answer_to

MODES = (
    ["value"],
    ["not_finite"],
    ["shape"],
    ["gap"],
    ["mute"],
    ["dumb"],
    ["late"],
    ["have"],
    ["token"],
    ["position"],
    ["forger"],
    ["flood"],
    ["neighbour"],
    ["stranger"],
    ["full"],
    ["lost"],
    ["commit"],
    ["value", "mute", "gap", "have", "neighbour", "late"],
)
PLACES = {"first": (0, 3), "last": (3, 6), "all": (0, 6)}
ANSWERS, TOKENS = 6, 16


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with trio.open_nursery() as nursery:
        made = Scene(nursery)
        yield made
        nursery.cancel_scope.cancel()


async def asked(swarm: Scene, number: int) -> float:
    """Have an answer of its own computed, check it and return the seconds that it took."""
    prompt = [(number * 31 + at) % 300 for at in range(20)]
    began, session = trio.current_time(), swarm.session()
    with trio.fail_after(120):
        said = [drawn.token async for drawn in session.generate(prompt, TOKENS)]
    session.close()
    assert said == answer_to(prompt, TOKENS)
    return trio.current_time() - began


async def quiet_s() -> float:
    """Return what an answer takes without a bad server."""
    async with scene() as swarm:
        swarm.join(ScriptedServer(swarm, "h0", 0, 3))
        swarm.join(ScriptedServer(swarm, "h1", 3, 6))
        return max([await asked(swarm, number) for number in range(3)])


@pytest.mark.parametrize(
    ("modes", "place"),
    [
        pytest.param(modes, place, id=f"{' '.join(modes)}, {place}")
        for modes in MODES
        for place in PLACES
        if modes != ["forger"] or place == "first"  # the last one's word is the answer
    ],
)
async def test_one_bad_server(modes: Sequence[str], place: str, autojump_clock: trio.testing.MockClock) -> None:
    usual_s = await quiet_s()
    async with scene() as swarm:
        swarm.join(ScriptedServer(swarm, "h0", 0, 3))
        swarm.join(ScriptedServer(swarm, "h1", 3, 6))
        swarm.join(BadServer(swarm, "bad", *PLACES[place], modes))
        began = trio.current_time()
        took = [await asked(swarm, number) for number in range(ANSWERS)]
        starts = sum(server.starts for server in swarm.servers.values())
    assert took[0] < 10
    assert max(took[1:]) < usual_s + 1, took
    assert starts < 2 * ANSWERS + 5 * (trio.current_time() - began)


async def test_two_that_blame_others(autojump_clock: trio.testing.MockClock) -> None:
    usual_s = await quiet_s()
    async with scene() as swarm:
        swarm.join(ScriptedServer(swarm, "h0", 0, 3))
        swarm.join(ScriptedServer(swarm, "h1", 3, 6))
        for name, blocks in (("b0", (0, 3)), ("b1", (3, 6)), ("b2", (3, 6))):
            swarm.join(BadServer(swarm, name, *blocks, ["value", "neighbour"]))
        took = [await asked(swarm, number) for number in range(ANSWERS)]
    assert took[0] < 10 and max(took[1:]) < usual_s + 1, took


@pytest.mark.parametrize("mode", ["value", "mute", "gap", "neighbour"])
async def test_only_a_bad_server_ends_with_one_error(mode: str, autojump_clock: trio.testing.MockClock) -> None:
    """Without another one there is no answer; there is an end, and few sessions are begun until then."""
    async with scene() as swarm:
        swarm.join(ScriptedServer(swarm, "h0", 0, 3))
        swarm.join(BadServer(swarm, "bad", 3, 6, [mode]))
        session, began = swarm.session(), trio.current_time()
        with trio.fail_after(120), pytest.raises(NetworkError, match="try again"):
            async for _ in session.generate([1, 2, 3], 4):
                pass
        assert swarm.servers["h0"].starts <= 2 + 5 * (trio.current_time() - began)


async def test_every_server_is_told_where_the_answer_begins(autojump_clock: trio.testing.MockClock) -> None:
    """Also one that takes over in the middle of it, and those of the next answer; not of an answer that continues."""
    sampling = Sampling(frequency_penalty=0.5)
    async with scene() as swarm:
        for name, blocks in (("h0", (0, 3)), ("h1", (3, 6)), ("h2", (3, 6))):
            swarm.join(ScriptedServer(swarm, name, *blocks))
        session = swarm.session(sampling)
        async with aclosing(session.generate([1, 2, 3], 6)) as tokens:
            said = [(await anext(tokens)).token, (await anext(tokens)).token]
            swarm.servers[session.route[1].peer].is_open = False
            said += [drawn.token async for drawn in tokens]
        assert session.failovers == 1 and said == answer_to([1, 2, 3], 6)
        assert {start.sampling for start in swarm.begun} == {replace(sampling, counted_from=3)}
        first, swarm.begun = swarm.begun, []
        said = [drawn.token async for drawn in session.generate([], 4)]
        assert said == answer_to(session.tokens[:9], 4) and swarm.begun == []
        said = [drawn.token async for drawn in session.generate([4, 5], 4)]
        assert said == answer_to(session.tokens[:15], 4)
        assert {start.sampling.counted_from for start in swarm.begun} == {15}
        assert not {start.session for start in swarm.begun} & {start.session for start in first}


async def test_a_closed_session_ends_at_every_server_within_one_step(autojump_clock: trio.testing.MockClock) -> None:
    """Though the servers may draw up to 32 tokens ahead of the client."""
    async with scene() as swarm:
        first, last = ScriptedServer(swarm, "h0", 0, 3), ScriptedServer(swarm, "h1", 3, 6)
        for server in (first, last):
            swarm.join(server)
        session = swarm.session()
        async with aclosing(session.generate([1, 2, 3], 1000)) as tokens:
            for _ in range(5):
                await anext(tokens)
        assert first.holds == last.holds == 1
        session.close()
        await trio.sleep(first.rtt_s)  # the trip of the message
        await trio.testing.wait_all_tasks_blocked()
        assert first.holds == last.holds == 0


class SlowServer(ScriptedServer):
    """An honest one on a machine that has other things to do."""

    token_s = 1.0

    async def compute(self, held: Any, message: PassTokens) -> None:
        await trio.sleep(self.token_s)
        await super().compute(held, message)


@pytest.mark.parametrize(("token_s", "replaced"), [(1.0, 2), (7.0, 4)])
async def test_all_may_be_slow(token_s: float, replaced: int, autojump_clock: trio.testing.MockClock) -> None:
    """Two servers of all blocks, far slower than they say: there is an answer, and few changes between them."""
    async with scene() as swarm:
        for name in ("a", "b"):
            server = SlowServer(swarm, name, 0, 6)
            server.token_s = token_s
            swarm.join(server)
        session = swarm.session()
        with trio.fail_after(600):
            said = [drawn.token async for drawn in session.generate([1, 2, 3], TOKENS)]
        assert said == answer_to([1, 2, 3], TOKENS)
        assert session.failovers <= replaced


def test_many_keys_of_one_prefix_put_no_good_server_aside() -> None:
    """Complaints count by address prefix; of one that complains of several none is believed."""
    conduct = ServerConduct(clock=lambda: 0.0)
    for key in map(str, range(9)):
        assert conduct.suspects(key, "one", "good", key)[0] == key
    assert conduct.suspects("honest", "another", "good", "honest")[0] == "good", "two prefixes say so"
    assert conduct.suspects("key 9", "one", "also good", "also good")[0] == "key 9"
