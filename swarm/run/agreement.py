"""What a run's manifest fixes about the agreement of one of its groups, alike for its replicas and its coordinator."""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.round_schedule import RoundSchedule
from swarm.run.gate import Gate
from swarm.run.manifest import Manifest

COMPUTE_S_MAX: Final = 3600.0
UNDO_S: Final = 600.0
STAGE_UNDO_S: Final = 20.0  # all stages stand still while one has lost its last commit; it goes on from a backup
SERIAL_BYTES: Final = 16


def schedule_of(manifest: Manifest, stage: int) -> RoundSchedule:
    """Return how much work the rounds of a stage's group have."""
    inner, seq_len = manifest.inner, manifest.data.seq_len
    return RoundSchedule(manifest.outer, inner, seq_len, COMPUTE_S_MAX, stage, manifest.stages, manifest.micro_batch)


def agreement_config(manifest: Manifest, stage: int, peer: str, gate: Gate | None = None) -> AgreementConfig:
    """Return the part of `peer` in the group of `stage`. `gate`: its own, which holds the invite that it came with."""
    run, stages = manifest.run, manifest.stages
    return AgreementConfig(
        genesis=manifest.first_head(stage),
        peer=peer,
        coordinator=manifest.authority,
        invite="" if gate is None else invite_serial(gate),
        mode=manifest.agreement_mode,
        faults=manifest.faults_tolerated,
        rounds=run.rounds,
        min_peers=run.min_peers if stages == 1 else 1,  # all stages together have as many: `Work.may_begin`
        max_peers=run.max_peers,
        undo_s=UNDO_S if stages == 1 else STAGE_UNDO_S,
    )


def invite_serial(gate: Gate) -> str:
    """Return the serial of the invite that this peer came with, which then has one vote in the group. Empty where none
    was needed, or where it may bring in several peers: those are counted by the gates."""
    for link in reversed(gate.chain):
        if link.kind == "invite":
            return blake3(link.key).digest(SERIAL_BYTES).hex() if link.guests == 1 else ""
    return ""
