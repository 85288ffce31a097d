"""Messages between block servers and clients over flows (`peer.net.flow`).

    client -> server    StartSession, PassTokens (to the first), Replay, Rewind, Allow, EndSession
    server -> client    SessionStarted, SessionRefused, TokenDrawn, PromptLogprobs, NeighbourLost
    server -> server    PassTokens, with hidden states as the payload; from the last to the first the drawn token

A session is the client's: it starts the session at each server of its route, and names to each the peers that tokens
come from and go to. A server takes tokens of a session from that peer or the client, and from no other.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from peer.bounds import Name
from peer.ipc.block_messages import SCORES_MAX, WireType
from peer.ipc.sampling_options import Sampling

NAMES_MAX: Final = 2048
IDS_MAX: Final = 4096
LIKELIEST_MAX: Final = 20
STOPS_MAX: Final = 64

SessionId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Position = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
Block = Annotated[int, msgspec.Meta(ge=0, le=1 << 12)]
Revision = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
PageName = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Ids = Annotated[tuple[Token, ...], msgspec.Meta(max_length=IDS_MAX)]
Logprob = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
Likeliest = Annotated[tuple[tuple[Token, Logprob], ...], msgspec.Meta(max_length=LIKELIEST_MAX)]
Sentence = Annotated[str, msgspec.Meta(max_length=300)]
Cause = Literal["gap", "full", "shape", "value", "not_finite", "unknown", "span", "busy", "lost", "leaving", "commit"]


class StartSession(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Begins a session at a server, or rewires an existing one."""

    session: SessionId
    revision: Revision
    """Grows with each revision of the session, so that answers show which one they belong to."""
    first: Block
    """The blocks to use are those from `first` to before `end`: the server's own."""
    end: Block
    source: Name
    """The peer that tokens come from; "" for the client alone."""
    target: Name
    """The peer that tokens go to; "" for the client alone."""
    sampling: Sampling
    stops: Annotated[tuple[Token, ...], msgspec.Meta(max_length=STOPS_MAX)] = ()
    """Tokens that the last server sends to the client only."""
    names: Annotated[tuple[PageName, ...], msgspec.Meta(max_length=NAMES_MAX)] = ()
    """Of the pages with which the session begins (`peer.inference.cache`)."""
    known: Position = 0
    """Positions whose tokens the client has: the last server draws none of them."""
    allowed: Position = 0
    """The last server draws tokens for positions below this, until `Allow` raises it."""
    commit: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    """Of a training run: the name of the commit to compute with; of a served model: that of the adapter, if any."""
    wire: WireType | None = None
    """In which hidden states cross the wire; None: the model's own. It stays that of the session's first revision."""


class SessionStarted(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The session is wired."""

    session: SessionId
    revision: Revision
    have: Position
    """The positions that this server has."""


class SessionRefused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The server cannot begin the session, or cannot continue it."""

    session: SessionId
    revision: Revision
    cause: Cause
    reason: Sentence
    have: Position = 0


class PassTokens(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The next tokens of a session; after the first server with their hidden states (count, C) as the payload."""

    session: SessionId
    position: Position
    ids: Ids
    draws: bool
    """Whether the last server draws the token after these."""


class Replay(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Asks a server to resend a session's output from a position on."""

    session: SessionId
    revision: Revision
    position: Position
    known: Position
    """Positions whose tokens the client has: those to be drawn after them are sent apart."""


class Rewind(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Has a server forget a session's tokens from a position on."""

    session: SessionId
    position: Position


class Allow(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Lets the last server draw tokens for positions below `position`. In a session whose `sampling` is masked, the
    payload has the mask of one position (`swarm.inference.masks`), and only that one is drawn."""

    session: SessionId
    position: Position
    known: Position
    """The client has set the tokens below this position: the last server sends none of them on."""


class EndSession(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Ends a session; its pages are free then."""

    session: SessionId


class TokenDrawn(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """A drawn token, to the client."""

    session: SessionId
    revision: Revision
    """The revision of the last server when it drew the token."""
    position: Position
    token: Token
    logprob: Logprob = 0.0
    likeliest: Likeliest = ()


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The log-probabilities of some tokens of the prompt, to the client of a session whose `sampling` asks for them. A
    position's come before the token that is drawn after the prompt, and in order."""

    session: SessionId
    revision: Revision
    position: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    """Of the first of these tokens."""
    scores: Annotated[tuple[tuple[Logprob, Likeliest], ...], msgspec.Meta(min_length=1, max_length=SCORES_MAX)]
    """Of each token, with the likeliest tokens at its position, the likeliest first."""


class NeighbourLost(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The server cannot reach the peer that tokens go to."""

    session: SessionId
    revision: Revision
    peer: Name


ServingMessage = (
    StartSession
    | SessionStarted
    | SessionRefused
    | PassTokens
    | Replay
    | Rewind
    | Allow
    | EndSession
    | TokenDrawn
    | NeighbourLost
    | PromptLogprobs
)
