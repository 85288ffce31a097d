"""More rules, of an audit: most are one condition of a function."""

from __future__ import annotations

from typing import Final

from swarm.protocol.agreement import applicants, node
from swarm.protocol.agreement.coordination.coordinator import Coordinator
from swarm.protocol.agreement.coordination.group_watch import GroupWatch
from swarm.protocol.agreement.round.exchanges import Exchanges
from swarm.protocol.agreement.round.instance import Instance
from swarm.protocol.agreement.round.leader import AttemptLeader
from swarm.protocol.agreement.round.voting import Voter
from swarm.protocol.agreement.rules.electorate import Electorate
from swarm.protocol.agreement.rules.evidence import Evidence
from swarm.protocol.agreement.rules.succession import Succession, _Electors
from swarm.protocol.roster_room import RosterRoom
from tests.simulation.mutations.changed_source import NEVER_TRUE, changed
from tests.simulation.mutations.rules_off import JOINS, LIARS, MEMBERS, REQUIRED, Patches, Rule, _nothing, _set

DAMAGED: Final = ("witness3-damage", "witness4-damage", "required3-damage")
UNDECLARED: Final = ("required3-undeclared", "required3-restored")
FULL: Final = ("witness5-full", "required5-full", "witness5-full-liar", "witness4-full-joins")
PERSONS: Final = ("witness4-cuts", "witness3-cuts", "witness4-restored", *MEMBERS)


def _all_of(*parts: Patches) -> Patches:
    return lambda: [found for part in parts for found in part()]


AUDITED: Final = (
    Rule(
        "a certificate has the votes of one attempt",
        LIARS,
        changed(Evidence, "certificate", "if len({vote.attempt for vote in cast}) != 1:", NEVER_TRUE),
    ),
    Rule(
        "a restarted voter knows what it accepted",
        MEMBERS,
        changed(
            Instance,
            "load",
            "instance.ballot, instance.accepted, instance.support = stored.ballot, stored.accepted, stored.support",
            "instance.ballot = stored.ballot",
        ),
    ),
    Rule(
        "no more than `max_peers`",
        ("witness3-storm", *JOINS),
        _all_of(
            changed(_Electors, "__init__", "context.config.max_peers", "10**9"),
            changed(applicants.Applicants, "joins", "self._context.config.max_peers", "10**9"),
            changed(Coordinator, "_first_members", "[: self._context.config.max_peers]", ""),
        ),
    ),
    Rule(
        "a new incarnation replaces the old",
        MEMBERS,
        changed(
            _Electors, "_promote", "self.members = {member for member in self.members if member.peer != peer}", "pass"
        ),
    ),
    Rule(
        "the witness votes in even groups only",
        MEMBERS,
        changed(Electorate, "witness", "len(head.members) % 2 == 0", "True"),
    ),
    Rule(
        "a start lists what it undoes",
        PERSONS,
        changed(Coordinator, "_start", "found.undoes if found is not None else ()", "()"),
    ),
    Rule(
        "required: takes back only after its time, or by the operator",
        ("required3-weights", *REQUIRED),
        _set(GroupWatch, "may_undo", lambda self, base: True),
    ),
    Rule(
        "only members, learners and those that ask to join contribute",
        (*LIARS, "witness3-lying-joiner"),
        changed(Succession, "roster", "if any(member not in inside for member in present):", NEVER_TRUE),
    ),
    Rule(
        "the coordinator stops at a signature of its own that it does not know",
        UNDECLARED,
        _set(Coordinator, "_stop_at_unknown", _nothing),
    ),
    Rule("a damaged record makes another voter", DAMAGED, _set(node, "is_damaged", lambda records: False)),
    Rule("a leader checks what a promise brings", LIARS, _set(AttemptLeader, "_require_support", _nothing)),
    Rule(
        "a join request names this head or the last",
        JOINS,
        changed(Succession, "join", "body.head not in (head_hash, head.previous) or ", ""),
    ),
    Rule(
        "a free value is of its own attempt's roster",
        LIARS,
        changed(Voter, "_check", "if forced is None and opened.attempt != attempt:", NEVER_TRUE),
    ),
    Rule(
        "a build that does not end is not waited for",
        MEMBERS,
        changed(Exchanges, "is_building", "and exchange.building_at > over", ""),
    ),
    Rule(
        "a member without room in a roster is not absent",
        FULL,
        changed(_Electors, "_drop", "if member in self._left_out:", NEVER_TRUE),
    ),
    Rule(
        "a member that had its turn in a full roster is absent",
        FULL,
        changed(
            RosterRoom,
            "left_out",
            "if ends[bisect(before, (self._drawn(member), 0))] + self._usual_most > self.most",
            "",
        ),
    ),
    Rule(
        "a draw decides who has room in a roster",
        FULL,
        changed(RosterRoom, "_drawn", "self.head_hash + ", ""),
    ),
)
