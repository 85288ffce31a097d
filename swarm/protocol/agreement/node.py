"""One peer's part in the agreement of one group: events in, actions out."""

from __future__ import annotations

from swarm.protocol.agreement.actions import Action
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.events import Event
from swarm.protocol.agreement.signing import Signer
from swarm.protocol.agreement.work import Work


class AgreementNode:
    """A member, a newcomer or the coordinator of one group, by its config. The driver feeds it events one by one and carries
    out the actions in order; the first event is `Started`."""

    def __init__(self, config: AgreementConfig, signer: Signer, work: Work) -> None:
        self._config, self._signer, self._work = config, signer, work

    def step(self, now: float, event: Event) -> list[Action]:
        """Take one event at time `now` (seconds of any clock that does not go back). Total and deterministic: it never raises
        because of an event, and the same events give the same actions."""
        return []
