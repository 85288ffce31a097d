"""One peer's own state in a gossip run. There is no state of the group: every replica is a little different."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from peer.checkpoint.hash_tree import StateTree, hash_state
from swarm.protocol.head import Head
from swarm.protocol.ledger import Ledger


@dataclass
class Replica:
    """theta: phi, the outer weights; move: the momentum; flat fp32, shape (P,). `round` counts outer steps as
    `swarm.gossip.pairing` says (-1: these weights are not of the run yet); `round_info` counts the times this peer has
    drawn samples; `tokens` it has trained on itself. `tree` hashes theta, which is all that others can want of it."""

    theta: torch.Tensor
    move: torch.Tensor
    round: int = 0
    round_info: int = 0
    tokens: int = 0
    tree: StateTree = field(init=False)

    def __post_init__(self) -> None:
        self.rehash()

    @property
    def size_bytes(self) -> int:
        """Of what a joiner fetches."""
        return 4 * self.theta.numel()

    def rehash(self) -> None:
        """After theta has changed. Blocks for about 0.2 s a GB."""
        self.tree = hash_state([self.theta])

    def replace(self, theta: torch.Tensor, round_number: int) -> None:
        """Take over another peer's weights; its momentum is its own, so ours begins at zero."""
        self.theta.copy_(theta)
        self.move.zero_()
        self.round = round_number
        self.round_info = max(self.round_info, round_number)
        self.rehash()

    def head(self, run_id: str, steps: int) -> Head:
        """In the form in which heads of other runs are published and stored: no members, for nobody voted, and the
        ledger's cursor is our turn."""
        return Head(
            run_id=run_id,
            term=0,
            round=self.round,
            previous=b"",
            state_hash=self.tree.root,
            members=(),
            ledger=Ledger(cursor=self.round_info),
            inner_step=max(0, self.round) * steps,
            tokens=self.tokens,
        )

    @classmethod
    def at(cls, head: Head, theta: torch.Tensor, move: torch.Tensor) -> Replica:
        """What a checkpoint holds."""
        return cls(theta, move, head.round, head.ledger.cursor, head.tokens)
