"""Exchanges of gossiping peers: as NoLoCo says, and with partners that lie, freeze or come late."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from blake3 import blake3

from peer.checkpoint.hash_tree import hash_state
from peer.errors import ProtocolViolation, RoundDiscarded
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.method import Empty
from peer.net.rpc import Buffer, Call
from swarm.gossip import messages as msg
from swarm.gossip.coding import step_alone
from swarm.gossip.exchange import PairExchange
from swarm.gossip.matchmaking import Matchmaker
from swarm.gossip.pairing import PeerView
from tests.swarm.support.gossip_group import CONSTANTS, NUMEL, Group, Peer, noise

pytestmark = pytest.mark.slow

ALPHA, BETA, GAMMA = CONSTANTS
Vector = np.ndarray


def as_decoded(x: Vector, codec: str) -> Vector:
    """What a partner sees of x. int8: blockwise, by the largest magnitude; its blocks are those of the codec, so it is
    asked for the values themselves."""
    if codec == "fp32":
        return x.astype(np.float32).astype(np.float64)
    coding = Group(Path(), codec, 0, 2).coding
    packed = coding.pack_phi(torch.from_numpy(x.astype(np.float32)))
    cut = coding._cut
    pieces = [cut.down.decode(piece, cut.size(i)) for i, piece in enumerate(packed.slices)]
    return torch.cat(pieces).double().numpy()


def noloco(thetas: list[Vector], deltas: list[list[Vector]], codec: str) -> list[Vector]:
    """Two peers that exchange in every round, in float64 from the paper's formula."""
    phi, move = [t.copy() for t in thetas], [np.zeros_like(t) for t in thetas]
    for pair in deltas:
        seen = [as_decoded(p, codec) for p in phi]
        mean_delta = sum(as_decoded(d, codec) for d in pair) / 2
        mean_phi = sum(seen) / 2
        for k in range(2):
            move[k] = ALPHA * move[k] - BETA * mean_delta - GAMMA * (seen[k] - mean_phi)
            phi[k] = phi[k] + move[k]
    return phi


@pytest.mark.parametrize("codec", ["fp32", "int8"])
async def test_a_pair_computes_the_papers_formula(tmp_path: Path, codec: str) -> None:
    rounds = 3
    thetas = [noise(1) + noise(2 + k, 0.1) for k in range(2)]
    deltas = [[noise(100 * n + k, 0.05) for k in range(2)] for n in range(rounds)]
    group = Group(tmp_path, codec, rounds, 2)
    async with AsyncExitStack() as stack:
        works = [lambda n, k=k: deltas[n][k] for k in range(2)]
        peers = [await stack.enter_async_context(group.join(thetas[k], works[k])) for k in range(2)]
        await run(*peers)
    for peer in peers:
        assert len(peer.seen("gossip_met")) == rounds, peer.events
    expected = noloco([t.double().numpy() for t in thetas], [[d.double().numpy() for d in p] for p in deltas], codec)
    for peer, phi in zip(peers, expected, strict=True):
        ours = peer.stands[-1][0].double().numpy()
        assert np.linalg.norm(ours - phi) <= 3e-7 * np.linalg.norm(phi)
        # without the pull, or with the partner's delta alone, it would be far off
        assert np.linalg.norm(ours - phi) < 1e-4 * np.linalg.norm(expected[0] - expected[1])


def test_both_sides_of_a_pair_compute_the_same_means() -> None:
    from swarm.gossip.coding import PairMessage

    coding = Group(Path(), "int8", 0, 2).coding
    a = PairMessage(coding.pack_phi(noise(1)), coding.pack_delta(noise(2)))
    b = PairMessage(coding.pack_phi(noise(3)), coding.pack_delta(noise(4)))
    for (delta, phi), (delta_too, phi_too) in zip(coding.means(a, b), coding.means(b, a), strict=True):
        assert torch.equal(delta, delta_too) and torch.equal(phi, phi_too)


def test_a_coarse_codec_does_not_move_peers_that_agree() -> None:
    """The pull is between what partners see of each other, not towards what the code can express."""
    from swarm.gossip.coding import PairMessage

    coding = Group(Path(), "int4", 0, 2).coding
    theta, zero = noise(1), torch.zeros(NUMEL)
    message = PairMessage(coding.pack_phi(theta), coding.pack_delta(zero))
    after = theta.clone()
    coding.step(after, zero.clone(), message, message, CONSTANTS)
    assert torch.equal(after, theta)


