"""A member that lies: an ordinary member of a group whose calls and answers a test changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio

from peer.errors import ConnectionLost
from peer.identity import Signed, open_body, sign_body
from peer.net.method import Call, Method
from swarm.protocol.plan import CONTRIBUTION_KIND, Assignment, Contribution
from swarm.protocol.timeouts import AdaptiveTimeouts
from tests.swarm.support.driven_group import Group, StageReplica, open_group

NUMEL = 80_000  # five slices, so that every member owns one
Change = Callable[[str, Any, bytes], tuple[Any, bytes] | None]


class Impatient(AdaptiveTimeouts):
    """Timeouts short enough for a test to see them pass, but not so short that they always do on a busy machine: a
    refusal may be held back for 0.8 of `answer_s`."""

    @property
    def answer_s(self) -> float:
        return 3.0

    def exchange_s(self, payload_bytes: int) -> float:
        return 4.0


def deltas(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
    seed = sum(peer.encode()) * 1000 + first_step
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * 1e-2


@dataclass
class Liar:
    """A hostile member. `sends` and `answers` replace its honest calls and answers."""

    member: StageReplica

    @property
    def peer(self) -> str:
        return self.member.host.peer_id

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

    def answers(self, method: Method[Any, Any], change: Callable[[Any], Any]) -> None:
        """Replace answers to `method` by `change(honest answer)`, of any type."""
        served = self.member.host.rpc.server._methods[method.name]
        honest = served.handler

        async def handle(call: Call[Any]) -> Any:
            return change(await honest(call))

        served.method = Method(
            method.name, method.request, msgspec.Struct, method.request_payload_max, method.reply_payload_max
        )
        served.handler = handle

    def forge(self, signed: Signed, **changes: Any) -> Signed:
        """Return its own contribution with changed claims, correctly signed."""
        body = open_body(signed, CONTRIBUTION_KIND, Contribution)
        return sign_body(self.member.context.identity, CONTRIBUTION_KIND, msgspec.structs.replace(body, **changes))

    async def call(self, peer: str, method: Method[Any, Any], body: Any, payload: bytes = b"") -> Any:
        # a refusal may be held back for some seconds, and the machine may stand still as long
        return (await self.member.host.rpc.call(peer, method, body, payload, timeout_s=60)).body


@dataclass
class Scene:
    """Three honest members and a liar, in a group that has begun."""

    group: Group
    honest: list[StageReplica]
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
        wanted = max(member.engine.head.round for member in self.honest) + number
        while any(member.engine.head.round < wanted for member in self.honest):
            await trio.sleep(0.02)

    def tell(self) -> None:
        """Print what happened, for the output of a failed test."""
        told = [
            (e.at, member.host.peer_id[-4:], e) for member in (*self.honest, self.liar.member) for e in member.events
        ]
        for at, who, event in sorted(told, key=lambda entry: entry[0]):
            print(f"{at % 1000:7.2f} {who} {event.name} {event.fields}")  # noqa: T201
        print("the liar is", self.liar.peer[-4:])  # noqa: T201

    def check(self) -> None:
        """Check what must hold in any case: one chain, the same bits, no bug, no honest member penalized."""
        names = {member.host.peer_id for member in self.honest}
        committed = {head.state_hash for member in (*self.honest, self.liar.member) for head in member.heads}
        chains = [{head.position: head.hash for head in member.heads} for member in self.honest]
        for chain in chains[1:]:
            assert all(chains[0].get(position, name) == name for position, name in chain.items()), "a fork"
        for member in self.honest:
            assert not member.seen("bug"), member.seen("bug")
            assert not [e for e in member.seen("peer_penalized") if e.fields["peer"] in names], member.seen(
                "peer_penalized"
            )
            root = member.context.state.tree.root
            replaying = member.engine.phase == "catching up"  # round by round, and the test may end between two
            assert root == member.engine.head.state_hash or (replaying and root in committed)
            assert bool(torch.isfinite(member.context.state.theta).all())
            assert float(member.context.state.theta.norm()) < 2 * float(self.group.theta.norm())


@asynccontextmanager
async def hostile_scene(
    folder: Path, prepare: Callable[[Liar], None] = lambda liar: None, codec: str = "fp32", timeout_s: float = 150.0
) -> AsyncIterator[Scene]:
    """Open the scene; check it when the test leaves the block."""
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_group(folder, NUMEL, codec=codec, rounds=10**6, min_peers=4))
        group.timeouts = Impatient
        group.authority._regroup_wait_s = lambda best, head_reports: 600.0  # type: ignore[method-assign]  # no member is missing
        honest = [await stack.enter_async_context(group.join(deltas)) for _ in range(3)]
        liar = Liar(await stack.enter_async_context(group.join(deltas)))
        prepare(liar)
        with trio.fail_after(timeout_s):
            async with trio.open_nursery() as nursery:
                for member in (*honest, liar.member):
                    nursery.start_soon(member.engine.run)
                scene = Scene(group, honest, liar)
                try:
                    yield scene
                except trio.Cancelled:
                    scene.tell()
                    raise
                nursery.cancel_scope.cancel()
        scene.check()
