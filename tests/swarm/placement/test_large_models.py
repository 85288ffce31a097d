"""What a round of a large model is committed to with, by arithmetic: 64 members fit into one roster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.agreement import large_models
from benchmarks.agreement.large_models import INNER, MODELS
from optim.codecs import get_codec
from optim.config import (
    CodecConfig,
    DemoConfig,
    DilocoConfig,
    LionConfig,
    OuterConfig,
)
from optim.strategies.dense import DenseCoding
from peer.bounds import NUMBERS_END
from peer.identity import Identity, Signed, sign_body
from peer.model.layout import FlatLayout
from peer.net.wire import LARGE_HEADER_BYTES
from swarm.placement.stages import slices_of_update
from swarm.protocol.head import Member, genesis
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution
from swarm.protocol.roster_room import ROSTER_BYTES_MAX, RosterRoom, bytes_of, peers_that_fit
from tests.swarm.support.group import regrouped, schedule_of

METHODS: dict[str, tuple[OuterConfig, CodecConfig]] = large_models.METHODS | {
    "powersgd": (DilocoConfig(), CodecConfig(up="powersgd", rank=32)),
    "demo": (DemoConfig(), CodecConfig()),
    "lion": (LionConfig(), CodecConfig()),
}
MEMBERS = 64
BUNDLED = replace(schedule_of(4), bundled=True)
KEYS = [Identity.generate() for _ in range(MEMBERS)]


def signed(identity: Identity, bundles: int) -> Signed:
    """Return a contribution with its numbers as long as they can be."""
    body = Contribution(
        head=bytes(32),
        plan=bytes(32),
        member=Member(identity.peer_id, "f" * 16),
        steps=NUMBERS_END,
        samples=NUMBERS_END,
        loss=1.5,
        hashes=(bytes(32),) * bundles,
        sqnorms=(1.5,) * bundles,
    )
    return sign_body(identity, CONTRIBUTION_KIND, body)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("billions", MODELS)
def test_64_members_fit_into_a_roster_of_a_large_model(billions: int, method: str) -> None:
    layout = FlatLayout.of(MODELS[billions])
    assert abs(layout.numel / 1e9 - billions) < 0.3
    slices = slices_of_update(*METHODS[method], layout, INNER)
    bundles = BUNDLED.bundles(slices)
    assert bundles.count <= 240 and (bundles.size == 1 or slices > 240)
    assert peers_that_fit(bundles.count) >= MEMBERS
    head = regrouped(genesis("run", b"s" * 32), [Member(key.peer_id, "f" * 16) for key in KEYS], 1)
    sent = {member: signed(key, bundles.count) for member, key in zip(head.members, KEYS, strict=True)}
    room = RosterRoom(head, head.hash, bundles.count)
    assert len(room.fit(sent)) == MEMBERS and not room.left_out(sent, [])
    assert sum(map(bytes_of, sent.values())) <= ROSTER_BYTES_MAX < LARGE_HEADER_BYTES


def test_slices_up_to_500_million_values_are_as_they_were() -> None:
    """Their hashes are what peers of older software commit to."""
    for numel, slices in ((1_000_000, 12), (25_165_824, 12), (100_000_000, 48), (500_000_000, 239)):
        coding = DenseCoding([slice(0, numel)], get_codec("int8"), get_codec("int8"))
        assert coding.count == slices and BUNDLED.bundles(coding.count).size == 1
