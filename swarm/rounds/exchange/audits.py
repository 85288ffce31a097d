"""Slices merged a second time: an owner whose result is not the merge of its inputs is detected and excluded.

After a commit a member may draw a slice of another owner, fetch what went into it, merge it again and compare. No peer
can foresee the draw, so a false result is found in the end, however many slices are true. Contributors have signed the
hashes of what they sent: each member that learns of a false result checks it itself. An owner that is connected but
repeatedly sends no evidence is excluded by the members that asked. The false result stays in the weights; how large it
may be, `Coding.check_result` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import trio
from blake3 import blake3

from peer.bounds import Latest
from peer.errors import BarnraiseError, ProtocolViolation, RoundDiscarded
from peer.footprint.kept import AUDITED
from peer.identity import sign_body
from peer.net.method import Call, Empty
from peer.net.rpc import Buffer
from peer.notifier import Notifier
from swarm.protocol.head import Head
from swarm.protocol.messages import ACCUSE, SHOW, ShownSlice, SliceOf
from swarm.protocol.plan import Contribution
from swarm.rounds.context import RoundContext
from swarm.rounds.exchange.slice_exchange import SliceExchange

SHARE: Final = 1 / 64  # of what an exchange moves through a member, spent on audits
UNSHOWN_MAX: Final = 5  # audits of one owner in a row that come to nothing
_DRAW_KIND: Final = "audit"


@dataclass
class _Committed:
    """The inputs merged on the way to one commit."""

    exchange: SliceExchange
    results: Sequence[memoryview]
    """The encoded result of each slice."""
    fetched: dict[tuple[int, str], memoryview] = field(default_factory=dict)
    """Other contributors' slices that went into audited results, by (index, contributor)."""
    verdicts: dict[int, bool] = field(default_factory=dict)
    """Whether a slice's result is true, by index."""


