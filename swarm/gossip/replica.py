"""One peer's state in a gossip run. The group has no common state: every replica is a little different."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from peer.checkpoint.hash_tree import StateTree, hash_state
from swarm.protocol.head import Head
from swarm.protocol.ledger import Ledger


@dataclass
class Replica:
    """The state that one peer trains, and its place in the run."""

    theta: torch.Tensor
    """phi, the outer weights, flat fp32, shape (P,)."""
    move: torch.Tensor
    """The outer momentum, flat fp32, shape (P,)."""
    round: int = 0
    """Outer steps, as `swarm.gossip.pairing` counts them; -1: these weights are not of the run yet."""
    draws: int = 0
    """How often this peer has drawn samples."""
    tokens: int = 0
    """Tokens that this peer has trained on."""
    tree: StateTree = field(init=False)
    """Hashes theta, the part that joiners fetch."""

    def __post_init__(self) -> None:
        self.rehash()

    @property
    def size_bytes(self) -> int:
        """The size of what a joiner fetches."""
        return 4 * self.theta.numel()

    def rehash(self) -> None:
        """Hash theta after it has changed. Blocks for about 0.2 s a GB."""
        self.tree = hash_state([self.theta])

    def replace(self, theta: torch.Tensor, round_number: int) -> None:
        """Take over another peer's weights. Momentum is not transferred: it begins at zero."""
        self.theta.copy_(theta)
        self.move.zero_()
        self.round = round_number
        self.draws = max(self.draws, round_number)
        self.rehash()

    def head(self, run_id: str, steps: int) -> Head:
        """Return this state's head, in the form that other runs publish and store: without members, as there are no
        votes, and with `draws` as the ledger's cursor."""
        return Head(
            run_id=run_id,
            term=0,
            round=self.round,
            previous=b"",
            state_hash=self.tree.root,
            members=(),
            ledger=Ledger(cursor=self.draws),
            inner_step=max(0, self.round) * steps,
            tokens=self.tokens,
        )

    @classmethod
    def at(cls, head: Head, theta: torch.Tensor, move: torch.Tensor) -> Replica:
        """Rebuild the replica that a checkpoint holds."""
        return cls(theta, move, head.round, head.ledger.cursor, head.tokens)
