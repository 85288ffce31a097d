"""One hostile member among four: the honest three commit the same bits in time, and penalize the right peer."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from peer.identity import Signed, sign_body
from swarm.protocol import messages as say
from swarm.protocol.head import Member
from swarm.protocol.paxos import Accepted
from swarm.protocol.plan import PLAN_KIND
from tests.swarm.support.hostile import Liar, Scene, hostile_scene

replace = msgspec.structs.replace
SLICES = 5  # of `tests.swarm.support.hostile.NUMEL` values


# -- slices and claims about them ----------------------------------------------------------------------------------


def other_bytes(liar: Liar) -> None:
    """Sends a slice other than the one committed to."""
    liar.sends(say.CONTRIBUTION, lambda peer, body, payload: (body, payload[::-1]))


def nan_bytes(liar: Liar) -> None:
    """Sends a slice of NaN."""
    liar.sends(say.CONTRIBUTION, lambda peer, body, payload: (body, b"\xff" * len(payload)))


def another_index(liar: Liar) -> None:
    """Sends a slice in the place of another one."""
    liar.sends(say.CONTRIBUTION, lambda peer, body, payload: (replace(body, index=10**6), payload))


def lying_norms(liar: Liar) -> None:
    """Claims half the norm, to escape the clip."""

    def forge(signed: Signed) -> Signed:
        body = msgspec.msgpack.decode(signed.body)
        return liar.forge(signed, sqnorms=tuple(q / 4 for q in body["sqnorms"]))

    _changes_contribution(liar, forge)


def too_much_work(liar: Liar) -> None:
    _changes_contribution(liar, lambda signed: liar.forge(signed, steps=1000, samples=2000))


def negative_work(liar: Liar) -> None:
    _changes_contribution(liar, lambda signed: liar.forge(signed, steps=-1, samples=-2))


def infinite_norm(liar: Liar) -> None:
    def forge(signed: Signed) -> Signed:
        body = msgspec.msgpack.decode(signed.body)
        return liar.forge(signed, sqnorms=(float("inf"),) * len(body["sqnorms"]))

    _changes_contribution(liar, forge)


def in_anothers_name(liar: Liar) -> None:
    """Names another member in its contribution."""
    other = Member("12D3KooWnobody", "s")
    _changes_contribution(liar, lambda signed: liar.forge(signed, member=other))


def _changes_contribution(liar: Liar, forge: Any) -> None:
    """Change the contribution it submits, and the one it reports to a later leader."""
    liar.sends(say.SUBMIT, lambda peer, body, payload: (say.Submit(forge(body.contribution)), payload))
    liar.answers(
        say.PREPARE, lambda p: replace(p, contribution=forge(p.contribution)) if p.contribution is not None else p
    )


def corrupt_results(liar: Liar) -> None:
    """Sends NaN as an owner."""
    liar.sends(say.RESULT, lambda peer, body, payload: (body, b"\xff" * len(payload)))


def huge_results(liar: Liar) -> None:
    """Sends, as an owner, numbers that no mean of the updates can reach."""

    def scale(peer: str, body: Any, payload: bytes) -> tuple[Any, bytes]:
        return body, (np.frombuffer(payload, np.float32) * np.float32(1e6)).tobytes()

    liar.sends(say.RESULT, scale)


def short_results(liar: Liar) -> None:
    liar.sends(say.RESULT, lambda peer, body, payload: (body, payload[:-4]))


def foreign_results(liar: Liar) -> None:
    """Sends results of slices that it does not own: of each in turn, since it does not know its own in this round."""
    numbers = count()
    liar.sends(say.RESULT, lambda peer, body, payload: (replace(body, index=next(numbers) % SLICES), payload))


def soak(attack: Any) -> Any:
    """Run an attack only in the soak: it resembles one that `make test` runs."""
    return pytest.param(attack, marks=pytest.mark.soak)


PENALIZED = [
    other_bytes,
    nan_bytes,
    soak(another_index),
    lying_norms,
    soak(too_much_work),
    negative_work,
    soak(infinite_norm),
    in_anothers_name,
    corrupt_results,
    soak(huge_results),
    short_results,
    soak(foreign_results),
]


@pytest.mark.parametrize("attack", PENALIZED)
async def test_a_liar_is_penalized_and_left_out(tmp_path: Path, attack: Any) -> None:
    async with hostile_scene(tmp_path, attack) as scene:
        while not scene.penalties():  # a liar that leads does not expose its own lies
            await scene.rounds(1)
        await scene.rounds(2)


async def silent_to_one(scene: Scene) -> None:
    victim = scene.honest[0].host.peer_id
    scene.liar.sends(say.CONTRIBUTION, lambda peer, body, payload: None if peer == victim else (body, payload))


async def accuses_others(scene: Scene) -> None:
    """Sends one owner nothing, and claims that the others sent it nothing."""
    await silent_to_one(scene)
    others = tuple(replica.host.peer_id for replica in scene.honest[:2])
    scene.liar.answers(say.PREPARE, lambda promise: replace(promise, missing=others))


async def two_faced_owner(scene: Scene) -> None:
    """Sends one member other results, within the limits of the norms."""
    victim = scene.honest[0].host.peer_id

    def negate(peer: str, body: Any, payload: bytes) -> tuple[Any, bytes]:
        if peer != victim:
            return body, payload
        return body, (-np.frombuffer(payload, np.float32)).tobytes()

    scene.liar.sends(say.RESULT, negate)


async def invents_a_vote(scene: Scene) -> None:
    """Reports a vote for an invented head, which every later leader would have to finish."""

    def lie(promise: Any) -> Any:
        head = replace(promise.head, round=promise.head.round + 1, state_hash=b"\x01" * 32)
        return replace(promise, accepted=Accepted(1 << 40, head, b"\x02" * 32))

    scene.liar.answers(say.PREPARE, lie)


async def absurd_head(scene: Scene) -> None:
    """Reports a head a billion rounds ahead, with itself as the only member and the authority's signed term."""
    me = scene.liar.member.context.me

    def lie(report: Any) -> Any:
        head = replace(report.head, round=10**9, members=(me,), state_hash=b"\x03" * 32)
        return replace(report, head=head)

    scene.liar.answers(say.HEAD_REPORT, lie)
    scene.liar.answers(say.REQUEST_JOIN, lie)
    scene.liar.answers(say.PREPARE, lambda promise: replace(promise, granted=False, head=lie(promise).head))
    for replica in scene.honest:
        replica.engine._look_again()


