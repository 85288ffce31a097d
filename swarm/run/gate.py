"""Access control at one peer: how two peers prove to each other that they belong to the run, and what each may then do.

    dialler  -> run.enter   nonce, chain                      nothing secret, and no name of the run
    answerer -> its reply   nonce, chain, signature over (run, both ids, both nonces)
    dialler  -> run.prove   its own signature over the same

The answerer looks at the dialler's chain before it speaks, the dialler verifies the answerer before it proves itself,
and `Rpc` sends no call that is not open to a peer that has not done so on this connection. In an open run there is no
chain: what is proved is that both are in this run and that neither is banned.

Rights end with the chain, on live connections, too. A client's link is short-lived: it signs another one before that
and introduces itself again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import trio
from blake3 import blake3

from peer.bounds import MEMBERS_MAX, Latest
from peer.decoding import MALFORMED
from peer.errors import BarnraiseError, NotAdmitted, ProtocolViolation
from peer.identity import Identity, Signed, public_key_of, sign_bytes, verify_bytes
from peer.net.method import Empty
from peer.net.rpc import Call, Method, Rpc
from swarm.run.ban_list import BANS_BYTES_MAX, BanList, Serial, open_bans
from swarm.run.credentials import Chain, Rights, judge
from swarm.run.guests import GuestBook
from swarm.run.manifest import AnyManifest, Manifest

CHALLENGES_MAX: Final = 1024  # a challenge that is pushed out costs its peer one more introduction
_NONCE_BYTES: Final = 32
_KIND: Final = "enter"

_RENEWALS_AT_ONCE: Final = 16
_RENEWAL_S: Final = 10.0

RenewChain = Callable[[float], Chain]
"""Returns a peer's chain, with its last link signed at a Unix time."""
Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class Entry(msgspec.Struct, frozen=True):
    """The dialler's first move."""

    protocol: Version
    """That of the run, as its manifest says."""
    run: Bytes32
    """Hash of the run's id and the nonce: only a peer that knows the id can compare it."""
    nonce: Bytes32
    chain: Chain
    bans: Serial
    """Of the ban list that it knows, 0 for none."""


class EntryReply(msgspec.Struct, frozen=True):
    """The answerer's move."""

    nonce: Bytes32
    chain: Chain
    bans: Serial
    signature: Signature


class Proof(msgspec.Struct, frozen=True):
    """The dialler's second move."""

    signature: Signature


ENTER: Final = Method("run.enter", Entry, EntryReply, access="open", urgent=True)
PROVE: Final = Method("run.prove", Proof, Empty, access="open", urgent=True)
BANS: Final = Method(
    "run.bans",
    Empty,
    Empty,
    request_payload_max=BANS_BYTES_MAX,
    reply_payload_max=BANS_BYTES_MAX,
    access="client",
)
"""A ban list as the payload, or a request for the callee's if there is none. The answer's payload is the callee's,
empty if the caller's is no older."""


@dataclass(frozen=True)
class _Challenge:
    statement: bytes
    """The bytes that the dialler must sign."""
    admission: Rights
    chain: Chain


