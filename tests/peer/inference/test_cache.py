"""Room for keys and values: counted before it is taken, whatever sessions come and go."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.inference.cache import CacheFull, CachePool, CacheShape, SessionCache, pages_of
from peer.ipc.block_messages import PAGE_TOKENS

SHAPE = CacheShape(2, 1, 4, torch.float32, torch.device("cpu"), tokens_max=40 * PAGE_TOKENS)


def names_of(text: str) -> tuple[bytes, ...]:
    """Name pages after all letters up to each."""
    return tuple(text[: end + 1].encode() for end in range(len(text)))


def fill(pool: CachePool, cache: SessionCache, text: str) -> None:
    """Write a page for each letter."""
    pool.grow(cache, len(text) * PAGE_TOKENS)
    for page in range(cache.length // PAGE_TOKENS, len(text)):
        cache.stretch[:, :, :, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS] = ord(text[page])
    cache.length = len(text) * PAGE_TOKENS


def holds(cache: SessionCache, text: str) -> bool:
    written = cache.stretch[0, 0, 0, : len(text) * PAGE_TOKENS : PAGE_TOKENS, 0]
    return cache.length >= len(text) * PAGE_TOKENS and written.tolist() == [ord(letter) for letter in text]


def test_sessions_never_hold_more_than_there_is() -> None:
    pool = CachePool(SHAPE, 10)
    one, other = pool.open(), pool.open()
    pool.grow(one, 6 * PAGE_TOKENS)
    with pytest.raises(CacheFull):
        pool.grow(other, 5 * PAGE_TOKENS)
    assert other.pages == 1 and pool.free_pages == 10 - one.pages - 1
    pool.close(one)
    pool.grow(other, 5 * PAGE_TOKENS)
    pool.close(other)
    assert pool.free_pages == 10


def test_a_growing_session_keeps_what_it_has() -> None:
    pool = CachePool(SHAPE, 40)
    cache, text = pool.open(), "barnraise"
    for end in range(1, len(text) + 1):
        fill(pool, cache, text[:end])
        assert holds(cache, text[:end])


def test_a_session_begins_with_what_another_one_left() -> None:
    pool = CachePool(SHAPE, 40)
    first = pool.open()
    fill(pool, first, "hello world")
    pool.close(first, names_of("hello world"))
    second = pool.open(names_of("hello there"))
    assert second.length == 6 * PAGE_TOKENS and holds(second, "hello ")
    fill(pool, second, "hello there")
    assert holds(second, "hello there")
    third = pool.open(names_of("other"))
    assert third.length == 0


def test_what_one_owner_left_is_nothing_to_another() -> None:
    """Whoever filled pages may have called them what they are not."""
    pool = CachePool(SHAPE, 40)
    first = pool.open(owner="a liar")
    fill(pool, first, "HELLO WORLD")
    pool.close(first, names_of("hello world"), "a liar")
    assert pool.open(names_of("hello there"), "another").length == 0
    assert pool.open(names_of("hello there")).length == 0
    assert pool.open(names_of("hello there"), "a liar").length == 6 * PAGE_TOKENS


def test_what_is_kept_gives_way() -> None:
    pool = CachePool(SHAPE, 10)
    first = pool.open()
    fill(pool, first, "abcdefgh")
    pool.close(first, names_of("abcdefgh"))
    assert pool.free_pages == 10
    second = pool.open()
    pool.grow(second, 9 * PAGE_TOKENS)
    assert pool.open(names_of("abcd")).length == 0, "nothing is kept any more"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["open", "grow", "close"]), st.integers(0, 5), st.integers(1, 12)), max_size=60)
)
def test_the_account_is_right_whatever_comes(acts: list[tuple[str, int, int]]) -> None:
    pool, open_ = CachePool(SHAPE, 24), dict[int, tuple[SessionCache, str]]()
    for act, who, size in acts:
        text = "abcabdabcaba"[:size] + "x" * max(0, size - 12)
        try:
            if act == "open" and who not in open_:
                cache = pool.open(names_of(text))
                held = text[: cache.length // PAGE_TOKENS]
                assert holds(cache, held)
                open_[who] = cache, held
            elif act == "grow" and who in open_:
                cache, held = open_[who]
                longer = held + text
                if pages_of(len(longer) * PAGE_TOKENS) <= 40:
                    fill(pool, cache, longer)
                    open_[who] = cache, longer
            elif act == "close" and who in open_:
                cache, held = open_.pop(who)
                assert holds(cache, held)
                pool.close(cache, names_of(held))
        except CacheFull:
            pass
        held_pages = sum(cache.pages for cache, _ in open_.values())
        kept_pages = sum(kept.cache.pages for kept in pool._kept.values())
        assert pool._held == held_pages + kept_pages <= pool.pages
        assert all(holds(cache, held) for cache, held in open_.values())
