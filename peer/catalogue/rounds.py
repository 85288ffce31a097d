"""The events of rounds: attempts, phases, commits, losses and states."""

from __future__ import annotations

import math
from typing import ClassVar

from peer.catalogue.happening import LOWER_RATE, Happening, OwnRound, Who, of_stage, own_steps
from peer.figures import several


class AttemptBegun(Happening, frozen=True):
    """A leader begins an attempt at a round."""

    told: ClassVar = ("round", "attempt", "stage")
    round: int
    attempt: int = 0
    stage: int | None = None


class AttemptFailed(Happening, frozen=True):
    told: ClassVar = ("round", "attempt", "stage", "reason")
    said: ClassVar = "attempt {attempt} at round {round}{of} failed{why}"
    round: int
    attempt: int = 0
    stage: int | None = None
    reason: str = ""


class CatchUpFailed(Happening, frozen=True):
    told: ClassVar = ("round",)
    said: ClassVar = "{teller} could not catch up with round {round}"
    round: int
    reason: str = ""


class ContributionJudged(Happening, frozen=True):
    """A member's update makes the loss worse."""

    told: ClassVar = ("round", "peer", "left_out")
    round: int
    peer: str
    left_out: bool = False
    gain: float | None = None
    own_gain: float | None = None

    def sentence(self, teller: str, who: Who) -> str:
        consequence = ", and leaves it out where it leads" if self.left_out else ""
        return f"{teller} finds that what {who(self.peer)} sent in round {self.round} makes the loss worse{consequence}"


class InnerStep(Happening, frozen=True):
    """A worker has made an inner step."""

    step: int
    loss: float | None = None
    """None for a step that changed nothing."""
    lr: float = 0.0
    tokens_per_s: float = 0.0
    skipped: int = 0
    overflows: int = 0


class MergeFailed(Happening, frozen=True):
    told: ClassVar = ("round",)
    said: ClassVar = "{teller} could not merge round {round}"
    round: int
    reason: str = ""


class PhaseEntered(Happening, frozen=True):
    """This peer enters a phase of a round."""

    told: ClassVar = ("round", "phase")
    round: int
    phase: str
    """`compute`, `submit`, `exchange` or `vote`."""
    step: int | None = None
    """Of `compute`: the number of its first inner step, and how many it makes."""
    steps: int | None = None
    owned: int | None = None
    """Of `exchange`: how many slices this peer merges."""


class HeadAdopted(OwnRound, frozen=True):
    """A commit that this peer did not merge: it has fetched the state."""

    term: int = 0
    head: str = ""
    previous: str = ""
    contributions: int = 0
    stage: int | None = None
    counted: tuple[str, ...] | None = None
    """The samples of all contributions as "first-end,..."."""

    def sentence(self, teller: str, who: Who) -> str:
        reached = f"caught up with round {self.round}" if self.round else "has the initial weights"
        return f"{teller} {reached}, state {self.short_hash}"


class RoundCommitted(HeadAdopted, frozen=True):
    """A commit that this peer took part in."""

    def sentence(self, teller: str, who: Who) -> str:
        members, own = several(self.members, "member"), own_steps(self)
        return f"round {self.round}{of_stage(self.stage)} committed by {members}{own}, state {self.short_hash}"


class GossipAlone(OwnRound, frozen=True):
    """A round of a gossip run without a partner."""

    partner: str = ""
    rounds_apart: int = 0
    distance: float | None = None
    """How far apart both models are, as a share."""
    payload_bytes: int = 0
    waited_s: float = 0.0

    def sentence(self, teller: str, who: Who) -> str:
        apart = "" if self.distance is None else f", {self.distance:.1%} apart"
        met = f"met {who(self.partner)} for" if self.partner else "had no partner for"
        return f"{teller} {met} round {self.round}{apart}{own_steps(self)}"


class GossipMet(GossipAlone, frozen=True):
    """A round of a gossip run with a partner."""


class HeadSeen(Happening, frozen=True):
    """The coordinator has seen a commit of one of its groups."""

    said: ClassVar = "round {round}{of} committed by {members:member}"
    round: int
    members: int = 0
    absent: int = 0
    tokens: int = 0
    stage: int | None = None


class DiscardedRound(Happening, frozen=True):
    stream_name: ClassVar = "round_discarded"
    told: ClassVar = ("round",)
    said: ClassVar = "{teller} discards round {round}{of}{why}"
    round: int
    reason: str = ""
    stage: int | None = None
    """Of the teller, where a reader knows it: the stream does not say."""


class RoundEmpty(Happening, frozen=True):
    told: ClassVar = ("round", "members")
    said: ClassVar = "round {round} merged nothing"
    round: int
    members: int = 0


class RoundPlanned(Happening, frozen=True):
    """The leader's plan of a round has come."""

    told: ClassVar = ("round", "members")
    round: int
    members: int = 0


class RoundTrained(Happening, frozen=True):
    """This peer has made its local steps of a round."""

    told: ClassVar = ("round", "steps", "loss", "busy_s", "idle_s")
    round: int
    steps: int = 0
    loss: float | None = None
    busy_s: float = 0.0
    idle_s: float = 0.0
    steps_ahead: int = 0
    skipped: int = 0
    overflows: int = 0


class RunCompleted(Happening, frozen=True):
    told: ClassVar = ("round",)
    said: ClassVar = "complete: round {round}{of}, the last one, is committed"
    round: int
    stage: int | None = None


class RunFinished(Happening, frozen=True):
    told: ClassVar = ("round",)
    said: ClassVar = "{teller} is done with round {round}"
    round: int
    state_hash: str = ""


class RunFoundComplete(Happening, frozen=True):
    """A peer has come to a run that is over."""

    round: int
    kept: bool = True
    """Whether the coordinator has the last state."""
    stages: int = 1
    common: bool = True
    """Whether the run has one state for all peers."""


class FetchedState(Happening, frozen=True):
    stream_name: ClassVar = "state_fetched"
    told: ClassVar = ("round", "seconds", "replayed")
    said: ClassVar = "{teller} has fetched the state of round {round}"
    round: int
    seconds: float = 0.0
    replayed: bool = False
    """Whether rounds were made again from kept results."""
    donors: int | None = None


class StateProgress(Happening, frozen=True):
    """Bytes of a state that is fetched."""

    done_bytes: int
    size_bytes: int

    @property
    def share(self) -> float:
        return self.done_bytes / max(1, self.size_bytes)


class StepsSkipped(Happening, frozen=True):
    """No step of a round could be used."""

    told: ClassVar = ("round", "steps", "skipped")
    round: int
    steps: int = 0
    skipped: int = 0
    reason: str = ""

    def sentence(self, teller: str, who: Who) -> str:
        what = f" skipped {self.skipped} of {self.steps} steps of round {self.round}, as NaN or infinite"
        return f"{teller}{self.why or what}"


class ValEvaluated(Happening, frozen=True):
    """This peer has measured the held-out loss."""

    told: ClassVar = ("round", "loss")
    round: int
    loss: float | None = None
    """The held-out loss in nats a token; None where it is no number."""

    @property
    def finite_loss(self) -> float | None:
        return self.loss if self.loss is not None and math.isfinite(self.loss) else None

    def sentence(self, teller: str, who: Who) -> str:
        if self.finite_loss is not None:
            return ""
        return f"{teller} measured a held-out loss of NaN or infinity after round {self.round}: {LOWER_RATE}"