class Gate:
    """Guards the host behind `rpc` for the run or served model of `manifest`."""

    def __init__(
        self,
        rpc: Rpc,
        manifest: AnyManifest,
        identity: Identity,
        chain: Chain = (),
        guests: GuestBook | None = None,
        clock: Callable[[], float] = time.time,
        renew: RenewChain | None = None,
    ) -> None:
        """`chain`: what this peer shows to others; empty for the authority and in an open run. `renew`: signs a chain
        that ends later, for a client. `clock` returns Unix seconds. Raises NotAdmitted if the chain does not admit this
        peer."""
        self._chain = chain
        self._renew_chain = renew
        self._signed_at = clock()
        self.guests: Final = GuestBook() if guests is None else guests
        # Who makes an invite to a served model says with its number of guests how many a prefix may be.
        self.guests.per_prefix = manifest.run.members_per_prefix if isinstance(manifest, Manifest) else MEMBERS_MAX
        self._rpc = rpc
        self._admissions = rpc.admissions
        self._manifest = manifest
        self._identity = identity
        self._clock = clock
        self._bans: BanList | None = None
        self._signed_bans: Signed | None = None
        self._kept: frozenset[bytes] = frozenset()  # the guests of withdrawn invites that the authority's list names
        self._chains: dict[str, Chain] = {}
        self._challenges = Latest[str, _Challenge](CHALLENGES_MAX)
        judge(manifest, chain, identity.peer_id, clock())
        self._admissions.guard()
        has_heads = isinstance(manifest, Manifest) and manifest.outer.has_common_state
        self._admissions.proof_is_enough = not has_heads
        self._admissions.trust("authority", [manifest.authority])
        rpc.register(ENTER, self._enter)
        rpc.register(PROVE, self._prove)
        rpc.register(BANS, self._exchange_bans)
        rpc.introduce = self.introduce

    @property
    def chain(self) -> Chain:
        """The credentials that this peer shows to others."""
        return self._chain

    @property
    def bans(self) -> BanList | None:
        """The newest ban list seen."""
        return self._bans

    def vouch(self, peer: str, chain: Chain) -> None:
        """Raise NotAdmitted unless this chain makes `peer` a member of the run. For records that are no call: they take
        no place of an invite."""
        admission = self._judge(peer, chain)
        if admission.access != "member":
            raise NotAdmitted(f"{peer} is a client of this run, no member")
        if not self._stands(peer):
            self.guests.record(admission, self._clock())

    async def introduce(self, peer: str, timeout_s: float) -> None:
        """Prove this peer to `peer` and have it prove itself.

        Raises ProtocolViolation if `peer` does not belong to the run, RemoteError (code NotAdmitted) if it refuses us,
        and what any call raises.
        """
        deadline = time.monotonic() + timeout_s
        nonce = secrets.token_bytes(_NONCE_BYTES)
        entry = Entry(self._manifest.protocol, self._run_hash(nonce), nonce, self._fresh_chain(), self._serial)
        reply = (await self._rpc.call(peer, ENTER, entry, timeout_s=timeout_s)).body
        statement = self._statement(self._identity.peer_id, peer, nonce, reply.nonce)
        try:
            admission = self._judge_newcomer(peer, reply.chain)
        except NotAdmitted as error:
            raise ProtocolViolation(f"{peer} answers for this run without being admitted: {error}") from error
        if not verify_bytes(peer, _KIND, statement + b"answerer", reply.signature):
            raise ProtocolViolation(f"{peer} answers for this run with a wrong signature")
        proof = Proof(sign_bytes(self._identity, _KIND, statement + b"dialler"))
        await self._rpc.call(peer, PROVE, proof, timeout_s=deadline - time.monotonic())
        try:
            self._grant(peer, reply.chain, admission)
        except NotAdmitted as error:
            raise ProtocolViolation(str(error)) from error
        if reply.bans != self._serial:
            await self._share_bans(peer, reply.bans, deadline - time.monotonic())

    async def renew(self) -> None:
        """Show a new chain to every connected peer: rights end with the chain that was shown. A peer that does not
        answer now is shown it with the next call. Do nothing where no chain is renewed."""
        if self._renew_chain is None or not self._chain:
            return
        self._sign_again()
        turns = trio.CapacityLimiter(_RENEWALS_AT_ONCE)

        async def show(peer: str) -> None:
            async with turns:
                with suppress(BarnraiseError):
                    await self._rpc.introduce_again(peer, _RENEWAL_S)

        async with trio.open_nursery() as nursery:
            for peer in self._admissions.admitted:
                nursery.start_soon(show, peer)

    def learn_bans(self, signed: Signed) -> None:
        """Take over a newer ban list, effective at once. ProtocolViolation if it is forged."""
        if signed == self._signed_bans:
            return
        bans = open_bans(signed, self._manifest)
        if self._bans is not None and bans.serial <= self._bans.serial:
            return
        self._bans, self._signed_bans = bans, signed
        self._kept = frozenset().union(*bans.withdrawn.values())
        self._admissions.bar(bans.peers)
        for peer in self._admissions.admitted:
            try:
                self._judge(peer, self._chains.get(peer, ()))
            except NotAdmitted:
                self._admissions.revoke(peer)

    @property
    def closed(self) -> bool:
        """Whether members come by invite only."""
        return not self._manifest.open

    @property
    def _serial(self) -> int:
        return 0 if self._bans is None else self._bans.serial

    async def _enter(self, call: Call[Entry]) -> EntryReply:
        entry = call.body
        spoken = self._manifest.protocol
        if entry.protocol != spoken:
            old = "the caller's machine" if entry.protocol < spoken else "the run's machines"
            raise NotAdmitted(
                f"the caller speaks protocol version {entry.protocol} and this run version {spoken}:"
                f" upgrade barnraise on {old}"
            )
        if entry.run != self._run_hash(entry.nonce):
            raise NotAdmitted("this peer is in another run: ask for an invite to the right run")
        admission = self._judge_newcomer(call.peer, entry.chain)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        statement = self._statement(call.peer, self._identity.peer_id, entry.nonce, nonce)
        self._challenges[call.peer] = _Challenge(statement, admission, entry.chain)
        signature = sign_bytes(self._identity, _KIND, statement + b"answerer")
        return EntryReply(nonce, self._fresh_chain(), self._serial, signature)

    async def _prove(self, call: Call[Proof]) -> Empty:
        challenge = self._challenges.pop(call.peer, None)
        if challenge is None:
            raise NotAdmitted("there is no challenge to prove: introduce yourself with run.enter first")
        if not verify_bytes(call.peer, _KIND, challenge.statement + b"dialler", call.body.signature):
            raise ProtocolViolation("a wrong signature in run.prove")
        self._grant(call.peer, challenge.chain, challenge.admission)
        return Empty()

    async def _exchange_bans(self, call: Call[Empty]) -> tuple[Empty, bytes]:
        if call.payload.nbytes:
            self.learn_bans(_decode_bans(call.payload))
        return Empty(), b"" if self._signed_bans is None else msgspec.msgpack.encode(self._signed_bans)

    async def _share_bans(self, peer: str, serial: int, timeout_s: float) -> None:
        own = b""
        if serial < self._serial and self._signed_bans is not None:
            own = msgspec.msgpack.encode(self._signed_bans)
        reply = await self._rpc.call(peer, BANS, Empty(), own, timeout_s=timeout_s)
        if reply.payload.nbytes:
            self.learn_bans(_decode_bans(reply.payload))

    def _fresh_chain(self) -> Chain:
        """Return what this peer shows; of a chain that is renewed, half of the time is left, also after a machine has
        slept."""
        if self._chain and self._clock() > (self._signed_at + self._chain[-1].expires) / 2:
            self._sign_again()
        return self._chain

    def _sign_again(self) -> None:
        if self._renew_chain is not None:
            self._signed_at = self._clock()
            self._chain = self._renew_chain(self._signed_at)

    def _judge(self, peer: str, chain: Chain) -> Rights:
        return judge(self._manifest, chain, peer, self._clock(), self._bans)

    def _judge_newcomer(self, peer: str, chain: Chain) -> Rights:
        """The same for a connected peer: also raises NotAdmitted if its invite has no place for it."""
        admission = self._judge(peer, chain)
        if not self._stands(peer):
            self.guests.check(admission, self._rpc.prefix(peer), self._clock())
        return admission

    def _stands(self, peer: str) -> bool:
        """Whether it is decided for all that a peer belongs to the run: it is in a head, or the authority's list names
        it. Then nothing is counted here."""
        return self._admissions.is_anchor(peer) or (bool(self._kept) and public_key_of(peer) in self._kept)

    def _grant(self, peer: str, chain: Chain, admission: Rights) -> None:
        """Admit a peer that has proved itself, and give it its place."""
        self._judge_newcomer(peer, chain)  # again: a ban, or the last guest, may have come since
        self.guests.enter(admission, self._rpc.prefix(peer), self._clock())
        self._chains = {known: self._chains[known] for known in self._admissions.admitted if known in self._chains}
        self._chains[peer] = chain
        scarce = not self._manifest.open and admission.access == "member"
        self._admissions.grant(peer, admission.access, admission.until, trusted=scarce)

    def _run_hash(self, nonce: bytes) -> bytes:
        return blake3(self._manifest.run_id.encode() + nonce, derive_key_context="barnraise run.enter").digest()

    def _statement(self, dialler: str, answerer: str, dialler_nonce: bytes, answerer_nonce: bytes) -> bytes:
        return msgspec.msgpack.encode((self._manifest.run_id, dialler, answerer, dialler_nonce, answerer_nonce))


def _decode_bans(payload: memoryview) -> Signed:
    try:
        return msgspec.msgpack.decode(payload, type=Signed)
    except MALFORMED as error:
        raise ProtocolViolation(f"a malformed ban list: {error}") from error
