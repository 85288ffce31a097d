"""What was sent of a session comes again as it was, from any position that is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.serving.output_log import OutputLog, SentTokens

WIDTH = 4


def sent(position: int, count: int, draws: bool = True) -> SentTokens:
    ids = tuple(range(position, position + count))
    return SentTokens(position, ids, draws, b"".join(id.to_bytes(WIDTH, "big") for id in ids))


def check(parts: list[SentTokens], first: int, end: int) -> None:
    """The parts are the tokens [first, end), each with its bytes."""
    at = first
    for part in parts:
        assert part == sent(at, len(part.ids), part.draws)
        at = part.end
    assert at == end


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.data())
def test_a_replay_is_what_was_sent(counts: list[int], data: st.DataObject) -> None:
    log, at = OutputLog(0), 0
    for count in counts:
        log.append(sent(at, count))
        at += count
    first = data.draw(st.integers(0, at))
    known = data.draw(st.integers(0, at))
    parts = list(log.since(first, known, 64))
    check(parts, first, at)
    ends = {part.end for part in parts}
    total = 0
    for count in counts:  # each place where the client lacks the token is the end of a part
        total += count
        assert total in ends or total < known or total <= first
    assert all(len(part.ids) <= 64 or len(part.ids) in counts for part in parts)


def test_a_log_that_is_full_keeps_the_last_part() -> None:
    log = OutputLog(0, bytes_max=10 * WIDTH)
    for at in range(0, 40, 4):
        log.append(sent(at, 4))
    assert log.base == 32
    check(list(log.since(32, 99, 64)), 32, 40)
    with pytest.raises(ValueError, match="kept from 32 on"):
        list(log.since(31, 99, 64))
    log.fit(4 * WIDTH)
    assert log.base == 36


def test_a_rewound_log_goes_on_from_there() -> None:
    log = OutputLog(0)
    log.append(sent(0, 10))
    log.append(sent(10, 1))
    log.rewind(6)
    assert log.end == 6
    log.append(sent(6, 3))
    check(list(log.since(0, 99, 64)), 0, 9)
    log.append(sent(4, 2))  # as after a replay from there
    check(list(log.since(0, 99, 64)), 0, 6)


def test_an_output_that_was_computed_before_a_rewind_is_left_out() -> None:
    """It comes from the compute worker after the client's Rewind did; the next server would refuse it as a gap."""
    log = OutputLog(32)
    assert log.append(sent(32, 8)) and log.append(sent(40, 1))
    log.rewind(0)
    assert not log.append(sent(41, 1)) and (log.base, log.end) == (0, 0)
    assert log.append(sent(0, 41)) and log.append(sent(41, 1))
    check(list(log.since(0, 99, 64)), 0, 42)