async def test_a_peer_without_others_steps_alone(tmp_path: Path) -> None:
    group = Group(tmp_path, "int8", 3, 1)
    async with group.join(noise(1), lambda n: noise(10 + n, 0.1)) as peer:
        await run(peer)
    assert len(peer.seen("gossip_alone")) == 3
    phi, move = noise(1).double(), torch.zeros(NUMEL).double()
    for n in range(3):
        move = ALPHA * move - BETA * noise(10 + n, 0.1).double()
        phi = phi + move
    assert (peer.stands[-1][0].double() - phi).norm() <= 3e-7 * phi.norm()


class Liar:
    """A partner that agrees to every proposal and then sends `slices`, by half. Their hashes match unless `forge`
    changes what is sent."""

    def __init__(self, host: Host, slices: dict[str, list[bytes]], forge: Callable[[bytes], bytes]) -> None:
        self._slices, self._forge = slices, forge
        host.rpc.register(msg.PROPOSE, self._on_propose)
        host.rpc.register(msg.COMMIT, self._on_commit)
        host.rpc.register(msg.SLICE, self._on_slice)
        host.rpc.register(msg.LEAVE, self._on_leave)

    async def _on_propose(self, call: Call[msg.Propose]) -> msg.Answer:
        return msg.Answer("come", call.body.round, 0.0)

    async def _on_commit(self, call: Call[msg.Commit]) -> msg.Committed:
        return msg.Committed(tuple(blake3(piece).digest() for piece in self._slices[call.body.half]))

    async def _on_slice(self, call: Call[msg.AskSlice]) -> tuple[Empty, Buffer]:
        return Empty(), self._forge(self._slices[call.body.half][call.body.index])

    async def _on_leave(self, call: Call[msg.Leave]) -> Empty:
        return Empty()


