"""Rules of synchronous pipelines, whose members together count one batch a round."""

from __future__ import annotations

from typing import Final

from swarm.protocol import claims, plan
from swarm.protocol.agreement import work
from swarm.protocol.agreement.round.collector import Collector
from swarm.protocol.agreement.work import Work
from tests.simulation.mutations.changed_source import NEVER_TRUE, changed
from tests.simulation.mutations.rules_off import Rule, _nothing, _set

LYING: Final = ("witness4-synchronous-liar", "required4-synchronous-liar")
STAGES: Final = ("witness3-synchronous", "required3-synchronous", "witness2-synchronous-joins")

BATCHES: Final = (
    Rule("a batch is merged whole", STAGES, _set(work, "covers_batch", lambda bodies, batch: True)),
    Rule(
        "contributions that share samples are not merged together",
        STAGES,
        _set(work, "select_disjoint", lambda bodies, held: (True,) * len(bodies)),
    ),
    Rule(
        "who has counted what others have forgets it",
        (*STAGES, *LYING),
        _set(Work, "disputed", lambda self, head, contributions: []),
    ),
    Rule(
        "a plan whose batch was not whole is not adopted again",
        (*STAGES, *LYING),
        changed(Collector, "_give_up", "self._given_up.add(plan.hash)", "pass"),
    ),
    Rule(
        "a leader ends its round when the batch is counted",
        STAGES,
        _set(Collector, "finish_gathered", _nothing),
    ),
    Rule(
        "who has not submitted what it had claimed forgets it",
        (*LYING, *STAGES),
        changed(claims.Claims, "settle", "reset |= {member} if submitted else set()", "pass"),
    ),
    Rule("false claims count no more after two", LYING, _set(claims, "FALSE_CLAIMS_MAX", 10**9)),
    Rule(
        "a contribution counts samples of its round's batch",
        LYING,
        changed(
            plan,
            "_check_counted",
            "if not (batch is None and schedule.stage) and not contains(given, body.counted):",
            NEVER_TRUE,
        ),
    ),
)
