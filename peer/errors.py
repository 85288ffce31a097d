"""The errors that Barnraise raises on purpose.

    BarnraiseError                     exit  one sentence, naming the remedy
    ├── ConfigError                       2  a flag, TOML field or manifest is wrong
    ├── NetworkError                      3
    │   ├── DialError                     3  .reason: refused | timeout | wrong_peer | unreachable
    │   ├── ConnectionLost                3  the other end went away in the middle of a call
    │   ├── DeadlineExceeded              3  the caller's deadline passed
    │   ├── RemoteError                   3  the peer answered with an error: .code, .message
    │   └── TooLarge                      3  a message of ours exceeds what one header may hold
    ├── ProtocolViolation                 3  a peer sent what the protocol forbids; it is penalized
    ├── NotAdmitted                       4  wrong run, or a foreign, expired or missing token
    ├── IdentityError                     5  the key file cannot be used
    ├── ResourceError                     5  disk full, read-only folder, port in use
    ├── CheckpointError                   6  a checkpoint is missing, torn or corrupt
    ├── StageRefused                      7  a stage refuses a command and stays as it was: .reason
    ├── WorkerError                       7  a compute worker crashed, hung or ran out of memory
    └── RoundError                        7
        ├── RoundDiscarded                7  this attempt or round ends without a commit
        ├── NoQuorum                      7  too few members of the last commit are alive
        └── Diverged                      7  the steps of several rounds in a row were NaN or infinite

A fault of another peer is one of these and never ends this process. Any other exception is a bug.
"""

from __future__ import annotations

from typing import ClassVar, Literal

DialReason = Literal["refused", "timeout", "wrong_peer", "unreachable"]
StageReason = Literal[
    "stage",
    "epoch",
    "shape",
    "dtype",
    "value",
    "not_finite",
    "duplicate",
    "unknown",
    "full",
    "empty",
    "no_weights",
    "cancelled",
]


class BarnraiseError(Exception):
    """Base of the tree. `str(error)` can be shown to a user."""

    exit_code: ClassVar[int] = 1


class ConfigError(BarnraiseError):
    exit_code = 2


class NetworkError(BarnraiseError):
    exit_code = 3


class DialError(NetworkError):
    """No address of a peer could be reached; `reason` is that of the most telling attempt."""

    def __init__(self, message: str, reason: DialReason) -> None:
        super().__init__(message)
        self.reason: DialReason = reason


class ConnectionLost(NetworkError):
    pass


class DeadlineExceeded(NetworkError):
    pass


class RemoteError(NetworkError):
    """The remote handler refused or failed; `code` is the name of its error class."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class TooLarge(NetworkError):
    pass


class ProtocolViolation(BarnraiseError):
    exit_code = 3


class NotAdmitted(BarnraiseError):
    exit_code = 4


class IdentityError(BarnraiseError):
    exit_code = 5


class ResourceError(BarnraiseError):
    exit_code = 5


class CheckpointError(BarnraiseError):
    exit_code = 6


class WorkerError(BarnraiseError):
    exit_code = 7


class StageRefused(BarnraiseError):
    """A stage refuses a command and has not changed.

    `reason`:
    - "stage": the micro-batch is for another stage
    - "epoch": its epoch is too far from the stage's own
    - "shape", "dtype", "value" (token ids outside the vocabulary): bad input
    - "not_finite": NaN or Inf in the input, or computed from it
    - "duplicate": the id is held or was counted
    - "unknown": nothing is held under the id
    - "full": the stage holds too much; try again later
    - "empty": there is no gradient for a step
    - "no_weights": no weights were imported since the worker started
    - "cancelled": by `drop`
    """

    exit_code = 7

    def __init__(self, message: str, reason: StageReason) -> None:
        super().__init__(message)
        self.reason: StageReason = reason


class RoundError(BarnraiseError):
    exit_code = 7


class RoundDiscarded(RoundError):
    pass


class InOtherGroup(RoundError):
    """A message came for a group in which this peer takes no part: no violation, as peers move between groups."""

    def __init__(self, message: str = "this peer is in another group: look it up again") -> None:
        super().__init__(message)


class NoQuorum(RoundError):
    pass


class Diverged(RoundError):
    pass
