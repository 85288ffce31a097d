"""The frozen base of an adapter in parts, one a rank: FSDP2 gathers the weights of a block when it computes.

The adapter itself is whole at each rank. Imported only where weights are cut: torch's part for it takes a second and
tens of megabytes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.fsdp import FSDPModule, fully_shard

from peer.parallel.loss import SummedLoss
from peer.parallel.ranks import Ranks


def cut_base(loss: SummedLoss, ranks: Ranks) -> Callable[[], None]:
    """Cut the frozen parameters of the decoder in `loss` over the ranks' `shard` axis, and move this rank's part to its
    device, block by block. Parameters that are trained stay as they are. Return what gives up gathered weights after a
    forward pass without a backward pass, which gives them up by itself.

    Weights keep their type: norms and biases are fp32 beside matrices in bf16. The root gathers the embedding, the last
    norm and the head for the whole step."""
    mesh = ranks.submesh("shard")
    trained = {parameter for parameter in loss.parameters() if parameter.requires_grad}
    for module in (*loss.decoder.layers.values(), loss):
        fully_shard(module, mesh=mesh, ignored_params=trained)

    def release() -> None:
        for module in loss.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    return release
