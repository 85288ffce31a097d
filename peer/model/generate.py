"""Samples of text from a whole model, to look at the progress of training."""

from __future__ import annotations

import torch

from peer.model.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: list[int],
    *,
    vocab_size: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """Return the ids that follow `prompt` (not empty), drawn below `vocab_size`. Temperature 0 takes the likeliest id.

    The context is the last max_seq_len tokens; it is computed again for every token.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(max_new_tokens):
        context = torch.tensor([ids[-model.config.max_seq_len :]], device=model.flat.device)  # (1, T)
        logits = model(context)[0, -1, :vocab_size].float().cpu()  # (V,)
        if temperature > 0:
            chosen = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
        else:
            chosen = logits.argmax()
        ids.append(int(chosen))
    return ids[len(prompt) :]
