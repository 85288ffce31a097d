"""The events of groups and their members, and of what a coordinator has to say about them."""

from __future__ import annotations

from typing import ClassVar, Final

from peer.catalogue.happening import Happening, Trouble, Who
from peer.figures import several, size_text
from peer.plain_text import plain

_NAMES_MAX: Final = 32  # in one sentence


class RunEntered(Happening, frozen=True):
    """A peer, or the coordinator itself, is connected to the run."""

    name: str
    role: str = ""
    rounds: int = 0
    """0: the run has no last one."""
    min_peers: int = 0
    stages: int = 1
    tokenizer: str = ""

    def sentence(self, teller: str, who: Who) -> str:
        cut = f"a model in {self.stages} stages, " if self.stages > 1 else ""
        until = several(self.rounds, "round") if self.rounds else "no last round"
        read = {"": "", "bytes": ", text as bytes"}.get(
            self.tokenizer, f", text by tokenizer.json {self.tokenizer[:8]}"
        )
        return f"{teller} is in the run {self.name!r}: {cut}{until}{read}"


class MemberJoined(Happening, frozen=True):
    told: ClassVar = ("peer", "name")
    said: ClassVar = "{peer!p} is here"
    peer: str
    name: str = ""
    role: str = ""


class MemberLeft(Happening, frozen=True):
    told: ClassVar = ("peer", "name")
    said: ClassVar = "{peer!p} is gone"
    peer: str
    name: str = ""
    role: str = ""


class PeerSuspect(Happening, frozen=True):
    told: ClassVar = ("peer",)
    said: ClassVar = "{peer!p} is not heard"
    peer: str


class PeerRecovered(Happening, frozen=True):
    told: ClassVar = ("peer",)
    said: ClassVar = "{peer!p} is heard again"
    peer: str


class PeerPenalized(Happening, frozen=True):
    """A peer broke the protocol."""

    told: ClassVar = ("peer", "reason", "count")
    said: ClassVar = "{teller} refuses what {peer!p} sent{why}"
    peer: str
    reason: str = ""
    count: int | None = None
    """How often since the event before about this peer."""
    proved: bool | None = None


class MembershipStale(Trouble, frozen=True):
    """The records of the other members cannot be read."""


class MembersTold(Happening, frozen=True):
    """What the members say of themselves, summed up by the coordinator."""

    round: int
    loss: float | None = None
    val_loss: float | None = None
    val_round: int | None = None
    peers: int = 0
    steps_per_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


class MemberUnsaved(Happening, frozen=True):
    """A member says that its disk takes nothing."""

    said: ClassVar = "{name} {reason}: it takes part in no round until its owner frees some space, or starts it again"
    name: str
    reason: str
    peer: str = ""


class Regrouped(Happening, frozen=True):
    """A term begins."""

    told: ClassVar = ("term", "round", "members", "undone", "stage")
    term: int
    round: int = 0
    members: int = 0
    undone: int = 0
    stage: int | None = None

    def sentence(self, teller: str, who: Who) -> str:
        members = several(self.members, "member")
        if self.term == 1:
            return f"{self.group} begins with {members}"
        undone = f", {several(self.undone, 'round')} undone" if self.undone else ""
        return (
            f"{self.group} is regrouped and continues from round {self.round} with {members} (term {self.term}){undone}"
        )


class QuorumLost(Happening, frozen=True):
    """Too few voters answer, or no peer that answers has the last weights."""

    told: ClassVar = ("round", "stage")
    round: int
    reason: str = ""
    away: tuple[str, ...] = ()
    alone: bool = False
    """Whether no member answers."""
    stage: int | None = None

    def sentence(self, teller: str, who: Who) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.group} cannot go on from round {self.round}{why}"

    def remedy(self, who: Who, home: str) -> str:
        """Return what the operator can do, with the option that names the coordinator's home."""
        names = ", ".join(map(who, self.away)) or "its members"
        remedy = f"start {names} again, or continue without them with `peer regroup {home}`"
        if not self.alone:
            return remedy
        return (
            f"no member answers, so check this machine's own connection first. If they are gone, {remedy}: if they are"
            " not, what they do meanwhile is lost"
        )


class CoordinatorRestored(Happening, frozen=True):
    """The coordinator's disk is not the newest one: it waits for `peer regroup`."""

    round: int | None = None
    term: int | None = None
    stage: int | None = None


