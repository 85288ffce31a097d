"""The kinds of groups that are simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

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
    moved: int = 0
    """The first so many joiners are members of another stage of the run, too."""
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
    cuts_s: tuple[float, ...] = (1.0, 3.0, 8.0, 20.0)
    """How long cuts last."""
    asks: tuple[int, ...] = (0, 0, 0, 1)
    """How often the operator asks for a term while there are faults: one of these."""
    pace: float = 1.0
    """By what a round's training takes longer than usual: slow rounds make long schedules cheap."""
    rounds_on: int = 2
    """After so many more rounds a group goes on."""
    rounds: int = 0
    """The run is complete after so many; 0: it has no end."""
    links_kept: int = 0
    """How many heads a node keeps; 0: as many as in real use."""
    has_genesis: bool = True
    """Whether each machine can make the first weights again; else they are gone once two states have followed."""
    aftermath: bool = False
    """Whether only a random part heals, and the rest is dead or cut off for ever."""
    rare: tuple[str, ...] = ()
    """Rare faults that happen here, too (`rare_faults.py`): `absence`, `damage`, `pause`, `waylay`."""
    bundled: bool = False
    """Whether slices are committed to in bundles of two."""
    uneven: bool = False
    """Whether members measure links of every speed, and some cannot be dialled at times: shares differ."""
    odd: int = 0
    """The first so many members have another build, whose states differ in a bit."""
    batch: int = 0
    """The samples of each round of a synchronous pipeline, which its members divide; 0: local steps."""
    stage: int = 0
    """Of that pipeline."""
    roster_bytes: int = 0
    """Of signed contributions in a roster, each of which takes about 525; 0: as many as in real use."""
    calm_s: float = 60.0
    """Within this time after the last fault all honest peers must have gone on. Longer where a liar may be half of what
    is left: the operator leaves it out, who is called after ten rounds in vain, and later each time."""

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

    @property
    def odd_builds(self) -> frozenset[str]:
        """Which peers build other states than the rest."""
        return frozenset(self.peers[: self.odd])

    def is_known(self, peer: str) -> bool:
        """Return whether that peer is a member of another stage."""
        return peer in self.joining[: self.moved]

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
    found += [Setup(f"witness{n}-liar", n, liars=1, calm_s=150.0) for n in (3, 4, 5)]
    found += [Setup("witness3-lying-joiner", 3, joiners=1, lying_joiners=2)]
    found += [Setup(f"required{n}", n, mode="required") for n in (2, 3, 4, 5)]
    found += [Setup("required2-joins", 2, mode="required", joiners=2, must_join=True)]
    found += [Setup("required3-restored", 3, mode="required", restores="declared")]
    found += [Setup("required4-person", 4, mode="required", lone_survivor=False)]
    with_liar = Setup("", 0, mode="required", liars=1, lone_survivor=False, calm_s=150.0)
    found += [replace(with_liar, name=f"required{n}-liar", members=n) for n in (3, 4)]
    waiting = replace(with_liar, liars=0, lying_joiners=2, lies=("FalseOwner",), rare=("waylay",), faults_s=24.0)
    found += [replace(waiting, name="required3-waylaid", members=3)]
    found += [replace(waiting, name="required3-moved", members=3, joiners=3, moved=2)]
    return [*found, *_longer(), *_rare(), *_synchronous(), *_uneven()]


def _longer() -> list[Setup]:
    """Return what takes more rounds or longer cuts than the others, and may leave a part behind for ever."""
    forging = ("FalseOwner", "FalseOwner", "TwoFacedOwner")
    long_cuts = Setup(
        "", 0, aftermath=True, cuts_s=(12.0, 20.0, 40.0), asks=(0, 1, 2, 3), pace=5.0, faults_s=45.0, calm_s=120.0
    )
    absent = Setup("", 0, cuts_s=(20.0, 60.0), rare=("absence",), pace=3.0, faults_s=90.0, calm_s=150.0)
    many_rounds = Setup("", 0, aftermath=True, pace=0.2, faults_s=16.0, links_kept=20, rounds_on=14)
    return [
        replace(many_rounds, name="witness3-long", members=3),
        replace(many_rounds, name="required2-long", members=2, mode="required", joiners=1),
        Setup("witness3-end", 3, aftermath=True, rounds=7, has_genesis=False),
        Setup("required3-end", 3, mode="required", aftermath=True, rounds=7, has_genesis=False),
        Setup("witness4-weights", 4, aftermath=True, has_genesis=False),
        Setup("required3-weights", 3, mode="required", aftermath=True, has_genesis=False),
        replace(long_cuts, name="witness3-cuts", members=3),
        replace(long_cuts, name="witness4-cuts", members=4),
        replace(long_cuts, name="required3-cuts", members=3, mode="required"),
        *(replace(absent, name=f"witness{n}-absent", members=n) for n in (3, 5, 7)),
        Setup("witness3-undeclared", 3, restores="undeclared", faults_s=16.0),
        Setup("required3-undeclared", 3, mode="required", restores="undeclared", faults_s=16.0),
        Setup("witness4-forger", 4, liars=1, lies=forging, aftermath=True),
        replace(long_cuts, name="required4-forger", members=4, mode="required", liars=1, lies=forging,
                lone_survivor=False, calm_s=150.0),
    ]  # fmt: skip


