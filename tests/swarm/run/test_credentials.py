"""Which peers may enter a run. Each reason to refuse has its own message."""

from __future__ import annotations

import msgspec
import pytest

from peer.errors import NotAdmitted, ProtocolViolation
from peer.identity import Identity, Signed, sign_body
from swarm.run.credentials import CLOCK_SKEW_S, BanList, JoinToken, admit, issue_token, open_bans, sign_bans
from swarm.run.manifest import Manifest
from swarm.run.sections import RunRules
from tests.swarm.run.test_manifest import make_manifest

NOW = 1_700_000_000.0
AUTHORITY = Identity.generate()
PEER = Identity.generate().peer_id


def invitation_only() -> Manifest:
    return make_manifest(AUTHORITY.peer_id, run=RunRules(name="closed", open=False))


def refusal(token: Signed | None, *, peer: str = PEER, now: float = NOW, bans: BanList | None = None) -> str:
    with pytest.raises(NotAdmitted) as caught:
        admit(invitation_only(), token, peer, now, bans)
    return str(caught.value)


def test_bearer_and_bound_tokens_admit() -> None:
    manifest = invitation_only()
    admit(manifest, issue_token(AUTHORITY, manifest.run_id, NOW, 60.0), PEER, NOW)
    admit(manifest, issue_token(AUTHORITY, manifest.run_id, NOW, 60.0, peer=PEER), PEER, NOW)
    admit(manifest, None, AUTHORITY.peer_id, NOW)


def test_an_open_run_needs_no_token() -> None:
    admit(make_manifest(AUTHORITY.peer_id), None, PEER, NOW)


def test_every_refusal_has_its_own_message() -> None:
    run_id = invitation_only().run_id
    stranger = Identity.generate()
    good = issue_token(AUTHORITY, run_id, NOW, 60.0)
    expired_now = NOW + 60 + 3 * 3600
    sentences = {
        "missing": refusal(None),
        "wrong run": refusal(issue_token(AUTHORITY, "b" * 32, NOW, 60.0)),
        "foreign signer": refusal(issue_token(stranger, run_id, NOW, 60.0)),
        "foreign peer": refusal(issue_token(AUTHORITY, run_id, NOW, 60.0, peer=stranger.peer_id)),
        "expired": refusal(good, now=expired_now),
        "early": refusal(good, now=NOW - 3600),
        "forged": refusal(Signed(good.body + b"\0", good.signer, good.signature)),
        "banned": refusal(good, bans=BanList(run_id, 1, peers=frozenset({PEER}))),
        "another kind of signature": refusal(sign_body(AUTHORITY, "manifest", BanList(run_id, 1))),
    }
    for case, words in {
        "missing": "no token",
        "wrong run": "for run bbbb",
        "foreign signer": "a stranger to this run",
        "foreign peer": "made out to peer",
        "expired": "expired 3 hours ago",
        "early": "becomes valid in 60 minutes",
        "forged": "forged",
        "banned": "is banned",
        "another kind of signature": "forged",
    }.items():
        assert words in sentences[case], f"{case}: {sentences[case]}"


def test_clocks_may_be_off_by_two_minutes() -> None:
    manifest = invitation_only()
    token = issue_token(AUTHORITY, manifest.run_id, NOW, 60.0)
    admit(manifest, token, PEER, NOW - CLOCK_SKEW_S + 1)
    admit(manifest, token, PEER, NOW + 60 + CLOCK_SKEW_S - 1)


def test_a_banned_token_admits_no_peer() -> None:
    run_id = invitation_only().run_id
    token = issue_token(AUTHORITY, run_id, NOW, 60.0)
    serial = msgspec.msgpack.decode(token.body, type=JoinToken).serial
    assert "withdrawn" in refusal(token, bans=BanList(run_id, 1, tokens=frozenset({serial})))


def test_an_open_run_bans_too() -> None:
    manifest = make_manifest(AUTHORITY.peer_id)
    with pytest.raises(NotAdmitted, match="banned"):
        admit(manifest, None, PEER, NOW, BanList(manifest.run_id, 1, peers=frozenset({PEER})))


def test_only_the_authoritys_ban_list_for_this_run_counts() -> None:
    manifest = invitation_only()
    bans = BanList(manifest.run_id, 3, peers=frozenset({PEER}))
    assert open_bans(sign_bans(AUTHORITY, bans), manifest) == bans
    with pytest.raises(ProtocolViolation, match="not by"):
        open_bans(sign_bans(Identity.generate(), bans), manifest)
    with pytest.raises(ProtocolViolation, match="for run"):
        open_bans(sign_bans(AUTHORITY, BanList("c" * 32, 1)), manifest)
    crowd = BanList(manifest.run_id, 4, peers=frozenset(str(i) for i in range(5000)))
    with pytest.raises(ProtocolViolation, match="more than"):
        open_bans(sign_bans(AUTHORITY, crowd), manifest)
