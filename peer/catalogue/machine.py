"""The events of one machine: its worker, text, disk, address and owner."""

from __future__ import annotations

from typing import ClassVar

from peer.catalogue.happening import Happening, Trouble, Who, because
from peer.figures import several, size_text


class Bug(Happening, frozen=True):
    """A fault of ours, which ended one request."""

    said: ClassVar = "{teller}: {error}"
    error: str
    where: str = ""
    trace: tuple[str, ...] = ()


class CheckpointFailed(Happening, frozen=True):
    """A checkpoint could not be written."""

    told: ClassVar = ("round",)
    round: int
    reason: str = ""

    def sentence(self, teller: str, who: Who) -> str:
        return f"{teller}{self.why or f' could not save round {self.round}'}"


class CheckpointSaved(Happening, frozen=True):
    """A checkpoint is on disk."""

    told: ClassVar = ("round",)
    round: int
    path: str = ""
    size_bytes: int = 0
    seconds: float = 0.0


class CheckpointSkipped(Happening, frozen=True):
    said: ClassVar = "{teller} passes over the damaged checkpoint {path}: {reason}"
    path: str
    reason: str


class ClientMode(Happening, frozen=True):
    said: ClassVar = "{teller} cannot be dialled: it dials the others, and merges nothing"


class ClientModeEnded(Happening, frozen=True):
    said: ClassVar = "{teller} can be dialled again"


class ContactFailed(Trouble, frozen=True):
    """A peer that this one knows of did not answer, or refused."""

    address: str = ""


class CorpusRead(Happening, frozen=True):
    """The worker has read this machine's text: the fields are those of `peer.corpus_facts.CorpusFacts`."""

    account: tuple[str, ...] | str
    """In pieces, which an event does not cut; in logs of earlier releases whole."""
    files: int = 0
    documents: int = 0
    train_bytes: int = 0
    held_out_bytes: int = 0
    train_tokens: int = 0
    held_out_tokens: int = 0
    truncated: bool = False

    def sentence(self, teller: str, who: Who) -> str:
        return f"{teller}: {''.join(self.account)}"


class LanUnusable(Trouble, frozen=True):
    """Peers of the local network cannot be found."""


class LastCheckpointFailed(Happening, frozen=True):
    """A peer that no other could stand in for left without a checkpoint of its last commit."""

    round: int = 0
    lost: bool = False
    error: str = ""


class MicroBatchHalved(Happening, frozen=True):
    """The device had no memory left for a step, which is made again with less at a time."""

    sequences: int
    recompute: str

    def sentence(self, teller: str, who: Who) -> str:
        again = "" if self.recompute == "none" else " and blocks computed twice"
        size = several(self.sequences, "sequence")
        return f"{teller} had no memory left for a step: it goes on with {size} at a time{again}"


class PeerPaused(Happening, frozen=True):
    said: ClassVar = "{teller} is paused by its owner: {reason}"
    reason: str


class PeerResumed(Happening, frozen=True):
    said: ClassVar = "{teller} goes on"


class PortMapped(Happening, frozen=True):
    said: ClassVar = "{teller}: the router forwards {address} to this machine"
    address: str
    port: int = 0


class PortNotMapped(Trouble, frozen=True):
    """The router opens no port."""

    port: int = 0


class RecordsUnsaved(Trouble, frozen=True):
    """The disk takes no records of the agreement: this peer promises nothing meanwhile."""


class RelayReserved(Happening, frozen=True):
    said: ClassVar = "{teller} can be reached through the relay {address}"
    relay: str

    @property
    def address(self) -> str:
        return self.relay.partition("/p2p/")[0]


class RelayFailed(RelayReserved, frozen=True):
    said: ClassVar = "{teller} has no place at the relay {address}{why}"
    reason: str = ""


class StateAtRisk(Trouble, frozen=True):
    """The last holder of a state waits for room on its disk."""

    round: int = 0
    seconds_left: int = 0


class TextMissing(Trouble, frozen=True):
    """This machine has none of the run's text."""


class TrackingFailed(Trouble, frozen=True):
    """The service of `--track` takes no points."""


class WorkerDied(Happening, frozen=True):
    """The worker process has ended; another one starts."""

    told: ClassVar = ()
    pid: int | None = None
    cause: str = ""

    def sentence(self, teller: str, who: Who) -> str:
        return f"{teller}{because(self.cause) or ' lost its worker process, and replaces it'}"


class WorkerFailed(Happening, frozen=True):
    """The worker failed in a round, or no new one could be started."""

    told: ClassVar = ("round",)
    round: int | None = None
    reason: str | None = None
    cause: str | None = None
    """Why no new worker could be started."""
    retry_s: float | None = None

    def sentence(self, teller: str, who: Who) -> str:
        where = "" if self.round is None else f" in round {self.round}"
        return f"{teller}{because(self.reason or self.cause) or f' had its worker fail{where}'}"


class WorkerReady(Happening, frozen=True):
    """A worker has begun, the first one or one in the place of another."""

    device: str
    """Empty where it only reads text."""
    pid: int = 0
    memory_bytes: int = 0
    bf16: bool = False
    fp16: bool = False
    compiled: bool = False
    sequences: int | None = None
    """How many it computes at a time, where it trains the whole model."""
    recompute: str | None = None
    seconds: float = 0.0

    @property
    def facts(self) -> tuple[str, ...]:
        """Where and how it computes, in words."""
        facts = [self.device]
        if self.memory_bytes:
            facts.append(f"{size_text(self.memory_bytes)} of memory")
        facts.append("bf16" if self.bf16 else "fp16" if self.fp16 else "fp32")
        facts += ["compiled"] * self.compiled
        if self.sequences is not None:
            facts.append(f"{several(self.sequences, 'sequence')} at a time")
        facts += ["blocks computed twice"] * (self.recompute not in (None, "none"))
        return tuple(facts)

    def sentence(self, teller: str, who: Who) -> str:
        return f"{teller} computes on {', '.join(self.facts)}" if self.device else ""