def cut(group: Group, half: str, values: torch.Tensor) -> list[bytes]:
    """Any values, NaN included, as fp32 slices."""
    coding = group.coding
    raw = values.numpy().tobytes()
    sizes = [coding.size(half, i) for i in range(coding.count)]  # type: ignore[arg-type]
    return [raw[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]


NAN = torch.full((NUMEL,), float("nan"))
THETA = noise(1)
LIES = {
    "nan in delta": (THETA, NAN, lambda b: b),
    "nan in phi": (NAN, noise(5, 0.05), lambda b: b),
    "huge delta": (THETA, noise(5, 50.0), lambda b: b),
    "huge phi": (100 * THETA, noise(5, 0.05), lambda b: b),
    "no delta": (THETA, torch.zeros(NUMEL), lambda b: b),
    "wrong hash": (THETA, noise(5, 0.05), lambda b: b[:-1] + bytes([b[-1] ^ 1])),
    "too short": (THETA, noise(5, 0.05), lambda b: b[:-4]),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lying_partner_is_penalized(tmp_path: Path, lie: str) -> None:
    phi, delta, forge = LIES[lie]
    group = Group(tmp_path, "fp32", 1, 2)
    slices = {"phi": cut(group, "phi", phi), "delta": cut(group, "delta", delta)}
    peer, stranger = await meet_once(group, lambda host: Liar(host, slices, forge))
    assert {event.fields["peer"] for event in peer.seen("peer_penalized")} == {stranger}
    assert not peer.seen("gossip_met")
    (theta, _), *_ = peer.stands
    alone = THETA - BETA * noise(10, 0.05)
    assert (theta - alone).norm() <= 1e-6 * alone.norm()


@pytest.mark.parametrize("cheats", [True, False])
async def test_a_partner_that_withholds_its_last_slice_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cheats: bool
) -> None:
    """Everything has come but the last slice, so no other call is left to be cancelled when that one fails. The peer
    uses nothing of what came, and steps alone."""
    rest_is_here, fetch = trio.Event(), PairExchange._fetch

    async def fetch_and_tell(exchange: PairExchange, half: msg.Half, index: int, limit_s: float) -> memoryview:
        piece = await fetch(exchange, half, index, limit_s)
        if half == "delta":
            rest_is_here.set()
        return piece

    class Withholds(Liar):
        async def _on_slice(self, call: Call[msg.AskSlice]) -> tuple[Empty, Buffer]:
            nothing, piece = await super()._on_slice(call)
            if (call.body.half, call.body.index) != ("delta", group.coding.count - 1):
                return nothing, piece
            await rest_is_here.wait()
            if cheats:
                return nothing, piece[:-4]
            raise RoundDiscarded("there is no such exchange here any more")

    monkeypatch.setattr(PairExchange, "_fetch", fetch_and_tell)
    group = Group(tmp_path, "fp32", 1, 2)
    assert group.coding.count == 2
    peer, stranger = await meet_once(group, lambda host: Withholds(host, honest(group), lambda b: b))
    penalized = {event.fields["peer"] for event in peer.seen("peer_penalized")}
    assert rest_is_here.is_set() and penalized == ({stranger} if cheats else set())
    assert len(peer.seen("gossip_alone")) == 1 and not peer.seen("gossip_met")


async def test_a_second_commitment_after_the_exchange_is_penalized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the exchange is over here, and before the update was examined."""
    hold = Matchmaker._hold

    async def hold_and_cheat(match: Matchmaker, exchange: PairExchange) -> None:
        await hold(match, exchange)
        assert exchange.theirs is not None
        exchange.fail(ProtocolViolation("a peer committed to two updates in one exchange"))

    monkeypatch.setattr(Matchmaker, "_hold", hold_and_cheat)
    group = Group(tmp_path, "fp32", 1, 2)
    peer, stranger = await meet_once(group, lambda host: Liar(host, honest(group), lambda b: b))
    assert {event.fields["peer"] for event in peer.seen("peer_penalized")} == {stranger}
    assert len(peer.seen("gossip_alone")) == 1 and not peer.seen("gossip_met")


async def test_an_honest_stranger_is_a_partner(tmp_path: Path) -> None:
    """So the tests above refuse a partner for its lie."""
    group = Group(tmp_path, "fp32", 1, 2)
    peer, _ = await meet_once(group, lambda host: Liar(host, honest(group), lambda b: b))
    assert len(peer.seen("gossip_met")) == 1 and not peer.seen("peer_penalized")


async def test_a_frozen_partner_costs_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.gossip.peer_scores.PAUSE_S", 600.0)
    group = Group(tmp_path, "fp32", 3, 2, timeout_floor_s=0.0)
    asked = []

    class Frozen(Liar):
        async def _on_propose(self, call: Call[msg.Propose]) -> msg.Answer:
            asked.append(call.body.meeting)
            peer.engine._context.timeouts._timeout_floor_s = 0.0
            return await super()._on_propose(call)

        async def _on_commit(self, call: Call[msg.Commit]) -> msg.Committed:
            await trio.sleep_forever()
            raise AssertionError

    async with open_host(identity=Identity.generate(), events=EventLog()) as host:
        Frozen(host, {}, lambda b: b)
        async with group.join(THETA, lambda n: noise(10 + n, 0.05)) as peer:
            meet_stranger(group, peer, host)
            peer.engine._context.timeouts._timeout_floor_s = (
                60.0  # until it is asked: a first call takes long on a busy machine
            )
            await run(peer)
    assert len(asked) == 1, "it was asked again at once"
    assert len(peer.seen("gossip_alone")) == 3 and not peer.seen("peer_penalized")


async def test_a_late_joiner_fetches_weights_and_starts_without_momentum(tmp_path: Path) -> None:
    group = Group(tmp_path, "int8", 0, 2)
    deltas = [lambda n, k=k: noise(1000 * k + n, 0.02) for k in range(3)]
    async with AsyncExitStack() as stack:
        old = [await stack.enter_async_context(group.join(THETA, deltas[k], pause_s=0.05)) for k in range(2)]
        async with trio.open_nursery() as nursery:
            for peer in old:
                nursery.start_soon(peer.engine.run)
            await until(old[0], lambda: old[0].engine.replica.round >= 8)
            async with group.join(THETA, deltas[2], pause_s=0.05) as late, trio.open_nursery() as nursery_of_late:
                nursery_of_late.start_soon(late.engine.run)
                await until(late, lambda: len(late.stands) >= 3)
                nursery_of_late.cancel_scope.cancel()
            nursery.cancel_scope.cancel()
    fetched, *_ = late.seen("state_fetched")
    assert int(str(fetched.fields["round"])) >= 4
    theta, move = late.stands[0]
    assert not move.any()
    assert any(torch.equal(theta, stand) for peer in old for stand, _ in peer.stands)
    assert not [e for peer in group.peers for e in peer.events if e.name in ("peer_penalized", "bug")]


async def test_a_proposal_ends_the_wait_for_the_first_peers(tmp_path: Path) -> None:
    """Records are read every few seconds, and rounds may be shorter: one that read too early would begin late. The
    others go on until chance pairs one of them with it."""
    group = Group(tmp_path, "int8", 10**6, min_peers=3)
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(group.join(THETA, lambda n: noise(n, 0.05))) for _ in range(3)]
        early, other, _ = peers
        early.others = lambda: {other.host.peer_id: PeerView(0)}  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(peer.engine.run)
            await until(early, lambda: early.engine.replica.round > 0)
            nursery.cancel_scope.cancel()


async def test_a_peer_stopped_in_a_step_has_a_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head that is saved then names its weights."""
    group = Group(tmp_path, "fp32", 1, 1, timeout_floor_s=0.0)
    with trio.CancelScope() as stopped:

        def step_and_stop(theta: torch.Tensor, *rest: Any) -> None:
            step_alone(theta, *rest)
            trio.from_thread.run_sync(stopped.cancel)

        monkeypatch.setattr("swarm.gossip.engine.step_alone", step_and_stop)
        async with group.join(THETA, lambda n: noise(n, 0.02)) as peer:
            await peer.engine.run()
    replica = peer.engine.replica
    assert stopped.cancelled_caught and replica.round == 1 and not torch.equal(replica.theta, THETA)
    assert hash_state([replica.theta]).root == replica.tree.root


def seen_beside(a: Peer, b: Peer) -> dict[str, PeerView]:
    """A view of `b` at the round of `a`."""
    return {b.host.peer_id: PeerView(a.engine.replica.round)}


async def test_peers_too_far_apart_do_not_exchange(tmp_path: Path) -> None:
    group = Group(tmp_path, "int8", 0, 2)
    async with AsyncExitStack() as stack:
        ahead = await stack.enter_async_context(group.join(THETA, lambda n: noise(n, 0.02), pause_s=5.0))
        behind = await stack.enter_async_context(group.join(THETA, lambda n: noise(99 + n, 0.02)))
        ahead.engine.replica.round = 40
        group.peers.clear()  # neither knows more than the other's name
        for a, b in ((ahead, behind), (behind, ahead)):
            a.others = partial(seen_beside, a, b)  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ahead.engine.run)
            nursery.start_soon(behind.engine.run)
            await until(behind, lambda: bool(behind.seen("state_fetched")))
            nursery.cancel_scope.cancel()
    early = [e for e in behind.events if e.name == "gossip_met"]
    assert not early, "they exchanged although they were forty rounds apart"