def _rare() -> list[Setup]:
    """Return what happens seldom: damaged records, paused peers, a build whose states differ in a bit, and
    rosters that do not hold all contributions."""
    required = Setup("", 0, mode="required")
    return [
        Setup("witness3-damage", 3, rare=("damage",)),
        Setup("witness4-damage", 4, rare=("damage",)),
        replace(required, name="required3-damage", members=3, rare=("damage",)),
        Setup("witness3-pause", 3, rare=("pause",)),
        Setup("witness5-pause", 5, rare=("pause",)),
        replace(required, name="required3-pause", members=3, rare=("pause",)),
        Setup("witness4-odd", 4, odd=1),
        Setup("witness5-odd", 5, odd=1),
        replace(required, name="required4-odd", members=4, odd=1),
        Setup("witness5-full", 5, roster_bytes=1700),
        Setup("witness4-full-joins", 4, joiners=2, roster_bytes=1700),
        Setup("witness5-full-liar", 5, liars=1, roster_bytes=1700, calm_s=150.0),
        replace(required, name="required5-full", members=5, roster_bytes=1700),
    ]


def _synchronous() -> list[Setup]:
    """Return stages of a synchronous pipeline: the first and a later one, and with a liar that claims what it has not
    counted."""
    first = Setup("", 3, batch=24)
    later = replace(first, mode="required", stage=1)
    lying: dict[str, Any] = {"members": 4, "liars": 1, "lies": ("FalseClaims",), "calm_s": 150.0}
    return [
        replace(first, name="witness3-synchronous"),
        replace(first, name="witness2-synchronous-joins", members=2, joiners=2, stage=1),
        replace(first, name="witness4-synchronous-liar", **lying),
        replace(later, name="required3-synchronous"),
        replace(later, name="required4-synchronous-liar", stage=0, lone_survivor=False, **lying),
    ]


def _uneven() -> list[Setup]:
    """Return groups whose members merge unequal shares, by what they have measured of each other's links."""
    uneven = Setup("", 0, uneven=True)
    return [
        replace(uneven, name="witness3-uneven", members=3),
        replace(uneven, name="witness5-uneven", members=5),
        replace(uneven, name="witness3-uneven-joins", members=3, joiners=2, must_join=True),
        replace(uneven, name="witness5-uneven-liar", members=5, liars=1, calm_s=150.0),
        replace(uneven, name="required3-uneven", members=3, mode="required"),
    ]


SETUPS: Final = {setup.name: setup for setup in _all()}

LARGE: Final = {
    setup.name: setup for setup in (Setup("witness16", 16), Setup("required16", 16, mode="required", calm_s=90.0))
}
"""Groups that are slow to simulate: a campaign has few schedules of them."""

_DRIVEN: Final = (
    "witness3", "witness4", "witness2-joins", "witness3-joins", "required2", "required3", "required2-joins",
)  # fmt: skip
_CALM_S: Final = 180.0  # the driver waits longer for answers than the simulated machines do
_BUNDLED: Final = replace(SETUPS["witness3-joins"], name="driven-bundled", calm_s=_CALM_S, bundled=True)
DRIVEN_HONEST: Final = {
    **{f"driven-{name}": replace(SETUPS[name], name=f"driven-{name}", calm_s=_CALM_S) for name in _DRIVEN},
    _BUNDLED.name: _BUNDLED,
}
"""Groups of real drivers (`tests.simulation.driven`), of honest peers."""

_LYING: Final = Setup("driven-lying-slices", 4, liars=1, calm_s=300.0)
DRIVEN_LYING: Final = {
    setup.name: setup
    for setup in (
        _LYING,
        replace(_LYING, name="driven-lying-slices-required", mode="required", lone_survivor=False),
        replace(_LYING, name="driven-lying-slices-bundled", bundled=True),
    )
}
"""Groups of real drivers with one that lies about its slices (`driven.lying_slices`)."""
DRIVEN: Final = DRIVEN_HONEST | DRIVEN_LYING
