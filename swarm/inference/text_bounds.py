"""A client's checks before it sends a text: a server that still refuses the text is at fault."""

from __future__ import annotations

from collections.abc import Sequence

from peer.config import ModelConfig
from peer.errors import ConfigError


def check_text(model: ModelConfig, held: int, prompt: Sequence[int], count: int) -> None:
    """Raise ConfigError if `count` tokens cannot follow a text of `held` tokens and then `prompt`."""
    if not prompt and not held:
        raise ConfigError("the prompt is empty: give at least one token")
    end = held + len(prompt) + count
    if end > model.max_seq_len:
        raise ConfigError(
            f"prompt and answer have {end} tokens and the model's context {model.max_seq_len}: shorten the prompt, or"
            " ask for fewer tokens"
        )
    if prompt and not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
        raise ConfigError(
            f"the prompt has a token beyond the model's {model.vocab_size}: use the tokenizer that came with it"
        )
