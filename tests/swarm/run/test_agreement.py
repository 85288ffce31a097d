"""What a manifest fixes about the agreement of its groups."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from optim.config import DilocoConfig
from peer.config import ModelConfig
from peer.identity import Identity, public_key_of
from swarm.protocol.agreement.messages import CREDENTIAL_BYTES_MAX, JoinBody
from swarm.protocol.head import SPONSORS_MAX, Member, Sponsor
from swarm.run.agreement import agreement_config, schedule_of, sponsors_of
from swarm.run.credentials import CHAIN_MAX, Link, client_link, member_link, sign_link
from swarm.run.manifest import Manifest
from swarm.run.sections import PipelineConfig, RunRules
from tests.swarm.run.test_manifest import make_manifest

PEER = Identity.generate()
AUTHORITY = Identity.generate()
TWO_STAGES = {
    "model": ModelConfig(
        hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=64, max_seq_len=64, tie_embeddings=False
    ),
    "pipeline": PipelineConfig(stages=2),
    "cuts": ((0, 1), (1, 2)),
    "genesis": (bytes(32), b"\1" * 32),
}


def manifest_of(rules: dict[str, Any], **sections: Any) -> Manifest:
    return make_manifest(AUTHORITY.peer_id, run=RunRules(**{"name": "x", **rules}), **sections)


@pytest.mark.parametrize(
    ("rules", "sections", "mode"),
    [
        ({"open": True}, {}, "required"),
        ({}, {}, "witness"),
        ({"open": False}, TWO_STAGES, "required"),
        ({"coordinator": "witness"}, {}, "witness"),
        ({"coordinator": "witness"}, TWO_STAGES, "witness"),
        ({"open": False, "coordinator": "required"}, {}, "required"),
    ],
)
def test_the_mode_follows_from_the_rules_of_the_run(
    rules: dict[str, object], sections: dict[str, object], mode: str
) -> None:
    assert manifest_of(rules, **sections).agreement_mode == mode


def test_the_owner_of_an_open_run_is_told_what_a_witness_means_there() -> None:
    (caution,) = RunRules(name="x", open=True, coordinator="witness").cautions()
    assert "majority of keys is the run" in caution
    assert not RunRules(name="x", open=True).cautions() and not RunRules(name="x", coordinator="witness").cautions()
    (caution,) = RunRules(name="x", lone_survivor=True).cautions()
    assert "may lie" in caution


def test_a_group_gets_the_rules_of_its_stage() -> None:
    manifest = manifest_of({"min_peers": 5, "max_peers": 9, "rounds": 7}, **TWO_STAGES)
    config = agreement_config(manifest, 1, PEER.peer_id)
    assert config.genesis == manifest.first_head(1) and config.coordinator == AUTHORITY.peer_id
    assert (config.peer, config.mode, config.rounds, config.max_peers) == (PEER.peer_id, "required", 7, 9)
    assert config.min_peers == 1, "all stages together have the five"
    assert agreement_config(manifest_of({"min_peers": 5}), 0, PEER.peer_id).min_peers == 5


def test_the_schedule_is_that_of_the_manifest() -> None:
    schedule = schedule_of(manifest_of({}, outer=DilocoConfig(steps=3)), 0)
    assert schedule.seq_len == 64 and not schedule.synchronous


def test_requests_to_join_are_judged_by_their_credential_alone() -> None:
    """F7, F8: a leader may have made up peers that no gate has ever seen."""
    manifest = manifest_of({"open": False})
    judge, run_id = sponsors_of(manifest), manifest.run_id
    invite, stranger = Identity.generate(), Identity.generate()
    old = 1.0  # seconds: gates look at the time, voters must judge alike
    link = sign_link(AUTHORITY, run_id, "invite", public_key_of(invite.peer_id), guests=7, expires=old)
    member = member_link(invite, run_id, PEER.peer_id, (link,), old)
    client = client_link(invite, run_id, PEER.peer_id, old)

    def judged(chain: tuple[Link, ...], signer: str = PEER.peer_id) -> tuple[Sponsor, ...] | None:
        join = JoinBody(bytes(32), Member(signer, "s"), msgspec.msgpack.encode(chain))
        return judge(join, signer)

    (sponsor,) = judged((link, member)) or ()
    assert sponsor.guests == 7 and len(sponsor.key) <= 64
    below = member_link(PEER, run_id, stranger.peer_id, (link, member), old)
    nested = sign_link(PEER, run_id, "invite", public_key_of(stranger.peer_id), guests=1, expires=old)
    guest = Identity.generate()
    third = member_link(stranger, run_id, guest.peer_id, (nested,), old)
    found = judged((link, member, nested, third), guest.peer_id) or ()
    assert [entry.guests for entry in found] == [7, 7, 1] and found[0] == sponsor
    wrong = {
        "nothing": judged(()),
        "another peer's": judged((link, member), stranger.peer_id),
        "a client's": judged((link, client)),
        "a member that admits without an invite": judged((link, member, below), stranger.peer_id),
        "forged": judged((link, msgspec.structs.replace(member, guests=9))),
        "garbage": judge(JoinBody(bytes(32), Member(PEER.peer_id, "s"), b"garbage"), PEER.peer_id),
    }
    assert not {name: found for name, found in wrong.items() if found is not None}
    assert sponsors_of(manifest_of({"open": True}))(JoinBody(bytes(32), Member("X", "s")), "X") == ()


def test_the_longest_credential_fits_into_a_request() -> None:
    link = sign_link(AUTHORITY, "run", "invite", bytes(32), guests=1024, expires=2e9)
    assert len(msgspec.msgpack.encode((link,) * CHAIN_MAX)) <= CREDENTIAL_BYTES_MAX
    assert CHAIN_MAX - 1 <= SPONSORS_MAX
