"""Rules of starts towards members that were away, and of a coordinator that begins again or asks."""

from __future__ import annotations

from typing import Final

from swarm.protocol.agreement.chain import Chain
from swarm.protocol.agreement.coordination.coordinator import Coordinator
from swarm.protocol.agreement.coordination.inquiry import InquiryResult
from swarm.protocol.agreement.head_gossip import HeadGossip
from swarm.protocol.agreement.node import AgreementNode
from tests.simulation.mutations.changed_source import NEVER_TRUE, changed
from tests.simulation.mutations.rules_off import MEMBERS, Rule, _set

ABSENT: Final = ("witness5-absent", "witness7-absent", "witness3-absent")

STARTS: Final = (
    Rule(
        "a start is too late whatever is known of its base",
        ABSENT,
        changed(
            Chain,
            "takes_back",
            "if link is None or",
            "if not (self.is_past(start.head.previous) or start.head.previous == self.hash) or link is None or",
        ),
    ),
    Rule(
        "a value that may have been chosen is a round to lose",
        ABSENT,
        _set(InquiryResult, "_may_be_chosen", lambda self, value, after: False),
    ),
    Rule(
        "no earlier term's branch is a base beside a living peer of the last one",
        ("witness4-liar", *MEMBERS),
        changed(InquiryResult, "bases", "(head.term >= last.term or not lives)", "True"),
    ),
    Rule(
        "nothing is undone that was not announced",
        ABSENT,
        changed(Coordinator, "_may_undo", "self._offered is not None and base.round >= self._offered", "True"),
    ),
    Rule(
        "a start by itself waits for members that say they have gone on",
        ABSENT,
        changed(Coordinator, "_decide", "inquiry.further.intersection(head.members)", "False"),
    ),
    Rule(
        "a round that the coordinator is about to stand at is one to lose",
        ABSENT,
        changed(
            InquiryResult,
            "bases",
            "self._branches.way_to(self._chain.goal)",
            "self._branches.way_to(self._chain.head)",
        ),
    ),
    Rule(
        "a member knows of each term number one start",
        ("witness3-undeclared", "required3-undeclared"),
        changed(Chain, "learn", "if self._boots.get(link.head.term, link.head.boot) != link.head.boot:", NEVER_TRUE),
    ),
    Rule(
        "a coordinator asks for the chain of a second start of its term",
        ("witness3-undeclared",),
        changed(HeadGossip, "status", "self._context.config.is_coordinator and", "False and"),
    ),
    Rule(
        "a coordinator without records asks before it begins",
        ("witness3-undeclared",),
        changed(Coordinator, "_first_members", "self.watch.up_s < self._context.config.begin_s", "False"),
    ),
    Rule(
        "who has not answered is asked again",
        MEMBERS,
        changed(Coordinator, "time", "self._ask(inquiry)", "pass"),
    ),
    Rule(
        "a coordinator that stood still hears the others before it judges",
        MEMBERS,
        changed(AgreementNode, "step", "self._coordinator.woke()", "pass"),
    ),
    Rule(
        "who was left out stays out",
        MEMBERS,
        changed(
            Coordinator, "ask", "excluded = (*self._kept.without, *operator.without)", "excluded = operator.without"
        ),
    ),
    Rule(
        "what the operator has left out is on disk",
        MEMBERS,
        changed(Coordinator, "_keep", "self._context.out.persist(OPERATOR_KEY, encode(kept))", "pass"),
    ),
    Rule(
        "a coordinator that knows too little of its own first start stops",
        ("witness3-undeclared",),
        changed(Coordinator, "_stop_at_unknown", "or second or", "or"),
    ),
)
