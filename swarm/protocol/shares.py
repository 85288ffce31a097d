"""Shares of a round that the members merge, by the speeds of their links.

The owner of a share a of the slices receives that part of all other updates and sends its results to all others; like
every member, it sends the rest of its own update and receives the rest of the results. With updates of M bytes, results
of R bytes, n contributors and a link of u bytes/s up and d down, it needs at least

    up  (M + ((n - 1) R - M) a) / u        down  (R + ((n - 1) M - R) a) / d        seconds.

The shares are those with which the slowest needs the least time. For M = R and u = d that is what hivemind's
`load_balance_peers` minimises. One member with all slices is a parameter server, equal shares are a butterfly.

Speeds are what other members have measured: no member counts by its own claim, and one false measurement moves no
median. Of itself a member reports only the most that it can merge, by its memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, log2
from statistics import median_low
from typing import Final

SHARE_MAX: Final = 255  # of the largest share, in a plan
MOST_OF_EQUAL: Final = 4.0  # times an equal share
MOST_OF_ALL: Final = 0.5
GAIN_MIN: Final = 1.25  # times as quick as with equal shares: measurements are noisy
WORTH_S: Final = 1.0  # an exchange in less time is limited by processors and round trips
HALVINGS: Final = 60

CODE_MAX: Final = 255
_CODE_STEPS: Final = 12.0  # a factor of two
_CODE_ONE: Final = 1000.0  # bytes/s of code 1
CODES_EACH: Final = 2  # up and down
UNKNOWN: Final = bytes(CODES_EACH)
TELLERS_MIN: Final = 3
"""Of a link, where there are this many other members: of two, one could lie."""


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of a member's link, bytes/s; infinity where nothing shows a limit."""

    up: float
    down: float = inf
    most: float = 1.0
    """The largest share that the member can hold."""


def seconds(share: float, link: LinkSpeed, contributors: int, message: float, result: float) -> float:
    """Return the least time of a member with this share; `message`, `result`: bytes of a whole update and result."""
    up = message + ((contributors - 1) * result - message) * share
    down = result + ((contributors - 1) * message - result) * share
    return max(up / link.up, down / link.down)


def divide(links: Sequence[LinkSpeed | None], message: float, result: float, most: float = 1.0) -> list[float]:
    """Return the shares, none above `most`, with which the slowest owner needs the least time; 0 for None, which
    contributes and owns nothing. The least time is found by bisection: the more time, the larger a share a link can
    carry. A link too slow for its own update gets 0 too. Raises ValueError if there is no owner."""
    owners, n = [link for link in links if link is not None], len(links)
    if not owners:
        raise ValueError("a round needs an owner")

    def carried(link: LinkSpeed | None, time_s: float) -> float:
        if link is None:
            return 0.0
        share = min(most, link.most)
        for rate, fixed, other in ((link.up, message, result), (link.down, result, message)):
            slope = (n - 1) * other - fixed
            if slope > 0 and rate < inf:
                share = min(share, (time_s * rate - fixed) / slope)
        return max(0.0, share)

    low, high = 0.0, max(seconds(1.0, link, n, message, result) for link in owners)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if sum(carried(link, middle) for link in links) >= 1.0:
            high = middle
        else:
            low = middle
    shares = [carried(link, high) for link in links]
    whole = sum(shares)
    return [share / whole for share in shares]


def weights_of(links: Sequence[LinkSpeed | None], message: float, result: float) -> tuple[int, ...]:
    """Return the shares of a plan, the largest as `SHARE_MAX`; none where equal ones are about as quick."""
    n, owners = len(links), sum(link is not None for link in links)
    if not owners or message <= 0:
        return ()
    shares = divide(links, message, result, most_of(owners, owners))
    equal_s = max(seconds(1 / owners, link, n, message, result) for link in links if link is not None)
    time_s = max(seconds(a, link, n, message, result) for a, link in zip(shares, links, strict=True) if link)
    if equal_s < max(WORTH_S, GAIN_MIN * time_s):
        return ()
    return tuple(round(SHARE_MAX * share / max(shares)) for share in shares)


def most_of(members: int, owners: int) -> float:
    """Return the largest share that one of `members` may have, if `owners` of them share all: four times an equal one,
    and half, as far as the others can take the rest."""
    return max(min(MOST_OF_EQUAL / members, MOST_OF_ALL), 1 / owners)


def deal(weights: Sequence[int], slices: int) -> list[int]:
    """Return how many slices each member gets: in proportion to its weight (Webster's method), none above `most_of`.
    Where no weight is above 0, all are alike."""
    weights = weights if any(weights) else [1] * len(weights)
    most = ceil(slices * most_of(len(weights), sum(weight > 0 for weight in weights)))
    counts = [0] * len(weights)
    waiting = [(-float(weight), index) for index, weight in enumerate(weights) if weight > 0]
    heapq.heapify(waiting)
    for _ in range(slices):
        _, index = waiting[0]
        counts[index] += 1
        if counts[index] < most:
            heapq.heapreplace(waiting, (-weights[index] / (2 * counts[index] + 1), index))
        else:
            heapq.heappop(waiting)
    return counts


# -- measurements ------------------------------------------------------------------------------------------------------


def code_of(rate: float) -> int:
    """Return a rate in bytes/s as a byte: steps of 6 percent from 1 kB/s on; 0 for an unknown one."""
    if not 0 < rate < inf:
        return 0
    return max(1, min(CODE_MAX, round(1 + _CODE_STEPS * log2(rate / _CODE_ONE))))


def rate_of(code: int) -> float:
    """Return the rate of a code above 0, bytes/s."""
    return float(_CODE_ONE * 2.0 ** ((code - 1) / _CODE_STEPS))


def room_code(free_bytes: float, message: float, members: int) -> int:
    """Return the largest share that a peer can merge with this much memory, in 255ths: at least an equal one, for which
    it has reserved room. The owner of a share a holds that part of all other updates."""
    equal = 1 / max(1, members)
    held = message * max(1, members - 1)
    return ceil(SHARE_MAX * min(1.0, max(equal, free_bytes / held if held else 1.0)))


def links_of(measured: Mapping[int, bytes], members: int) -> list[LinkSpeed]:
    """Return the links of all members, each the lower median of what the others have measured of it; one that no member
    or too few have measured counts as the usual one. Empty if nothing is known.

    `measured`: what a member says, by its number: `CODES_EACH` codes a member, in order, of the rate at which that one
    can send and of the rate at which it can receive, 0 where nothing showed it. In its own place is the code of
    `room_code`."""
    ups, downs, most = list[float](), list[float](), list[float]()
    tellers = max(1, min(TELLERS_MIN, members - 1))
    for number in range(members):
        told = [codes[CODES_EACH * number :][:CODES_EACH] for by, codes in measured.items() if by != number]
        told = [codes for codes in told if len(codes) == CODES_EACH]
        up = [rate_of(codes[0]) for codes in told if codes[0]]
        down = [rate_of(codes[1]) if codes[1] else inf for codes in told]
        ups.append(median_low(up) if len(up) >= tellers else 0.0)
        downs.append(median_low(down) if len(down) >= tellers else inf)
        own = measured.get(number, b"")[CODES_EACH * number :][:1]
        most.append(own[0] / SHARE_MAX if own and own[0] else 1.0)
    known = [up for up in ups if up]
    if not known:
        return []
    usual = median_low(known)
    return [LinkSpeed(up or usual, down, room) for up, down, room in zip(ups, downs, most, strict=True)]
