"""Servers that are killed during an answer: it goes on, each counts as replaced once, and no other is blamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import trio
import trio.testing

from swarm.inference.session import RemoteSession
from tests.swarm.inference.scripted_servers import Scene, ScriptedServer, answer_to

PROMPT = [7 * at % 300 for at in range(40)]
TOKENS = 12


@asynccontextmanager
async def scene(*names: str) -> AsyncIterator[Scene]:
    """Open a scene with `first` before the servers of these names, each quicker than the next."""
    async with trio.open_nursery() as nursery:
        made = Scene(nursery)
        made.join(ScriptedServer(made, "first", 0, 3))
        for number, name in enumerate(names):
            made.join(ScriptedServer(made, name, 3, 6, step_ms=5.0 + 10 * number))
        yield made
        nursery.cancel_scope.cancel()


def kill(swarm: Scene, *names: str) -> None:
    """End servers, the flows with them, and whatever is still to be connected to; their records stay for a while."""
    for name in names:
        swarm.dead.add(name)
        swarm.servers[name].is_open = False
        swarm.flow_ended(swarm.servers[name])


async def said_without(swarm: Scene, session: RemoteSession, *killed: str) -> Sequence[int]:
    """Return an answer of which these servers are killed in the midst."""
    with trio.fail_after(60):
        async with aclosing(session.generate(PROMPT, TOKENS)) as tokens:
            said = [(await anext(tokens)).token for _ in range(3)]
            kill(swarm, *killed)
            return said + [drawn.token async for drawn in tokens]


async def test_a_server_that_began_with_kept_pages_computes_them_for_the_next_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It has no output of them to send again. So it was refused three times, and then blamed and replaced, too."""
    async with scene("h1", "h2") as swarm:
        first = swarm.servers["first"]
        first.pages = swarm.servers["h1"].pages = PROMPT[:32]
        session = swarm.session()
        said = await said_without(swarm, session, "h1")
        assert said == answer_to(PROMPT, TOKENS) and session.failovers == 1
        assert [hop.peer for hop in session.route] == ["first", "h2"]
        assert (first.starts, first.refusals) == (2, 0)
        assert swarm.view.conduct.without("all") == {"h1"}


async def test_a_server_that_has_let_go_of_its_output_computes_it_again(autojump_clock: trio.testing.MockClock) -> None:
    """As after a long text: the client learns of it by one refusal."""
    async with scene("h1", "h2") as swarm:
        first = swarm.servers["first"]
        session = swarm.session()
        async with aclosing(session.generate(PROMPT, TOKENS)) as tokens:
            said = [(await anext(tokens)).token for _ in range(3)]
            first.forget_output(session.id)
            kill(swarm, "h1")
            said += [drawn.token async for drawn in tokens]
        assert said == answer_to(PROMPT, TOKENS) and session.failovers == 1
        assert (first.starts, first.refusals) == (3, 1)
        assert swarm.view.conduct.without("all") == {"h1"}


async def test_a_server_that_was_tried_in_vain_does_not_count_as_replaced(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with scene("h1", "h2", "h3") as swarm:
        session = swarm.session()
        said = await said_without(swarm, session, "h1", "h2")
        assert said == answer_to(PROMPT, TOKENS) and session.route[-1].peer == "h3"
        assert session.failovers == 1


async def test_each_of_two_killed_servers_counts(autojump_clock: trio.testing.MockClock) -> None:
    async with scene("h1", "h2") as swarm:
        swarm.join(ScriptedServer(swarm, "other", 0, 3, step_ms=50.0))
        session = swarm.session()
        said = await said_without(swarm, session, "first", "h1")
        assert said == answer_to(PROMPT, TOKENS) and session.failovers == 2
