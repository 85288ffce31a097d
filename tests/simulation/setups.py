"""The kinds of groups that are simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from swarm.protocol.agreement.config import Mode
from swarm.protocol.agreement.messages import JoinBody
from swarm.protocol.head import Sponsor

COORDINATOR: Final = "W"


@dataclass(frozen=True)
class Setup:
    """One kind of group."""

    name: str
    members: int
    mode: Mode = "witness"
    joiners: int = 0
    liars: int = 0
    """Members that lie."""
    lies: tuple[str, ...] = ()
    """The strategies that they choose from; empty: all that this mode tolerates."""
    lying_joiners: int = 0
    must_join: bool = False
    """Whether honest joiners must be members in the end."""
    coordinator_dies: bool = False
    """For good, once the other faults are over."""
    lone_survivor: bool = True
    """Whether a required coordinator may go on by itself with one of three or more."""
    restores: str = ""
    """What happens to the coordinator's disk: it is put back from a backup, `declared` or `undeclared`."""
    member_restores: bool = False
    """Outside the promise: a member's disk is put back from a backup."""
    faults_s: float = 12.0
    """For how long there are faults."""
    calm_s: float = 60.0
    """Within this time after the last fault all honest peers must have gone on. Longer where a liar may be half of what
    is left: a person leaves it out, who is called after ten rounds in vain, and later each time."""

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(chr(ord("A") + index) for index in range(self.members))

    @property
    def joining(self) -> tuple[str, ...]:
        return tuple(chr(ord("a") + index) for index in range(self.joiners + self.lying_joiners))

    @property
    def lying(self) -> frozenset[str]:
        """Which peers lie: the last ones."""
        first = len(self.peers) - self.liars
        return frozenset((*self.peers[first:], *self.joining[self.joiners :]))

    def invite_of(self, peer: str) -> str:
        """Return the serial of a joiner's invite. Lying joiners share one."""
        if peer not in self.joining:
            return ""
        return "invite of liars" if peer in self.lying else f"invite {peer}"

    def sponsors_of(self, join: JoinBody, signer: str) -> tuple[Sponsor, ...] | None:
        """Return whose invite a request shows; None if it is not the peer's own."""
        serial = self.invite_of(signer)
        if join.credential != serial.encode():
            return None
        return (Sponsor(serial, 1),) if serial else ()


def _all() -> list[Setup]:
    found = [Setup(f"witness{n}", n) for n in (2, 3, 4, 5, 7)]
    found += [Setup(f"witness{n}-joins", n, joiners=2, must_join=True) for n in (1, 2, 3)]
    found += [Setup(f"witness{n}-alone", n, coordinator_dies=True) for n in (3, 4, 5)]
    found += [Setup("witness4-restored", 4, restores="declared"), Setup("witness3-storm", 3, joiners=5)]
    found += [Setup(f"witness{n}-liar", n, liars=1) for n in (3, 4, 5)]
    found += [Setup("witness3-lying-joiner", 3, joiners=1, lying_joiners=2)]
    found += [Setup(f"required{n}", n, mode="required") for n in (2, 3, 4, 5)]
    found += [Setup("required2-joins", 2, mode="required", joiners=2, must_join=True)]
    found += [Setup("required3-restored", 3, mode="required", restores="declared")]
    found += [Setup("required4-person", 4, mode="required", lone_survivor=False)]
    with_liar = Setup("", 0, mode="required", liars=1, lone_survivor=False, calm_s=150.0)
    found += [replace(with_liar, name=f"required{n}-liar", members=n) for n in (3, 4)]
    return found


SETUPS: Final = {setup.name: setup for setup in _all()}

_DRIVEN: Final = (
    "witness3", "witness4", "witness2-joins", "witness3-joins", "required2", "required3", "required2-joins",
)  # fmt: skip
DRIVEN: Final = {
    f"driven-{name}": replace(SETUPS[name], name=f"driven-{name}", calm_s=180.0) for name in _DRIVEN
}  # the driver waits longer for answers than the simulated machines do
"""Groups of real drivers (`tests.simulation.driven`), without liars: those say what a driver does not."""
