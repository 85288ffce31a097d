"""The rules of the specification and how the core is made to break each: patches of its functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

import msgspec
from msgspec.structs import replace

from swarm.protocol.agreement import chain, output, work
from swarm.protocol.agreement.chain import Chain
from swarm.protocol.agreement.coordination import coordinator, inquiry
from swarm.protocol.agreement.coordination.branches import Branches
from swarm.protocol.agreement.coordination.group_watch import GroupWatch
from swarm.protocol.agreement.messages import ChainLink
from swarm.protocol.agreement.records import LINK_KEY, LinkRecord
from swarm.protocol.agreement.round import election_timeouts, leader, participant, voting
from swarm.protocol.agreement.rules import electorate, evidence, sponsors, succession
from swarm.protocol.agreement.rules.acceptor import Ballot
from swarm.protocol.agreement.rules.evidence import Evidence, ForcedBy
from swarm.protocol.head import Member
from swarm.protocol.ledger import Ledger
from swarm.protocol.plan import next_ledger
from swarm.protocol.receipts import receipted
from tests.simulation import machine
from tests.simulation.setups import COORDINATOR
from tests.swarm.protocol.agreement import group

Patches = Callable[[], list[Any]]
MEMBERS: Final = ("witness3", "witness4", "witness5", "witness7", "witness2")
REQUIRED: Final = ("required2", "required3", "required4", "required5")
WAYLAID: Final = ("required3-waylaid",)
REQUIRED_LIARS: Final = ("required3-liar", "required4-liar")
LIARS: Final = (*REQUIRED_LIARS, "witness3-liar", "witness4-liar", "witness5-liar")
RESTORED: Final = ("witness4-restored", "required3-restored")
OVERTAKEN: Final = ("witness4-cuts", "witness3-cuts", "witness3-alone", "witness4-alone", *MEMBERS)
JOINS: Final = ("witness1-joins", "witness2-joins", "witness3-joins", "witness3-storm", "witness3-lying-joiner")


@dataclass(frozen=True)
class Rule:
    """One rule: where its absence may be noticed, and what switches it off."""

    name: str
    setups: tuple[str, ...]
    patches: Patches
    exhaustive: str = ""
    """The exhaustive search (a key of `test_exhaustive.FORK`) that forks without it."""


def _set(target: object, name: str, value: object) -> Patches:
    return lambda: [patch.object(target, name, value)]


def _after(target: Any, name: str, act: Callable[..., Any]) -> Patches:
    """Call `act(original, self, *args)` in place of a method."""
    original = getattr(target, name)
    return lambda: [patch.object(target, name, lambda self, *args, **more: act(original, self, *args, **more))]


def _nothing(*args: object, **more: object) -> None:
    return None


def _set_ballot(self: Any, ballot: Ballot) -> None:
    self._instance.ballot = ballot


def _vote_blindly(self: Any, attempt: int) -> None:
    proposed = self._instance.proposed.get(attempt)
    if proposed is not None and self._participant.votes and attempt >= self._instance.ballot.promised:
        if self._context.config.is_coordinator:
            self._witness(attempt, proposed)
        else:
            self._vote(attempt, proposed)


def _follow_at_once(self: Any, is_building: object) -> list[ChainLink] | None:
    return self._path(self._goal) or None if self._goal in self._ahead else None


def _vote_before_disk(original: Any, self: Any, attempt: int, proposed: Any) -> None:
    self._send_vote(attempt, proposed.value, proposed.hash)
    original(self, attempt, proposed)


def _no_witness(original: Any, self: Any, members: Any, witness: Any, voters: Any) -> bool:
    if self.mode == "required":
        return sum(member in voters for member in members) >= len(members) // 2 + 1 and bool(members)
    return bool(original(self, members, witness, voters))


def _one_leader_is_enough(original: Any, self: Any, present: Any, leader_: Any) -> None:
    nobody = Member("", "")
    self._head = replace(self._head, absent=tuple(replace(entry, leader=nobody) for entry in self._head.absent))
    original(self, present, leader_)


def _beyond_its_guests(self: Any, peer: str, brought_by: Any, inside: Any) -> bool:
    self._of[peer] = {sponsor.key: sponsor.guests for sponsor in brought_by}
    return True


def _keep_what_failed(*args: Any, **more: Any) -> Any:
    return replace(next_ledger(*args, **more), returned=())


def _of_anybody(counted: Any, receipts: Any, open_receipt: Any, senders: Any) -> Any:
    return receipted(counted, receipts, open_receipt, {receipt.signer for receipt in receipts})


def _give_up_silently(self: Ledger, cursor: int, returned: Any) -> Ledger:
    return replace(self, cursor=cursor, returned=returned)


def _release_at_once(self: Any, action: Any) -> None:
    self._release(action)


def _promise_always(self: Ballot, attempt: int) -> Ballot:
    return replace(self, promised=max(attempt, 0))


def _vote_always(self: Ballot, attempt: int, value: bytes) -> Ballot:
    return replace(self, promised=attempt, voted_attempt=attempt, voted=value)


def _believe_operator(original: Any, self: Any, event: Any) -> None:
    original(self, replace(event, restored=False))


def _boot_zero(original: Any, self: Any, event: Any) -> None:
    original(self, event)
    self._boot = 0


def _leave_out_for_now(original: Any, self: Any, *args: Any) -> None:
    original(self, *args)
    self._operator = replace(self._operator, without=())


def _always_ready(self: Any) -> bool:
    return True


def _all_that_told(self: Any, state: bytes) -> set[Member]:
    return set(self._told)


def _nothing_chosen(*args: Any) -> None:
    return None


def _keep_the_last(original: Any, self: Any, path: Any) -> None:
    original(self, path[-1:])


def _all_stand(records: dict[str, bytes]) -> list[LinkRecord]:
    found = [msgspec.msgpack.decode(r, type=LinkRecord) for key, r in records.items() if key.startswith(LINK_KEY)]
    return sorted(found, key=lambda record: record.number)


def _counts_for_a_regroup(original: Any, self: Any, *args: Any) -> bool:
    return len(args) == 3 or bool(original(self, *args))


def _no_culprits(original: Any, self: Any, context: Any, head: Any, culprits: Any) -> None:
    original(self, context, head, set())


def _same_witness(peer: str, life: int) -> str:
    return f"{peer}.{0 if peer == COORDINATOR else life}"


def _led_nothing(original: Any, self: Any, *args: Any) -> None:
    original(self, *args)
    self.led = -1


def _never_led() -> list[Any]:
    return [patch.object(election_timeouts.ElectionTimeouts, "led", property(lambda self: -1, _nothing), create=True)]


_THREE = ("witness3", "witness5", "witness7", "witness4")

RULES: Final = (
    Rule(
        "promises and votes reach the disk",
        _THREE,
        _set(participant.Participant, "set_ballot", _set_ballot),
        exhaustive="n=3, votes forgotten",
    ),
    Rule("nothing is said before the disk has it", _THREE, _set(output.Output, "add", _release_at_once)),
    Rule(
        "a lost disk makes another voter",
        _THREE,
        lambda: [
            patch.object(machine, "session_of", lambda peer, life: f"{peer}.0"),
            patch.object(group, "session_of", lambda peer, life: f"{peer}{life if peer == COORDINATOR else 0}"),
        ],
    ),
    Rule("no promise below a promise", _THREE, _set(Ballot, "promise", _promise_always)),
    Rule("no vote below a promise, one an attempt", LIARS, _set(Ballot, "vote", _vote_always)),
    Rule(
        "a later leader proposes what may be chosen",
        _THREE,
        lambda: [patch.object(where, "forced_value", lambda accepted: None) for where in (leader, evidence)],
        exhaustive="n=3, nothing is forced",
    ),
    Rule(
        "of several accepted values the one of the highest attempt",
        ("witness5", "witness7", "witness3"),
        lambda: [
            patch.object(
                where,
                "forced_value",
                lambda accepted: min((a for a in accepted if a), key=lambda a: a.attempt, default=None),
            )
            for where in (leader, evidence)
        ],
        exhaustive="n=3, the lowest instead of the highest",
    ),
    Rule(
        "only the first attempt goes without promises",
        _THREE,
        lambda: [patch.object(where, "needs_promises", lambda attempt: False) for where in (leader, evidence)],
        exhaustive="n=3, no attempt asks for promises",
    ),
    Rule(
        "a restarted leader leads no first attempt",
        _THREE,
        _after(election_timeouts.ElectionTimeouts, "__init__", _led_nothing),
        exhaustive="n=3, the first attempt is led twice",
    ),
    Rule("voters check the promises behind a proposal", LIARS, _set(Evidence, "justified", lambda *a: ForcedBy(None))),
    Rule("what was accepted counts with evidence only", LIARS, _set(Evidence, "counts", lambda *a: True)),
    Rule("heads count by certificate", LIARS, _set(Evidence, "certificate", _nothing)),
    Rule("voters are who signed", LIARS, _set(Evidence, "_require_voter", _nothing)),
    Rule("the coordinator signs starts and endorsements", LIARS, _set(Evidence, "_require_coordinator", _nothing)),
    Rule("only the attempt's leader leads it", LIARS, _set(evidence, "is_leader", lambda *a: True)),
    Rule("votes only for the own state's hash", _THREE, _set(voting.Voter, "consider", _vote_blindly)),
    Rule("fetch first, then leave", _THREE, _set(Chain, "next_stop", _follow_at_once)),
    Rule("the whole way to a head is on disk", MEMBERS, _after(Chain, "adopt", _keep_the_last)),
    Rule("a way that is half on disk was never gone", MEMBERS, _set(chain, "links_in", _all_stand)),
    Rule(
        "no member leaves a round behind for a start that missed it",
        OVERTAKEN,
        _set(Chain, "takes_back", lambda self, start: False),
    ),
    Rule(
        "a start that was overtaken is followed by one from there",
        OVERTAKEN,
        _set(Branches, "overtake", lambda self, start: False),
    ),
    Rule(
        "an answer that is not proved does not count",
        ("witness3-alone", "witness4-alone", *MEMBERS),
        lambda: [patch.object(Chain, "highest", property(lambda self: (1 << 53, 0, 0)))],
    ),
    Rule(
        "a start goes on from what may be chosen",
        MEMBERS,
        _set(inquiry.InquiryResult, "chosen", _nothing_chosen),
    ),
    Rule(
        "a regroup believes accepted values with evidence only",
        MEMBERS,
        _after(Evidence, "counts", _counts_for_a_regroup),
    ),
    Rule("proved liars leave the group", LIARS, _after(succession._Electors, "__init__", _no_culprits)),
    Rule(
        "the witness votes last",
        ("witness2", "witness4"),
        _set(electorate.Electorate, "completes", lambda self, head, voters: self.witness(head) is not None),
    ),
    Rule(
        "required: the coordinator's vote is needed", REQUIRED, _after(electorate.Electorate, "is_quorum", _no_witness)
    ),
    Rule("required: on its disk, then its vote", REQUIRED, _after(voting.Voter, "_decide", _vote_before_disk)),
    Rule(
        "required: starts after n - k + 1 answers",
        REQUIRED,
        _set(GroupWatch, "is_ready", property(_always_ready)),
    ),
    Rule(
        "required: members of a start hold its state",
        REQUIRED,
        _set(inquiry.InquiryResult, "holders", _all_that_told),
    ),
    Rule(
        "required: a start takes in all that were members lately",
        REQUIRED_LIARS,
        _set(inquiry, "REMEMBERED", 1),
    ),
    Rule(
        "required: a term that ends no round is followed by one with those that answer",
        REQUIRED_LIARS,
        _set(GroupWatch, "_leaves_out", lambda self, heard, barred: False),
    ),
    Rule(
        "required: no start takes in whom a proof convicts or the operator left out",
        REQUIRED_LIARS,
        lambda: [
            patch.object(coordinator.Coordinator, "_barred", frozenset()),
            *_after(coordinator.Coordinator, "_start", _leave_out_for_now)(),
        ],
    ),
    Rule(
        "a complete run needs no quorum",
        REQUIRED,
        lambda: [patch.object(coordinator.Coordinator, "is_over", property(lambda self: False))],
    ),
    Rule("a learner votes after two merged contributions", JOINS, _set(succession, "MERGED_MIN", 0)),
    Rule("a member is dropped after two absences", MEMBERS, _set(succession, "ABSENCES_MAX", 1)),
    Rule("the absences are under two leaders", MEMBERS, _after(succession._Electors, "_drop", _one_leader_is_enough)),
    Rule("newcomers are a minority", JOINS, _set(succession, "room_for_newcomers", lambda members: 99)),
    Rule(
        "a group of one or two takes in newcomers",
        JOINS[:2],
        _set(succession, "room_for_newcomers", lambda n: (n - 1) // 2),
    ),
    Rule("one invite has one vote", JOINS[3:], _set(sponsors.Sponsors, "bring_in", _beyond_its_guests)),
    Rule(
        "newcomers with which a term begins show invites",
        WAYLAID,
        _set(inquiry.InquiryResult, "_takes_in", lambda self, newcomer, inside, sponsors: True),
    ),
    Rule(
        "required: neither one that is left of many nor newcomers go on by themselves",
        (*WAYLAID, "required4-forger"),
        _set(GroupWatch, "trusts_few", lambda self, heads: True),
    ),
    Rule(
        "required: members of other groups may go on, newcomers beside them may not",
        ("required3-moved",),
        _set(work.Work, "is_known", lambda self, peer: True),
    ),
    Rule("what was not merged is free again", _THREE, _set(work, "next_ledger", _keep_what_failed)),
    Rule("a claim needs a receipt", _THREE, _set(work, "receipted", lambda *args: ())),
    Rule("receipts are of the stage before", _THREE, _set(work, "receipted", _of_anybody)),
    Rule("what is given up is declared lost", _THREE, _set(Ledger, "freeing", _give_up_silently)),
    Rule("a later stage ends where the first has ended", _THREE, _set(Ledger, "closed", lambda self, first: self)),
    Rule("contributions claim what was assigned", LIARS, _set(work, "check_contribution", _nothing)),
    Rule("no attempt is led twice", MEMBERS, _never_led),
    Rule("turns grow", MEMBERS, _set(election_timeouts, "GROWTH", 1.0)),
    Rule("a term has a boot id", RESTORED, _after(coordinator.Coordinator, "load", _boot_zero)),
    Rule(
        "a restored coordinator waits for the operator",
        RESTORED,
        _after(coordinator.Coordinator, "load", _believe_operator),
    ),
    Rule(
        "a witness is another voter after a restart",
        ("witness2", "witness4"),
        lambda: [
            patch.object(machine, "session_of", _same_witness),
            patch.object(group, "session_of", lambda peer, life: _same_witness(peer, life).replace(".", "")),
        ],
    ),
)