class GroupFull(Happening, frozen=True):
    """This peer asks to join in vain."""

    told: ClassVar = ("round", "most", "stage")
    said: ClassVar = (
        "{teller} waits for a place: {group} has {most:peer}, as many as its [run] max_peers allows; it is taken in"
        " once one of these has left"
    )
    most: int
    round: int = 0
    stage: int | None = None


class PrefixFull(Happening, frozen=True):
    """Newcomers wait because too many members share their address prefix."""

    said: ClassVar = (
        "{waiting:peer} of the address prefix {prefix} must wait: a group has {most:member} of one prefix at most; for"
        " more machines of one network, create the run with a higher [run] members_per_prefix"
    )
    prefix: str
    waiting: int
    most: int
    round: int = 0
    stage: int | None = None


class RosterFull(Happening, frozen=True):
    """A round had no room for some contributions."""

    told: ClassVar = ("round", "members", "bytes", "left_out", "stage")
    round: int
    members: int
    bytes: int
    left_out: int
    peers: tuple[str, ...] = ()
    stage: int | None = None

    def sentence(self, teller: str, who: Who) -> str:
        held, names = several(self.members, "update"), ", ".join(map(who, self.peers[:_NAMES_MAX]))
        return (
            f"round {self.round} of {self.group} has room for {held} ({size_text(self.bytes)}), not for"
            f" {self.left_out} more{f' ({names})' if names else ''}: all take turns, and what is not merged is kept for"
            " the next update; create the next run with a lower [run] max_peers or more [pipeline] stages"
        )


class BaseFetching(Happening, frozen=True):
    """A peer begins to fetch parts of the base that an adapter is trained beside."""

    parts: int
    size_bytes: int

    def sentence(self, teller: str, who: Who) -> str:
        return f"{teller} fetches {several(self.parts, 'part')} of the base, {size_text(self.size_bytes)}"


class BaseMissing(Happening, frozen=True):
    """The coordinator lacks parts of the base that members train an adapter beside."""

    said: ClassVar = (
        "{parts:part} of the base are not on the coordinator's machine, so only members pass them on: put the"
        " checkpoint back to {folder}"
    )
    parts: int
    folder: str = ""


class RunReplaced(Happening, frozen=True):
    said: ClassVar = (
        "RUN.toml describes another run than {name} {run_id}, in which no peer has committed: that one is replaced, its"
        " invite no longer holds, and its files lie in the home's folder `replaced`"
    )
    run_id: str
    name: str


class SecondProcess(Happening, frozen=True):
    """Another process was started with this coordinator's key, and has stopped."""

    ip: str = ""

    def sentence(self, teller: str, who: Who) -> str:
        where = f" at {self.ip}" if self.ip else ""
        return (
            f"another process was started{where} with this coordinator's key, and has stopped: keep one home with that"
            " key, and none of its copies where others can start it"
        )


class VotesInOneHand(Happening, frozen=True):
    """One invite or address prefix holds half or more of the votes, and the coordinator's is not required."""

    votes: int
    members: int
    invite: str = ""
    prefix: str = ""
    round: int = 0
    stage: int | None = None


class InviteWithdrawn(Happening, frozen=True):
    """The invite printed before brings in no other peer."""

    kept: tuple[str, ...]
    dropped: int

    def sentence(self, teller: str, who: Who) -> str:
        names = ", ".join(map(plain, self.kept[:_NAMES_MAX])) or "no peer"
        more = f" and {len(self.kept) - _NAMES_MAX} more" if len(self.kept) > _NAMES_MAX else ""
        are = "is" if self.dropped == 1 else "are"
        return (
            f"the invite printed before is withdrawn: it keeps {names}{more}, and {several(self.dropped, 'key')} that"
            f" came by it {are} out"
        )


class StageSetBack(Happening, frozen=True):
    said: ClassVar = "{group} continues at round {goes_on_at} like the others, with the weights it had at round {round}"
    round: int
    goes_on_at: int
    stage: int | None = None


class LastStateMissing(Happening, frozen=True):
    said: ClassVar = "the last state of {group}, of round {round}, is not kept yet: {reason}"
    round: int
    reason: str
    stage: int | None = None
