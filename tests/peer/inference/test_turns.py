"""Sessions of many clients at one engine: who has few of them does not wait for who has many."""

from __future__ import annotations

import pytest

from peer.inference.engine import REST_S, Engine
from peer.inference.step_output import StepRefused
from peer.inference.turns import ClientTurns
from peer.ipc.block_messages import PAGE_TOKENS
from peer.ipc.sampling_options import Sampling
from tests.peer.inference.golden_models import expected, prompt_of
from tests.peer.inference.test_engine import generate
from tests.peer.inference.test_golden import chain

MANY = 16


def open_for(engine: Engine, client: str, *ids: int, prefix: str = "") -> None:
    for id in ids:
        engine.open(id, Sampling(), client=client, prefix=prefix)


@pytest.fixture
def engine() -> Engine:
    (engine,) = chain("llama3", [(0, 3)], chunk_tokens=32)
    return engine


def test_prompts_of_many_sessions_do_not_hold_up_the_one_of_another_client(engine: Engine) -> None:
    open_for(engine, "many", *range(MANY))
    open_for(engine, "one", MANY)
    for id in range(MANY + 1):
        engine.submit(id, 0, prompt_of(96), None, samples=True)
    steps = [output.session for _ in range(6) for output in engine.step()]
    assert steps.count(MANY) == 3 and len(set(steps)) == 4, "three chunks of it, one each of three others"


def test_each_step_has_a_row_of_each_client(engine: Engine) -> None:
    engine.rows_max = 2
    open_for(engine, "many", *range(MANY))
    open_for(engine, "one", MANY)
    positions = [0] * (MANY + 1)
    for _ in range(20):
        for id, position in enumerate(positions):
            engine.submit(id, position, [5], None, samples=True)
        outputs = engine.step()
        for output in outputs:
            positions[output.session] += 1
        assert [output.session == MANY for output in outputs].count(True) == 1
    assert min(positions[:MANY]) >= 1, "those of one client take turns, too"


def test_clients_that_wait_longer_come_first() -> None:
    turns = ClientTurns[tuple[str, int]](lambda one: ("", one[0]))
    waiting = [("a", 1), ("a", 2), ("b", 1), ("c", 1)]
    turns.had([("a", 0), ("b", 0)])
    turns.had([("a", 0)])
    assert turns.ordered(waiting) == [("c", 1), ("b", 1), ("a", 1), ("a", 2)]
    turns.keep([("", "b"), ("", "c")])
    assert turns.ordered(waiting)[0] == ("a", 1)


def test_a_client_has_all_pages_until_another_one_needs_its_share() -> None:
    now = [0.0]
    (engine,) = chain("llama3", [(0, 3)])
    engine.pool.pages, engine._clock = 8, lambda: now[0]
    for id in range(4):
        now[0] += 1
        open_for(engine, "many", id)
        engine.submit(id, 0, prompt_of(2 * PAGE_TOKENS), None, samples=True)
    while engine.step():
        pass
    assert engine.pool.free_pages == 0
    now[0] += 1
    engine.submit(0, 2 * PAGE_TOKENS - 1, [5], None, samples=False)  # known already: no sign of use
    open_for(engine, "one", 9)
    assert generate(engine, 9, prompt_of(17), 4) == expected("llama3", 17, 64)[:4]
    assert engine.ended == [0], "the one that has rested longest"
    with pytest.raises(StepRefused) as refused:
        open_for(engine, "many", 5)
        engine.submit(5, 0, prompt_of(3 * PAGE_TOKENS), None, samples=True)
    assert refused.value.cause == "full" and engine.ended == [0], "it takes nothing from who is within its share"


def test_the_last_session_of_a_client_ends_only_once_it_rests() -> None:
    now = [0.0]
    (engine,) = chain("llama3", [(0, 3)])
    engine.pool.pages, engine._clock = 4, lambda: now[0]
    open_for(engine, "first", 1)
    engine.submit(1, 0, prompt_of(4 * PAGE_TOKENS), None, samples=True)
    now[0] += REST_S
    with pytest.raises(StepRefused):
        open_for(engine, "second", 2)  # the first one waits for its turn
    engine.step()
    now[0] += REST_S / 2
    with pytest.raises(StepRefused):
        open_for(engine, "second", 2)
    now[0] += REST_S / 2
    open_for(engine, "second", 2)
    assert engine.ended == [1] and engine.sessions == 1


def test_many_keys_of_one_prefix_have_one_share_of_the_turns(engine: Engine) -> None:
    for id in range(MANY):
        open_for(engine, f"key {id}", id, prefix="theirs")
    open_for(engine, "one", MANY, prefix="mine")
    for id in range(MANY + 1):
        engine.submit(id, 0, prompt_of(96), None, samples=True)
    steps = [output.session for _ in range(6) for output in engine.step()]
    assert steps.count(MANY) == 3 and len(set(steps)) == 4, "three chunks of it, one each of three others"


def test_a_new_key_of_a_prefix_does_not_come_before_another_prefix() -> None:
    turns = ClientTurns[tuple[str, str]](lambda one: one)
    turns.had([("theirs", "old"), ("mine", "me")])
    turns.had([("theirs", "old")])
    waiting = [("theirs", "old"), ("theirs", "new"), ("mine", "me")]
    assert turns.ordered(waiting) == [("mine", "me"), ("theirs", "new"), ("theirs", "old")]


def test_many_keys_of_one_prefix_have_one_share_of_the_pages() -> None:
    now = [0.0]
    (engine,) = chain("llama3", [(0, 3)])
    engine.pool.pages, engine._clock = 16, lambda: now[0]
    for id in range(8):
        open_for(engine, f"key {id}", id, prefix="theirs")
        engine.submit(id, 0, prompt_of(2 * PAGE_TOKENS), None, samples=True)  # and it waits: not one of them rests
    assert engine.pool.free_pages == 0
    open_for(engine, "one", 9, prefix="mine")
    engine.submit(9, 0, prompt_of(8 * PAGE_TOKENS), None, samples=True)
    assert len(engine.ended) == 4 and engine.pool.free_pages == 0, "half of all pages for each prefix"
    with pytest.raises(StepRefused):
        open_for(engine, "key 8", 10, prefix="theirs")
    assert len(engine.ended) == 4
