"""The coordinator's part in its groups, with real replicas: beginning, following, restarts, what people are told."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from optim.config import METHODS, GossipConfig
from optim.strategies.interface import RoundInfo
from optim.strategies.registry import build_strategy
from peer.identity import Identity
from swarm.coordinator.coordinated_group import strategy_of
from swarm.placement.stages import layout_of
from swarm.protocol import messages as msg
from swarm.protocol.head import Member, Sponsor, Sponsorship
from swarm.run.credentials import GUESTS_DEFAULT
from swarm.run.features import message_features
from swarm.run.sections import RunRules
from tests.swarm.coordinator.run_scene import make_run, open_run


async def test_a_run_begins_goes_on_and_ends_under_its_coordinator(tmp_path: Path) -> None:
    async with open_run(tmp_path, min_peers=2, rounds=3) as run:
        one, other = await run.enter(), await run.enter()
        await run.until(lambda: run.seen("run_completed"))
        assert run.groups[0].head.round == 3 and run.groups[0].completed.is_set()
        assert run.seen("regrouped")[0].fields == {"term": 1, "round": 0, "members": 2, "undone": 0}
        assert [event.fields for event in run.seen("head_seen")] == [
            {"round": number, "members": 2, "absent": 0, "tokens": 1024 * number} for number in range(4)
        ]
        await run.until(lambda: one.head.round == other.head.round == 3)
        assert torch.equal(one.state.theta, other.state.theta)
        asked = msg.AskHead(run.manifest.run_id)
        report = (await one.host.rpc.call(run.host.peer_id, msg.HEAD_REPORT, asked, timeout_s=30)).body
        assert report.head == run.groups[0].head

        last = run.groups[0].head
        await run.restart()
        await run.until(lambda: run.seen("run_completed"))
        assert run.groups[0].head == last and not run.seen("regrouped"), "it knows from its disk where the run is"
        assert [event.fields["round"] for event in run.seen("head_seen")] == [3]
        coordinator = run.groups[0].driver._node._coordinator
        assert coordinator is not None and coordinator.is_over, "its members have done their work and may go"


async def test_each_group_begins_once_the_run_has_enough_peers(tmp_path: Path) -> None:
    """Two peers are enough, whichever groups they are in."""
    async with open_run(tmp_path, stages=2, min_peers=2) as run:
        first, last = run.groups
        await run.enter(stage=0)
        await run.until(lambda: first.peers)
        assert not first.head.members and first.phase == "waiting for peers"
        await run.enter(stage=1)
        await run.until(lambda: first.head.members and last.head.members)
        for stage in (0, 1):
            assert run.seen("regrouped", stage=stage, members=1) and run.seen("head_seen", stage=stage, round=0)
        assert first.phase == "coordinating" and first.peers == last.peers == 1
        assert first.driver.config.mode == "required"


async def test_newcomers_of_a_full_address_prefix_wait(tmp_path: Path) -> None:
    async with open_run(tmp_path, members_per_prefix=1) as run:
        alone = await run.enter()
        await run.until(lambda: run.groups[0].head.round > 0)
        await run.enter()
        await run.until(lambda: run.seen("prefix_full") and alone.seen("prefix_full"))
        told = run.seen("prefix_full")[0].fields
        assert told["waiting"] == told["most"] == 1 and str(told["prefix"]).endswith("/24")
        after = run.groups[0].head.round
        await run.until(lambda: run.groups[0].head.round > after + 3)
        head = run.groups[0].head
        assert [member.peer for member in head.members] == [alone.peer] and not head.learners


async def test_an_invite_admits_no_more_of_one_prefix_in_a_closed_run_either(tmp_path: Path) -> None:
    assert RunRules(name="a run").members_per_prefix == GUESTS_DEFAULT == 8
    async with open_run(tmp_path, open=False, members_per_prefix=8) as run:
        group = run.groups[0]
        heard = [group.driver._newcomers.lets_in(f"guest {number}", group.head) for number in range(10)]
        assert heard == [True] * 8 + [False] * 2


async def test_the_operator_is_told_once_that_one_invite_holds_half_of_the_votes(tmp_path: Path) -> None:
    async with open_run(tmp_path) as run:
        group = run.groups[0]
        sponsor, other = Sponsor("ab" * 16, 8), Sponsor("cd" * 16, 8)
        members = tuple(Member(f"peer {number}", "s") for number in range(4))

        def stands(votes: int) -> None:
            by = [Sponsorship(sponsor if number < votes else other, m.peer) for number, m in enumerate(members)]
            group.head = msgspec.structs.replace(group.head, members=members, sponsored=tuple(by[:3]))
            group._tell_head()

        stands(1)
        assert [event.fields["invite"] for event in run.seen("votes_in_one_hand")] == [other.key]
        stands(2)
        stands(3)
        told = run.seen("votes_in_one_hand")
        assert [(event.fields["invite"], event.fields["votes"]) for event in told] == [(other.key, 2), (sponsor.key, 2)]


async def test_a_restored_coordinator_waits_for_the_operator(tmp_path: Path) -> None:
    async with open_run(tmp_path) as run:
        await run.restart(restored=True)
        await run.until(lambda: run.seen("coordinator_restored"))


async def test_a_stage_that_goes_back_is_brought_to_the_others(tmp_path: Path) -> None:
    async with open_run(tmp_path, stages=2, min_peers=9) as run:
        first, last = run.groups
        kept = msgspec.structs.replace(first.head, term=1, round=3, members=(first.driver.me,))
        assert first._fast_forward(kept) == kept and not run.seen("stage_set_back")
        last.head = msgspec.structs.replace(last.head, round=8, inner_step=80)
        on = first._fast_forward(kept)
        assert (on.round, on.inner_step, on.state_hash) == (8, 80, kept.state_hash)
        assert run.seen("stage_set_back", stage=0, round=3, goes_on_at=8)
        assert first._fast_forward(first.head) == first.head, "a stage that has not begun begins at the beginning"


@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind is not GossipConfig])
def test_a_methods_rules_need_no_memory_of_a_peer_that_trains(name: str) -> None:
    kind = METHODS[name]
    outer = kind(batch=8) if name == "allreduce" else kind(steps=4)
    run = make_run(Identity.generate().peer_id)
    needed = (*run.requires, *message_features(outer, run.codec))
    manifest = msgspec.structs.replace(run, outer=outer, requires=needed)
    lean = strategy_of(manifest, 0)
    whole = build_strategy(outer, manifest.codec, layout_of(manifest), manifest.inner)
    for number in (1, 2, 3):
        round_info = RoundInfo(number, number, 0.1)
        assert lean.slices(round_info) == whole.slices(round_info)
    assert lean.weights([3, 1], [1.0, 2.0]) == whole.weights([3, 1], [1.0, 2.0])
    held = [value for value in vars(lean).values() if isinstance(value, torch.Tensor)]
    assert all(value.is_meta for value in held)