class Audits:
    """The audits of one replica."""

    def __init__(self, context: RoundContext, leave_out: Callable[[str, str], None]) -> None:
        """`leave_out(peer, reason)` ends all dealings of this replica's group with a peer."""
        self._context, self._leave_out = context, leave_out
        self._commits = Latest[bytes, _Committed](AUDITED)
        self._remembered = Notifier()
        self._unshown: Counter[str] = Counter()
        self._accusers: set[str] = set()  # whose accusation is being judged
        context.host.rpc.register(SHOW, self._on_show)
        context.host.rpc.register(ACCUSE, self._on_accuse)

    def remember(self, exchange: SliceExchange, results: Sequence[memoryview]) -> None:
        """Note the exchange whose results led to a commit: it can be audited for a while."""
        self._commits[exchange.order.key] = _Committed(exchange, results)
        self._remembered.notify()

    async def audit(self, key: bytes, head: Head) -> None:
        """Draw whether to merge a slice of the commit of `head` again. If its result is false, tell the others."""
        commit = self._commits.get(key)
        index = self._draw(commit.exchange, head) if commit is not None else None
        if commit is None or index is None:  # many commits may have come before this task's turn
            return
        owner = commit.exchange.owners[index]
        is_true = await self._judge(commit, index, (owner, ""))
        self._note_shown(owner, is_true is not None)
        self._context.events.emit("slice_audited", round=head.round, peer=owner, slice=index, is_true=is_true)
        if is_true is False:
            async with trio.open_nursery() as nursery:
                for member in head.members:
                    if member.peer not in (self._context.me.peer, owner):
                        nursery.start_soon(self._accuse, member.peer, SliceOf(key, index))

    def _note_shown(self, owner: str, shown: bool) -> None:
        """Count the audits in a row for which a connected owner has not shown its inputs."""
        if shown:
            del self._unshown[owner]
        elif owner not in self._context.host.suspects:
            self._unshown[owner] += 1
            if self._unshown[owner] >= UNSHOWN_MAX:
                self._leave_out(owner, f"it has not shown what it merged, {UNSHOWN_MAX} times in a row")

    def _draw(self, exchange: SliceExchange, head: Head) -> int | None:
        """Return the slice to audit, if any. The draw is this peer's signature, which no other peer can compute, and an
        owner has given its result before."""
        order, me = exchange.order, self._context.me.peer
        others = [index for index in order.indices if exchange.owners and exchange.owners[index] != me]
        if not others:
            return None
        signed = sign_body(self._context.identity, _DRAW_KIND, SliceOf(head.hash, 0))
        drawn = blake3(msgspec.msgpack.encode(signed)).digest()
        # An exchange moves each slice through a member about twice: its own, and the result.
        chance = min(1.0, SHARE * 2 * len(order.indices) / len(order.merged))
        if int.from_bytes(drawn[:8], "big") >= chance * 2**64:
            return None
        return others[int.from_bytes(drawn[8:16], "big") % len(others)]

    async def _judge(self, commit: _Committed, index: int, sources: Sequence[str]) -> bool | None:
        """Return whether a slice's result is the merge of what went into it; None if that cannot be had. `sources`: who
        may show it, "" for each contributor its own. Leaves the owner out if it is not."""
        if index not in commit.verdicts:
            order, owner = commit.exchange.order, commit.exchange.owners[index]
            encoded = []
            for body in order.merged:
                data = await self._input(commit, index, body, sources)
                if data is None:
                    return None
                encoded.append(data)
            try:
                result = await trio.to_thread.run_sync(order.merge, index, encoded)
                is_true = result == commit.results[index]
            except ProtocolViolation:  # what does not merge has no result
                is_true = False
            if index not in commit.verdicts and not is_true:
                round = order.round_info.round
                self._leave_out(owner, f"its result of slice {index} of round {round} is not the merge of that slice")
            commit.verdicts[index] = is_true
        return commit.verdicts[index]

    async def update_of(self, exchange: SliceExchange, body: Contribution) -> list[memoryview] | None:
        """Return all slices of a contribution: those on this peer, and the rest from their owners, else from the
        contributor. None if that cannot be had. Nothing of it is kept."""
        slices: list[memoryview] = []
        for index in exchange.order.indices:
            data = exchange.input_of(index, body)
            for source in (exchange.owners[index] if exchange.owners else "", body.member.peer):
                if data is None and source not in {"", self._context.me.peer, *self._context.host.suspects}:
                    data = await self._fetch(source, exchange, index, body)
            if data is None:
                return None
            slices.append(data)
        return slices

    async def _input(
        self, commit: _Committed, index: int, body: Contribution, sources: Sequence[str]
    ) -> memoryview | None:
        """Return a contributor's slice from this peer, else from the first source that sends it."""
        peer, exchange = body.member.peer, commit.exchange
        here = exchange.input_of(index, body) or commit.fetched.get((index, peer))
        for source in dict.fromkeys(source or peer for source in sources):
            if here is not None:
                break
            if source != self._context.me.peer and source not in self._context.host.suspects:
                here = await self._fetch(source, exchange, index, body)
        if here is not None:
            commit.fetched[index, peer] = here
        return here

    async def _fetch(self, source: str, exchange: SliceExchange, index: int, body: Contribution) -> memoryview | None:
        call, timeout_s = SliceOf(exchange.order.key, index, body.member.peer), exchange.timeout_s
        try:
            reply = await self._context.host.rpc.call(source, SHOW, call, timeout_s=timeout_s, bulk=True)
        except BarnraiseError:
            return None
        digest = await trio.to_thread.run_sync(lambda: blake3(reply.payload).digest())
        return reply.payload if exchange.is_committed(index, body, digest, reply.body.hashes) else None

    # -- other peers ---------------------------------------------------------------------------------------------------

    async def _accuse(self, peer: str, slice_of: SliceOf) -> None:
        timeout_s = self._commits[slice_of.key].exchange.timeout_s if slice_of.key in self._commits else 0.0
        try:
            await self._context.host.rpc.call(peer, ACCUSE, slice_of, timeout_s=2 * timeout_s)
        except BarnraiseError:
            return  # it audits, too

    async def _commit_of(self, key: bytes) -> _Committed | None:
        """Return a commit; one that asks may be a moment ahead."""
        await self._remembered.until(lambda: key in self._commits, self._context.timeouts.answer_s)
        return self._commits.get(key)

    async def _on_show(self, call: Call[SliceOf]) -> tuple[ShownSlice, Buffer]:
        """Show what went into a slice's result."""
        index, peer = call.body.index, call.body.contributor
        commit = await self._commit_of(call.body.key)
        body = None
        if commit is not None and index in commit.exchange.order.indices:
            body = next((body for body in commit.exchange.order.merged if body.member.peer == peer), None)
        if commit is None or body is None:
            raise RoundDiscarded("that commit is not known here, or not any more")
        data = commit.exchange.input_of(index, body) or commit.fetched.get((index, peer))
        if data is None:
            raise RoundDiscarded("that slice is not here")
        return ShownSlice(commit.exchange.list_of(index, body)), data

    async def _on_accuse(self, call: Call[SliceOf]) -> Empty:
        """Judge a result that another member says is false. Raises `ProtocolViolation` if it is true."""
        commit, index = await self._commit_of(call.body.key), call.body.index
        if commit is None or index not in commit.exchange.order.indices:
            raise RoundDiscarded("that commit cannot be judged here")
        owners, me = commit.exchange.owners, self._context.me.peer
        if call.peer in self._accusers or not owners or owners[index] == me:
            raise RoundDiscarded("that slice cannot be judged here now")
        self._accusers.add(call.peer)
        try:
            is_true = await self._judge(commit, index, (call.peer, owners[index], ""))
        finally:
            self._accusers.discard(call.peer)
        if is_true is None:
            raise RoundDiscarded("what was merged cannot be had, so nothing is proved")
        if is_true:
            raise ProtocolViolation("it accused the owner of a slice whose result is true")
        return Empty()
