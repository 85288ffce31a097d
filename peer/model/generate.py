"""Text from a model that this process holds whole: a look at what training has reached, not a server."""

from __future__ import annotations

from collections.abc import Callable

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
    on_token: Callable[[], None] = lambda: None,
) -> list[int]:
    """The ids that follow `prompt` (not empty), drawn below `vocab_size`; temperature 0 takes the likeliest each time.

    The context is the last max_seq_len tokens and is computed anew for every token.
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
        on_token()
    return ids[len(prompt) :]
