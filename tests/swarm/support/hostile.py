"""A member that lies: an ordinary member of a group whose calls a test changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from peer.errors import ConnectionLost
from peer.identity import Signed, open_body, sign_body
from peer.net.method import Method
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.plan import CONTRIBUTION_KIND, Assignment, Contribution
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.messages import AGREE, MessageBatch
from swarm.state.upload_limits import SnapshotLimits
from tests.swarm.support.driven_group import DrivenGroup, DrivenReplica, GroupSetting, open_driven_group

NUMEL = 80_000  # five slices, so that every member owns one
BUNDLED = replace(GroupSetting.schedule, bundled=True)
Change = Callable[[str, Any, bytes], tuple[Any, bytes] | None]
Say = Callable[[str, Any], Any]


def deltas(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
    seed = sum(peer.encode()) * 1000 + first_step
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * 1e-2


class Impatient(AdaptiveTimeouts):
    """Timeouts short enough for a test to see them pass, but not so short that they always do on a busy machine: a
    refusal may be held back for 0.8 of `answer_s`."""

    @property
    def answer_s(self) -> float:
        return 3.0

    def exchange_s(self, payload_bytes: int) -> float:
        return 4.0


@dataclass
class Liar:
    """A hostile member."""

    member: DrivenReplica

    @property
    def peer(self) -> str:
        return self.member.peer

    def sends(self, method: Method[Any, Any], change: Change) -> None:
        """Replace calls of `method` by `change(peer, body, payload)`; None drops the call."""
        rpc: Any = self.member.host.rpc
        honest = rpc.call

        async def call(peer: str, called: Method[Any, Any], body: Any, payload: Any = b"", **options: Any) -> Any:
            if called.name == method.name and peer != self.peer:
                changed = change(peer, body, bytes(payload))
                if changed is None:
                    raise ConnectionLost("the liar drops this call")
                body, payload = changed
            return await honest(peer, called, body, payload, **options)

        rpc.call = call

    def says(self, kind: type[Any], change: Say) -> None:
        """Replace its messages of a kind by `change(peer, message)`; None drops the message."""

        def rewrite(peer: str, letter: MessageBatch, payload: bytes) -> tuple[MessageBatch, bytes] | None:
            said = [change(peer, message) if isinstance(message, kind) else message for message in letter.messages]
            kept = tuple(message for message in said if message is not None)
            return (msgspec.structs.replace(letter, messages=kept), payload) if kept else None

        self.sends(AGREE, rewrite)

    def sign(self, kind: str, body: Any) -> Signed:
        return sign_body(self.member.host.identity, kind, body)

    def forge(self, signed: Signed, **changes: Any) -> Signed:
        """Return its own contribution with changed claims, correctly signed."""
        body = open_body(signed, CONTRIBUTION_KIND, Contribution)
        return self.sign(CONTRIBUTION_KIND, msgspec.structs.replace(body, **changes))

    async def tell(self, peer: str, *messages: Any) -> None:
        """Send messages in a call of their own. Raises what the call raises."""
        await self.call(peer, AGREE, MessageBatch("run", messages))

    async def call(self, peer: str, method: Method[Any, Any], body: Any, payload: bytes = b"") -> Any:
        # a refusal may be held back for some seconds, and the machine may stand still as long
        return (await self.member.host.rpc.call(peer, method, body, payload, timeout_s=60)).body


@dataclass
class Scene:
    """Three honest members and a liar, in a group that has begun."""

    group: DrivenGroup
    honest: Sequence[DrivenReplica]
    liar: Liar

    def penalties(self) -> list[str]:
        """Return the reasons for which honest members penalized the liar."""
        return [
            str(event.fields["reason"])
            for member in self.honest
            for event in member.seen("peer_penalized")
            if event.fields["peer"] == self.liar.peer
        ]

    async def rounds(self, number: int) -> None:
        """Wait until every honest member has committed that many more rounds."""
        wanted = max(member.head.round for member in self.honest) + number
        await self.group.until_round(wanted, self.honest)

    def check(self) -> None:
        """Check what must hold in any case: one chain, the same bits, no bug, no honest member penalized."""
        names = {member.peer for member in self.honest}
        chain: dict[Any, bytes] = {}
        for member in self.honest:
            assert not member.seen("bug"), member.seen("bug")
            struck = [event for event in member.seen("peer_penalized") if event.fields["peer"] in names]
            assert not struck, struck
            for head in member.heads:
                assert chain.setdefault(position_of(head), head.hash) == head.hash, "a fork"
            assert member.state.tree.root == member.head.state_hash
            assert bool(torch.isfinite(member.state.theta).all())
            assert float(member.state.theta.norm()) < 2 * float(self.group.theta.norm())
            assert member.head.term == 1


@asynccontextmanager
async def hostile_scene(
    folder: Path,
    prepare: Callable[[Liar], None] = lambda liar: None,
    timeout_s: float = 500.0,
    schedule: RoundSchedule = GroupSetting.schedule,
) -> AsyncIterator[Scene]:
    """Open the scene; check it when the test leaves the block."""
    setting = GroupSetting(
        numel=NUMEL,
        schedule=schedule,
        codec="fp32",
        min_peers=4,
        timeouts=Impatient,
        exchange_s=4.0,
        snapshots=SnapshotLimits(small_bytes=0),  # so that memory does not grow with the rounds
        work_s=0.05,
        keeps_pace=False,  # a liar may stay behind
    )
    async with open_driven_group(folder, setting, timeout_s) as group:
        honest = [await group.enter(deltas) for _ in range(3)]
        liar = Liar(await group.enter(deltas))
        prepare(liar)
        scene = Scene(group, honest, liar)
        yield scene
        scene.check()
