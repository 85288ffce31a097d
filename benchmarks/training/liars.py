"""What members that lie send in place of their products, of the norm that the gate lets through or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, get_args

import torch

Lie = Literal["garbage", "sign", "x10", "alie"]
LIES: Final[tuple[Lie, ...]] = get_args(Lie)
SPREADS: Final = 1.5  # of ALIE, in standard deviations; the paper's own z is below 0.3 for up to 3 of 8


def liar(lie: Lie, liars: int, seed: int) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """Return what replaces the products (each (P,)) of the last `liars` workers.

    "garbage": noise with the norm of the own product; "sign": the own product reversed; "x10": ten times the own
    product; "alie" (A Little Is Enough, arXiv 1902.06156): the mean of the honest products minus 1.5 of their standard
    deviations in each value, the same from all liars, who know all honest products."""
    generator = torch.Generator().manual_seed(seed)

    def corrupt(products: list[torch.Tensor]) -> list[torch.Tensor]:
        honest = torch.stack(products[: len(products) - liars])
        common = honest.mean(0) - SPREADS * honest.std(0)

        def said(product: torch.Tensor) -> torch.Tensor:
            if lie == "garbage":
                noise = torch.randn(product.shape, generator=generator)
                return noise.mul_(product.norm() / noise.norm())
            return {"sign": -product, "x10": product * 10, "alie": common}[lie]

        return [*honest, *(said(product) for product in products[len(products) - liars :])]

    return corrupt