# -- helpers -----------------------------------------------------------------------------------------------------------


def meet_stranger(group: Group, peer: Peer, host: Host) -> None:
    group.strangers[host.peer_id] = PeerView(0)
    peer.host.book.add(host.peer_id, host.addresses)


def honest(group: Group) -> dict[str, list[bytes]]:
    """The slices of a correct update."""
    return {"phi": cut(group, "phi", THETA), "delta": cut(group, "delta", noise(5, 0.05))}


async def meet_once(group: Group, serve: Callable[[Host], object]) -> tuple[Peer, str]:
    """A peer after its first round, in which `serve` had a stranger's host answer; and the stranger's id."""
    async with open_host(identity=Identity.generate(), events=EventLog()) as host:
        serve(host)
        async with group.join(THETA, lambda n: noise(10 + n, 0.05)) as peer:
            meet_stranger(group, peer, host)
            await step_once(peer)
    return peer, host.peer_id


async def step_once(peer: Peer) -> None:
    """Run its first round. It would then wait for a partner that had not fetched everything from it."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.engine.run)
        await until(peer, lambda: bool(peer.stands))
        nursery.cancel_scope.cancel()


async def run(*peers: Peer) -> None:
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(peer.engine.run)


async def until(peer: Peer, condition: Callable[[], bool]) -> None:
    with trio.fail_after(120):
        while not condition():
            event = trio.Event()
            peer.stepping = event.set
            await event.wait()
