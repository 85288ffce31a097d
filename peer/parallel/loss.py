"""The loss of a decoder, and the pass through one stage, as modules."""

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
        total, _ = self.decoder.losses(self.decoder.hidden(self.decoder.inputs_of(tokens)), tokens[:, 1:])
        return total.clone()  # FSDP warns of a view


class StagePass(nn.Module):
    """The decoder of a stage and, of the last one, its loss: the root of FSDP."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the stage's output, and what its backward pass begins with: both the hidden state (B, T, C); of the
        last stage, for targets (b, T) of the first b rows, the losses (b, T) and their sum."""
        hidden = self.decoder.hidden(x)
        if targets is None:
            out = hidden.float()
            return out, out
        total, losses = self.decoder.losses(hidden[: len(targets)], targets)
        return losses, total.clone()  # FSDP warns of a view
