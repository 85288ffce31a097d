"""What a live view shows of one process: its record in the DHT, and events that it emits on this machine only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace

from cli.progress.curve import LossCurve
from peer.catalogue.pages import DataSetOpened, PagesKept
from peer.catalogue.stages import TextFed
from swarm.run.owners_pause import PAUSED
from swarm.status.state import MemberClaims, MemberFacts, MemberSeen, MemberState

STARTING: Final = "starting the worker"
"""The phase of a peer that is in the run and whose worker is not ready yet."""
TOPICS_MAX: Final = 1024


@dataclass
class WorkDone:
    """Work whose size is known. Times are Unix times."""

    size: int
    began_at: float
    done: int = 0
    at: float = 0.0
    """When `done` was told."""

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.size) if self.size > 0 else 0.0

    @property
    def per_s(self) -> float | None:
        """The pace so far; None before there was progress."""
        took_s = self.at - self.began_at
        return self.done / took_s if self.done > 0 and took_s > 0 else None

    def left_s(self, now: float) -> float | None:
        """Return the seconds that the rest takes at the pace so far; None before there was progress."""
        return None if self.per_s is None else max(0.0, self.size / self.per_s - (now - self.began_at))


@dataclass
class StepsDone(WorkDone):
    """The local steps of one round."""

    first: int = 0
    """The number of the first one in the run."""
    tokens_per_s: float = 0.0


def _unknown(name: str) -> MemberState:
    return MemberState(
        peer="",
        facts=MemberFacts(membership="none", merged=0, missed=0),
        seen=MemberSeen(answers=True, events="told", link="unknown"),
        claims=MemberClaims(name=name, role="", version="", phase="connecting", age_s=0.0, bytes_up=0, bytes_down=0),
    )


class LivePeer:
    """One peer, or the coordinator."""

    def __init__(self, name: str) -> None:
        self.member = _unknown(name)
        self.work: StepsDone | None = None
        """The local steps of the round that it trains or trained last."""
        self.members = 0
        """Of its group, itself included."""
        self.curve = LossCurve()
        """Of the training loss, since this process began."""
        self.device: tuple[str, ...] = ()
        """Where its worker computes, and how."""
        self.paused = False
        """Whether its owner has paused it."""
        self.pipelined = False
        """Whether it takes part in a pipeline."""
        self.gone = ""
        """Why the process has ended."""
        self.data_set: DataSetOpened | None = None
        """Of a run that trains on one."""
        self.pages_kept: PagesKept | None = None
        self.waited_s = 0.0
        """For pages, since this process began."""
        self.round_bytes_up = 0
        """What it sent in its last round."""
        self.useless_round = 0
        """The last round in which it could use no step; 0: none."""
        self.fed: tuple[float, TextFed, float] | None = None
        """Of a feeder: the time of its last event, the event, and the time of the last note about it."""
        self.catches_up_until = 0.0
        """At a coordinator that was started again: Unix time until which it learns of rounds committed before."""
        self.told_round = 0
        """At a coordinator: the last round in the members' reports."""
        self.said: dict[str, str] = {}
        """What notes have said last, by topic."""

    @property
    def claims(self) -> MemberClaims:
        assert self.member.claims is not None
        return self.member.claims

    @property
    def name(self) -> str:
        return self.claims.name

    @property
    def round(self) -> int:
        return self.claims.round or 0

    def claim(self, **changes: Any) -> None:
        """Take in what it says of itself: fields of `MemberClaims`."""
        self.member = replace(self.member, claims=replace(self.claims, **changes))

    def is_news(self, topic: str, text: str) -> bool:
        """Return whether a note on that topic is news, and remember it; of more than `TOPICS_MAX` topics none is."""
        if self.said.get(topic) == text or (topic not in self.said and len(self.said) >= TOPICS_MAX):
            return False
        self.said[topic] = text
        return True

    @property
    def doing(self) -> str:
        """What it does: under its owner's pause nothing, whatever its group does."""
        return PAUSED if self.paused else self.claims.phase
