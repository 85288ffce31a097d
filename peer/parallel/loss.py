"""The loss of a decoder as a module."""

from __future__ import annotations

from torch import Tensor, nn

from peer.model.decoder import Decoder


class SummedLoss(nn.Module):
    """The decoder and its loss in one module: the root of FSDP, which gathers the head's weights for both."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the negative log-likelihood in nats of tokens (B, T+1), summed over all but the first of each."""
        total, _ = self.decoder.losses(self.decoder.hidden(tokens[:, :-1]), tokens[:, 1:])
        return total.clone()  # FSDP warns of a view
