"""Agreement settings of one group, from the run's manifest: alike for its replicas and its coordinator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
from blake3 import blake3

from peer.decoding import MALFORMED
from peer.errors import NotAdmitted
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.messages import JoinBody
from swarm.protocol.head import Sponsor
from swarm.protocol.round_schedule import RoundSchedule
from swarm.run.credentials import Chain, check_chain
from swarm.run.features import BUNDLES, SHARES
from swarm.run.gate import Gate
from swarm.run.manifest import Manifest

UNDO_S: Final = 600.0
STAGE_UNDO_S: Final = 20.0  # all stages stand still while one has lost its last commit; it goes on from a backup
NAME_BYTES: Final = 16


def schedule_of(manifest: Manifest, stage: int) -> RoundSchedule:
    """Return how much work the rounds of a stage's group have."""
    inner, seq_len = manifest.inner, manifest.data.seq_len
    return RoundSchedule(
        manifest.outer,
        inner,
        seq_len,
        manifest.run.compute_s_max,
        stage,
        manifest.stages,
        manifest.micro_batch,
        manifest.run.rounds,
        BUNDLES in manifest.requires,
        SHARES in manifest.requires,
    )


def stages_before(manifest: Manifest, stage: int, peer: str) -> dict[int, AgreementConfig]:
    """Return the groups whose heads count at a later stage of a pipeline: the first stage and the one before it."""
    return {other: agreement_config(manifest, other, peer) for other in {0, stage - 1}} if stage else {}


def agreement_config(manifest: Manifest, stage: int, peer: str, gate: Gate | None = None) -> AgreementConfig:
    """Return the part of `peer` in the group of `stage`. `gate`: its own, which holds the credential that admits it."""
    run, stages = manifest.run, manifest.stages
    return AgreementConfig(
        genesis=manifest.first_head(stage),
        peer=peer,
        coordinator=manifest.authority,
        credential=b"" if gate is None else msgspec.msgpack.encode(gate.chain),
        mode=manifest.agreement_mode,
        lone_survivor=run.lone_survivor,
        rounds=run.rounds,
        min_peers=run.min_peers if stages == 1 else 1,  # all stages together have as many: `Work.may_begin`
        max_peers=run.max_peers,
        undo_s=UNDO_S if stages == 1 else STAGE_UNDO_S,
    )


def sponsors_of(manifest: Manifest) -> Callable[[JoinBody, str], tuple[Sponsor, ...] | None]:
    """Return the rule by which all voters of a run judge requests to join (`Work.sponsors`)."""

    def sponsors(join: JoinBody, signer: str) -> tuple[Sponsor, ...] | None:
        if manifest.open:
            return ()
        try:
            chain = msgspec.msgpack.decode(join.credential, type=Chain)
            if check_chain(manifest, chain, signer).kind != "member":
                return None
        except (NotAdmitted, *MALFORMED):
            return None
        return tuple(Sponsor(sponsor_name(link.key), link.guests) for link in chain[:-1])

    return sponsors


def sponsor_name(key: bytes) -> str:
    """Return the name of an invite's public key, or of that of a member that invites."""
    return blake3(key).digest(NAME_BYTES).hex()
