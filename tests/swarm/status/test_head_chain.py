"""The chain of heads that the monitor keeps: news, gaps, undone rounds, bounds."""

from __future__ import annotations

import msgspec
import pytest

from swarm.protocol.head import Head
from swarm.status import head_chain
from swarm.status.head_chain import HeadChain
from tests.swarm.status.scenes import finite, heads_of, next_head


def chained(heads: list[Head]) -> HeadChain:
    chain = HeadChain()
    for place, head in enumerate(heads):
        chain.advance(head, [], float(place))
    return chain


def test_news_is_what_is_further() -> None:
    heads = heads_of(finite(), "abc", 3)
    chain = chained(heads)
    assert chain.heads == heads and not any(chain.is_news(head) for head in heads)
    assert chain.is_news(next_head(heads[-1]))
    assert (chain.counts["committed"], chain.counts["regroups"], chain.counts["merged"]) == (3, 1, 9)


def test_rounds_that_came_between_two_readings_are_counted_once() -> None:
    heads = heads_of(finite(), "abc", 4)
    chain = chained(heads[:3])
    chain.advance(heads[-1], heads[3:-1], 9.0)
    assert chain.heads == heads and chain.counts["committed"] == 4


def test_rounds_are_timed_from_commit_to_commit() -> None:
    """Not the first head, which may have been there for long; those that came at one reading share the time."""
    heads = heads_of(finite(), "abc", 4)
    chain = HeadChain()
    for head, now in zip(heads[:4], (100.0, 104.0, 112.0, 115.0), strict=True):
        chain.advance(head, [], now)
    assert [count for _, count in chain.round_times.buckets[3:6]] == [1, 2, 2] and chain.round_times.total_s == 8 + 3
    apart = next_head(next_head(heads[4]))
    chain.advance(apart, [heads[4], next_head(heads[4])], 121.0)
    assert chain.round_times.counts[3] == 4 and chain.round_times.total_s == 8 + 3 + 6
    again = msgspec.structs.replace(apart, term=2, previous=apart.hash, attempt=-1)
    chain.advance(again, [], 150.0)
    assert chain.round_times.total_s == 17, "a new term is no round"
    unseen = next_head(next_head(next_head(again)))
    chain.advance(unseen, [], 160.0)
    assert chain.round_times.total_s == 17, "nothing is known of a gap"


def test_undone_rounds_are_forgotten() -> None:
    heads = heads_of(finite(), "abc", 4)
    chain = chained(heads)
    again = msgspec.structs.replace(heads[3], term=2, previous=heads[3].hash, attempt=-1)
    chain.advance(again, [heads[2], heads[3]], 9.0)
    assert chain.heads == [*heads[:4], again] and chain.counts["regroups"] == 2


def test_a_gap_makes_a_new_chain() -> None:
    heads = heads_of(finite(), "abc", 6)
    chain = chained(heads[:3])
    chain.advance(heads[-1], heads[5:-1], 9.0)
    assert chain.heads == heads[5:] and chain.wants_older and chain.counts["committed"] == 1
    chain.extend_back(heads[:5])
    assert chain.heads == heads and not chain.wants_older


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_chain, "HEADS_MAX", 4)
    chain = chained(heads_of(finite(), "abc", 9))
    assert [head.round for head in chain.heads] == [6, 7, 8, 9] and len(chain.seen_at) == 4 and not chain.wants_older
