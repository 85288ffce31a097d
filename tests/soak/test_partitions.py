"""Eight real peers, each on a host of its own, while nothing fails and while links are cut. The bounds are ratios to
what the same peers did before.

PEERS (8); MINUTES (30) of the run without faults; CUT_S (60) seconds of each cut; REPEATS (3) of each partition in
halves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import trio

from tests.support.cuts import COORDINATOR, Cut, between, towards
from tests.support.lan_swarm import BACK_S, LanSwarm, committed_in, now_s, open_lan_swarm, sides
from tests.support.peer_process import PeerProcess
from tests.support.process_weight import ProcessWeight
from tests.support.scorecard import Scorecard, scored

PEERS = int(os.environ.get("PEERS", "8"))
MINUTES = float(os.environ.get("MINUTES", "30"))
CUT_S = float(os.environ.get("CUT_S", "60"))
REPEATS = int(os.environ.get("REPEATS", "3"))
CALM_ROUNDS = 8  # before the first cut, for the ratios
SAMPLE_EVERY_S = 10.0

pytestmark = [pytest.mark.soak, pytest.mark.process]


async def test_no_fault(tmp_path: Path) -> None:
    with scored("no fault") as card:
        async with open_lan_swarm(tmp_path, PEERS) as swarm:
            await swarm.rounds(2)
            began, length_s = now_s(), 60 * MINUTES
            weights = {peer.name: ProcessWeight() for peer in swarm.peers}
            while now_s() < began + length_s:
                for peer in swarm.peers:
                    weights[peer.name].sample(peer.process.pid)
                await trio.sleep(SAMPLE_EVERY_S)
            ended = now_s()
            commits = swarm.commits(began, ended)
            early_s, late_s = (swarm.round_s(began, began + length_s / 6), swarm.round_s(ended - length_s / 6, ended))
            tail = {name: weight.after(length_s / 3) for name, weight in weights.items()}
            card.note("minutes", MINUTES)
            card.note("rounds", len(commits))
            card.note("seconds a round, median of the first sixth", early_s)
            card.at_most("median round of the last sixth, times that", late_s / early_s, 1.25)
            # The attempt under way at either end is begun or committed outside.
            begun = swarm.count("attempt_begun", began, ended)
            card.at_least("committed of begun attempts", len(commits) / max(1, begun - 1), 0.99)
            whole = [commit.members == PEERS for commit in commits]
            card.at_least("commits with all members", sum(whole) / len(whole), 0.98)
            shared = [commit.contributions == PEERS for commit in commits]
            card.note("commits with all contributions", sum(shared) / len(shared))
            written = max((peer.home / "events.jsonl").stat().st_size / peer.round for peer in swarm.peers)
            card.at_most("bytes of events.jsonl a round", written, 2000)
            card.at_most("open files more than a third in", max(weight.more_files for weight in tail.values()), 2)
            if MINUTES >= 10:  # before, the allocators of Python and torch still fill
                grown = max(weight.growth for weight in tail.values())
                card.at_most("memory more than a third in, share", grown, 0.05)
                slope = max(weight.bytes_a_minute for weight in tail.values())
                card.at_most("memory a minute, MB", slope / 1e6, 1.0)
            swarm.check()


@pytest.mark.parametrize("mode", ["witness", "required"])
@pytest.mark.parametrize("coordinator", ["with one half", "cut off", "with both"])
async def test_two_halves(tmp_path: Path, mode: str, coordinator: str) -> None:
    with scored(f"{PEERS // 2} | {PEERS // 2}, {mode}, coordinator {coordinator}") as card:
        async with open_lan_swarm(tmp_path, PEERS, mode=mode) as swarm:
            left, right = sides(swarm.names, PEERS // 2)
            cuts = between(left, right)
            if coordinator != "with both":
                cuts += between([COORDINATOR], right)
            if coordinator == "cut off":
                cuts += between([COORDINATOR], left)
            for number in range(1, REPEATS + 1):
                await _halve(card, swarm, cuts, f" ({number})" if number > 1 else "")
            # A required coordinator starts a new term with the half that it hears, and with no other peer's word.
            may_start = mode == "required" and coordinator == "with one half"
            card.at_most("terms", len(swarm.terms()), 1 + REPEATS if may_start else 1)
            swarm.check()


async def _halve(card: Scorecard, swarm: LanSwarm, cuts: Sequence[Cut], nth: str) -> None:
    left, right = (swarm.named(side) for side in sides(swarm.names, PEERS // 2))
    calm = now_s()
    await swarm.rounds(CALM_ROUNDS)
    tokens_before = _tokens_a_round(swarm, calm)
    cut_at = await swarm.cut(*cuts)
    await trio.sleep(CUT_S)
    healed_at = await swarm.heal()
    goes_on = [side for side in (left, right) if any(committed_in(peer, cut_at + 1, healed_at) for peer in side)]
    card.at_most(f"halves that commit{nth}", len(goes_on), 0 if _is_all_cut(cuts) else 1)
    card.at_most(f"seconds to the first commit of all{nth}", await swarm.first_commit_of_all(healed_at), BACK_S)
    card.note(f"seconds to a commit with all members{nth}", await swarm.all_members(healed_at))
    await swarm.rounds(2)  # where none was committed meanwhile, they are all that there are
    card.at_most(f"tokens of a round, times those before{nth}", _tokens_a_round(swarm, cut_at) / tokens_before, 1.1)


def _is_all_cut(cuts: Sequence[Cut]) -> bool:
    """Return whether the coordinator is cut off: then no half has a majority."""
    return sum(sender == COORDINATOR for sender, _ in cuts) == PEERS


def _tokens_a_round(swarm: LanSwarm, since: float) -> float:
    """Return the most tokens that a round since then has counted. A sample that counts twice makes it more."""
    totals = [int(commit.fact.fields["tokens"]) for commit in swarm.commits(since)]
    return max(b - a for a, b in pairwise(totals))


async def test_one_is_cut_off(tmp_path: Path) -> None:
    with scored(f"{PEERS - 1} | 1") as card:
        async with open_lan_swarm(tmp_path, PEERS) as swarm:
            *seven, one = swarm.peers
            cuts = between([one.name], [COORDINATOR, *(peer.name for peer in seven)])
            cut_at, healed_at = await _cut_off(card, swarm, cuts, seven)
            card.at_most("commits of the one meanwhile", len(committed_in(one, cut_at + 1, healed_at)), 0)
            swarm.check()


async def test_one_is_not_heard(tmp_path: Path) -> None:
    with scored("one hears all, and is heard by none") as card:
        async with open_lan_swarm(tmp_path, PEERS) as swarm:
            *seven, one = swarm.peers
            cuts = towards(one.name, [COORDINATOR, *(peer.name for peer in seven)])
            cut_at, healed_at = await _cut_off(card, swarm, cuts, seven)
            with_it = [commit for commit in swarm.commits(cut_at, healed_at) if commit.members == PEERS]
            card.at_most("rounds until it is no member", len(with_it), 4)
            swarm.check()


async def test_two_do_not_hear_each_other(tmp_path: Path) -> None:
    with scored("two do not hear each other") as card:
        async with open_lan_swarm(tmp_path, PEERS) as swarm:
            first, second, *six = swarm.peers
            cut_at, healed_at = await _cut_off(card, swarm, between([first.name], [second.name]), six)
            least = min(commit.members for commit in swarm.commits(cut_at, healed_at))
            card.at_least("members of a commit", least, PEERS - 1)
            swarm.check()


async def _cut_off(
    card: Scorecard, swarm: LanSwarm, cuts: Sequence[Cut], others: Sequence[PeerProcess]
) -> tuple[float, float]:
    """Cut for a while; the `others` lose little. Return when the cut began and ended."""
    calm = now_s()
    await swarm.rounds(CALM_ROUNDS)
    cut_at = await swarm.cut(*cuts)
    usual_s = swarm.round_s(calm, cut_at)
    await trio.sleep(CUT_S)
    healed_at = await swarm.heal()
    commits = swarm.commits(cut_at, healed_at)
    card.note("seconds a round, before", usual_s)
    card.note("rounds meanwhile", len(commits))
    card.note("longest pause, seconds", max(peer.longest_pause(cut_at, healed_at) for peer in others))
    lost = [swarm.count("round_discarded", cut_at, healed_at, [peer]) for peer in others]
    card.at_most("rounds lost by one of the others", max(lost), 1)
    failed = swarm.count("attempt_failed", cut_at, healed_at, others)
    card.at_most("attempts of the others that failed", failed, 2)
    settled = swarm.round_s(commits[len(commits) // 2].at, healed_at) if commits else math.inf
    card.at_most("median round of the second half, times that before", settled / usual_s, 1.3)
    card.at_most("seconds to the first commit of all", await swarm.first_commit_of_all(healed_at), BACK_S)
    card.note("seconds to a commit with all members", await swarm.all_members(healed_at))
    return cut_at, healed_at
