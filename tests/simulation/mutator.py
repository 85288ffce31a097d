"""Changes any one field of any message. What the mutating peer has signed itself it signs again; other signatures it
cannot make, but it can swap signed bodies for others that it has seen."""

from __future__ import annotations

from random import Random
from typing import Any, Final

import msgspec

from peer.decoding import MALFORMED
from peer.identity import Signed
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.plan import CONTRIBUTION_KIND, PLAN_KIND, Contribution, WorkPlan
from tests.simulation.signatures import TableSigner

SEEN_MAX: Final = 40
BODIES: Final[dict[str, tuple[str, type[msgspec.Struct]]]] = {
    "promise": (evidence.PROMISE, msg.PromiseBody),
    "promises": (evidence.PROMISE, msg.PromiseBody),
    "vote": (evidence.VOTE, msg.VoteBody),
    "votes": (evidence.VOTE, msg.VoteBody),
    "proposal": (evidence.PROPOSAL, msg.ProposalBody),
    "roster": (evidence.ROSTER, msg.RosterBody),
    "results": (evidence.RESULTS, msg.ResultsBody),
    "plan": (PLAN_KIND, WorkPlan),
    "contribution": (CONTRIBUTION_KIND, Contribution),
    "contributions": (CONTRIBUTION_KIND, Contribution),
    "join": (evidence.JOIN, msg.JoinBody),
    "joins": (evidence.JOIN, msg.JoinBody),
    "witness": (evidence.WITNESS, msg.WitnessBody),
    "endorsement": (evidence.ENDORSEMENT, msg.EndorsementBody),
    "start": (evidence.START, msg.StartBody),
}
"""What is signed in the fields of each name."""


class Mutator:
    """One peer's mutations."""

    def __init__(self, random: Random, signer: TableSigner) -> None:
        self._random, self._signer = random, signer
        self._seen: dict[str, list[Signed]] = {}
        self._hashes: list[bytes] = []

    def see(self, message: msg.Message) -> None:
        """Remember signed bodies and hashes for later."""
        self._gather("", message)

    def _gather(self, name: str, value: Any) -> None:
        if isinstance(value, Signed):
            kept = self._seen.setdefault(name, [])
            if len(kept) < SEEN_MAX:
                kept.append(value)
        elif isinstance(value, bytes) and len(value) == 32 and len(self._hashes) < SEEN_MAX:
            self._hashes.append(value)
        elif isinstance(value, msgspec.Struct):
            for field in value.__struct_fields__:
                self._gather(field, getattr(value, field))

    def mutate(self, message: msg.Message) -> msg.Message:
        """Return the message with one field changed, as long as a receiver could still decode it."""
        changed = self._change("", message)
        try:
            encoded = msgspec.msgpack.encode(changed)
            decoded: msg.Message = msgspec.msgpack.decode(encoded, type=msg.Message)
        except MALFORMED:
            return message
        return decoded

    def _change(self, name: str, value: Any) -> Any:
        random = self._random
        if isinstance(value, Signed):
            return self._change_signed(name, value)
        if isinstance(value, msgspec.Struct):
            fields = value.__struct_fields__
            if not fields:
                return value
            field = random.choice(fields)
            return msgspec.structs.replace(value, **{field: self._change(field, getattr(value, field))})
        if isinstance(value, tuple):
            return self._change_tuple(name, value)
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return random.choice((value + 1, value - 1, 0, -1, value + 1000, (1 << 53) - 1))
        if isinstance(value, float):
            return random.choice((0.0, -1.0, 1e30, value * 100))
        if isinstance(value, bytes):
            return random.choice((*(self._hashes or [b""]), bytes(32), b""))
        if isinstance(value, str):
            return random.choice(("A", "B", "W", "Z", "", value + "x"))
        return value

    def _change_tuple(self, name: str, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if not value:
            others = self._seen.get(name)
            return (self._random.choice(others),) if others else value
        index = self._random.randrange(len(value))
        kind = self._random.randrange(5)
        if kind == 0:
            return (*value[:index], *value[index + 1 :])
        if kind == 1:
            return (*value[: index + 1], *value[index:])
        if kind == 2:
            return value[::-1]
        return (*value[:index], self._change(name, value[index]), *value[index + 1 :])

    def _change_signed(self, name: str, signed: Signed) -> Signed:
        known = BODIES.get(name)
        if signed.signer == self._signer.peer and known is not None:
            kind, type_ = known
            try:
                body = msgspec.msgpack.decode(signed.body, type=type_)
            except MALFORMED:
                return signed
            return self._signer.sign(kind, self._change("", body))
        others = self._seen.get(name)
        if others and self._random.random() < 0.7:
            return self._random.choice(others)
        return Signed(signed.body, self._signer.peer, signed.signature)
