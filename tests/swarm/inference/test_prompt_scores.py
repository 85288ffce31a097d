"""The scores of a prompt at the client: from scripted servers, good ones, lost ones, and bad ones of every kind."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from peer.ipc.sampling_options import PROMPT_LOGPROBS, Sampling
from swarm.inference.messages import PromptLogprobs, ServingMessage
from swarm.inference.prompt_scores import PromptScores, PromptToken
from swarm.inference.record import SessionNeeds
from swarm.inference.resume import resume
from tests.swarm.inference.scripted_servers import MODEL, Scene, ScriptedServer, answer_to, score_of

SCORED = Sampling(logprobs=2, prompt_logprobs=True)
PROMPT = [(5 * at + 3) % 300 for at in range(200)]
RIGHT = [PromptToken(PROMPT[0]), *(PromptToken(token, *score_of(at, token)) for at, token in enumerate(PROMPT) if at)]


async def answer(session: Any, count: int = 8) -> list[int]:
    """Return the answer to the prompt; its scores are complete with the first token."""
    said = list[int]()
    with trio.fail_after(600):
        async for drawn in session.generate(PROMPT, count):
            said.append(drawn.token)
            assert session.drawing.scores.is_complete and session.drawing.scores.of(session.tokens) == RIGHT
    session.close()
    return said


async def test_scores_come_with_the_first_token(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        scene = Scene(nursery)
        scene.join(ScriptedServer(scene, "first", 0, 3))
        scene.join(ScriptedServer(scene, "last", 3, 6))
        assert await answer(scene.session(SCORED)) == answer_to(PROMPT, 8)
        assert await answer(scene.session(SCORED), 0) == answer_to(PROMPT, 1), "an answer of none has one to drop"
        assert len(PROMPT) > 32 and {start.names for start in scene.begun} == {()}, "kept pages have no scores"
        assert {start.sampling.counted_from for start in scene.begun} == {len(PROMPT)}
        plain = scene.session(Sampling(logprobs=2))
        async for _ in plain.generate(PROMPT, 1):
            assert plain.drawing.scores.is_complete and scene.begun[-1].names
        plain.close()
        nursery.cancel_scope.cancel()


class Dying(ScriptedServer):
    """Sends half of its scores, and is gone; or it only loses its flow."""

    def __init__(self, scene: Scene, peer: str, returns: bool) -> None:
        super().__init__(scene, peer, 3, 6, step_ms=0.001)
        self._returns, self.rescored = returns, list[range]()

    def score(self, held: Any, positions: range) -> None:
        half = len(positions) // 2
        if self.starts == 1:
            super().score(held, positions[:half])
            self.is_open = False
            if self._returns:
                self.scene.nursery.start_soon(self._return)
            else:
                self.scene.servers.pop(self.peer)
            self.scene.flow_ended(self)
        else:
            self.rescored.append(positions)
            super().score(held, positions[half:])  # as of tokens that waited before it was told to go back
            super().score(held, positions)

    async def _return(self) -> None:
        await trio.sleep(0.1)
        self.is_open = True

    async def _take(self, message: Any) -> None:
        if self.is_open:
            await super()._take(message)


@pytest.mark.parametrize("returns", [False, True])
async def test_a_lost_server_is_replaced_and_each_position_comes_once(
    autojump_clock: trio.testing.MockClock, returns: bool
) -> None:
    async with trio.open_nursery() as nursery:
        scene = Scene(nursery)
        dying = Dying(scene, "dies", returns)
        scene.join(ScriptedServer(scene, "first", 0, 3))
        scene.join(dying)
        if not returns:
            scene.join(ScriptedServer(scene, "last", 3, 6))
        session = scene.session(SCORED)
        assert await answer(session) == answer_to(PROMPT, 8)
        assert session.failovers == (not returns) and session.route[-1].peer == ("dies" if returns else "last")
        assert (99 in [positions[0] for positions in dying.rescored]) == returns
        nursery.cancel_scope.cancel()


def scores(start: int, count: int, **changes: Any) -> tuple[Any, ...]:
    given = [score_of(at, PROMPT[at]) for at in range(start, start + count)]
    for number, score in changes.items():
        given[int(number[1:])] = score
    return tuple(given)


BAD = {
    "beyond the prompt": (150, scores(150, 50) + scores(1, 1)),
    "no likeliest": (1, scores(1, 10, n3=(-1.0, ()))),
    "one too few": (1, scores(1, 10, n9=(-1.0, ((1, -0.5),)))),
    "one too many": (1, scores(1, 10, n9=(-1.0, ((1, -0.5), (2, -0.5), (3, -0.5))))),
    "a token twice": (1, scores(1, 10, n0=(-1.0, ((1, -0.5), (1, -0.6))))),
    "no token of the model": (1, scores(1, 10, n0=(-1.0, ((300, -0.5), (1, -0.6))))),
    "in no order": (1, scores(1, 10, n0=(-1.0, ((1, -0.6), (2, -0.5))))),
    "likelier than the likeliest": (1, scores(1, 10, n0=(-0.1, ((1, -0.5), (2, -0.6))))),
    "more than certain": (1, scores(1, 10, n0=(-1.0, ((1, 0.5), (2, -0.6))))),
}


class Wrong(ScriptedServer):
    """Claims to be quick, and sends scores that no good server does."""

    def __init__(self, scene: Scene, kind: str) -> None:
        super().__init__(scene, "wrong", 3, 6, step_ms=0.001)
        self._kind = kind

    def score(self, held: Any, positions: range) -> None:
        if self._kind != "none":
            at, given = BAD[self._kind]
            self.tell(PromptLogprobs(held.start.session, held.start.revision, at, given))


@pytest.mark.parametrize("kind", [*BAD, "none"])
async def test_a_server_with_wrong_scores_is_replaced(autojump_clock: trio.testing.MockClock, kind: str) -> None:
    async with trio.open_nursery() as nursery:
        scene = Scene(nursery)
        wrong = Wrong(scene, kind)
        for server in (ScriptedServer(scene, "first", 0, 3), wrong, ScriptedServer(scene, "last", 3, 6)):
            scene.join(server)
        session = scene.session(SCORED)
        assert await answer(session) == answer_to(PROMPT, 8)
        assert wrong.starts and (session.route[-1].peer == "last" or kind == "none"), "its tokens are right"
        nursery.cancel_scope.cancel()


def test_scores_are_taken_once_and_in_order() -> None:
    found = PromptScores(SCORED, MODEL.vocab_size)
    found.begin(len(PROMPT))
    for at, count, have in ((1, 60, 60), (30, 64, 93), (1, 20, 93), (95, 10, 93), (94, 64, 157), (158, 42, 199)):
        assert found.take(PromptLogprobs(b"s" * 16, 1, at, scores(at, count)))
        assert found.row(201) == (have if have < 199 else 200) and found.is_complete == (have == 199)
    assert found.of([*PROMPT, 4]) == RIGHT
    found.forget()
    assert not found.is_complete and found.row(201) == 0
    unasked = PromptScores(Sampling(logprobs=2), MODEL.vocab_size)
    unasked.begin(len(PROMPT))
    assert unasked.is_complete and not unasked.take(PromptLogprobs(b"s" * 16, 1, 1, scores(1, 5)))


def test_a_last_server_with_a_new_flow_goes_back_to_the_first_row_without_a_score() -> None:
    then = resume([200, 200], 200, [False, True], 0, 64)
    assert then.rewinds == {1: 64} and then.replays == {0: 64}
    then = resume([200, 200], 200, [True, True], 0, 64)
    assert then.rewinds == {0: 64, 1: 64} and then.feed == 64
    then = resume([200, 200], 200, [True, False], 0, 64)
    assert then.rewinds == {}, "its scores are on their way"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -2e9])
def test_no_number_that_is_none_passes(bad: float) -> None:
    message = PromptLogprobs(b"s" * 16, 1, 1, ((-0.5, ((1, bad),)),))
    for sent in (message, PromptLogprobs(b"s" * 16, 1, 1, ((bad, ((1, -0.5),)),))):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=ServingMessage)
    assert msgspec.msgpack.decode(
        msgspec.msgpack.encode(PromptLogprobs(b"s" * 16, 1, 1, scores(1, 3))), type=ServingMessage
    )


def test_only_servers_that_know_it_are_asked() -> None:
    assert SCORED.options == (PROMPT_LOGPROBS,) and SessionNeeds(options=SCORED.options).options == ("prompt_logprobs",)
    with pytest.raises(ValueError, match="prompt_logprobs needs logprobs: set it"):
        Sampling(prompt_logprobs=True)