async def false_speeds(scene: Scene) -> None:
    """Reports speeds and bandwidths that must not break a leader's arithmetic."""
    names = [replica.host.peer_id for replica in scene.honest]
    for value in (1e308, float("inf"), float("nan"), -1.0):
        speeds = dict.fromkeys(names, value)
        scene.liar.answers(say.PREPARE, lambda p, v=value, s=speeds: replace(p, speed=v, bandwidths=s))
        await scene.rounds(1)


async def junk_in_promises(scene: Scene) -> None:
    """Puts signed bodies into its promise that do not decode, or are another peer's."""
    identity = scene.liar.member.context.identity
    broken = sign_body(identity, PLAN_KIND, say.Done())
    utf8 = replace(broken, body=b"\x81\xa4head\xa2\xff\xff")
    text = Signed(utf8.body, identity.peer_id, identity.sign(b"barnraise/1/plan\0" + utf8.body))

    def lie(promise: Any) -> Any:
        theirs = (
            scene.honest[0].engine._state.round.round_state.contribution
            if scene.honest[0].engine._state.round
            else None
        )
        return replace(promise, plan=text, contribution=theirs or broken)

    scene.liar.answers(say.PREPARE, lie)


async def answers_garbage(scene: Scene) -> None:
    """Answers every call with a body that does not decode."""
    for method in (
        say.PREPARE,
        say.VOTE,
        say.SUBMIT,
        say.CONTRIBUTION,
        say.RESULT,
        say.START_ROUND,
        say.START_EXCHANGE,
    ):
        scene.liar.answers(method, lambda answer: say.Vote(b"", 0, b"", Member("", "")))


@pytest.mark.parametrize(
    "attack",
    [
        silent_to_one,
        soak(accuses_others),
        two_faced_owner,
        invents_a_vote,
        absurd_head,
        false_speeds,
        soak(junk_in_promises),
        answers_garbage,
    ],
)
async def test_honest_members_go_on_with_the_same_bits(tmp_path: Path, attack: Any) -> None:
    async with hostile_scene(tmp_path) as scene:
        await scene.rounds(1)
        await attack(scene)
        await scene.rounds(3)
        for replica in scene.honest:
            assert replica.engine.head.round < 10**6 and replica.engine.head.term == 1
