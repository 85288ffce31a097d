"""How much memory a server takes for weights and caches."""

from __future__ import annotations

from swarm.parts.weights import EvenWeights
from swarm.serving.memory import GPU_SHARE, blocks_that_fit, given_memory, memory_for
from tools import what_fits


def test_a_card_counts_and_not_the_machine_behind_it() -> None:
    """A card of 24 GB in a machine of 128 once took blocks for the 128."""
    weights = EvenWeights(what_fits.MODELS["Llama 3.1 8B"], "bf16")
    card = given_memory(None, int(24e9))
    assert card == GPU_SHARE * 24e9 and memory_for(card) == card
    assert blocks_that_fit(weights, given_memory(None, int(16e9))) == 23
    assert given_memory(None, 0) is None  # no GPU: what is free counts
    assert given_memory(2.5, int(24e9)) == 2.5e9
