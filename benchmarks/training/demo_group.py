"""K workers that train by the formulas of DeMo's authors in float64 (github.com/bloc97/DeMo, demo.py; arXiv
2411.19870): the figure beside the method `demo`, which peers run, and with which this file shares no code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from peer.model.layout import FlatLayout


def cosine_basis(n: int, like: torch.Tensor) -> torch.Tensor:
    """Return the orthonormal type-II cosine transform as a matrix (n, n): row b is the b-th cosine."""
    wave, place = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)[None, :]
    rows = torch.cos(math.pi * (2 * place + 1) * wave / (2 * n)) * math.sqrt(2 / n)
    rows[0] /= math.sqrt(2)
    return rows.to(like)


@dataclass(frozen=True)
class Cut:
    """The tiles of one parameter: each dimension is cut by its largest divisor of at most `chunk`."""

    shape: tuple[int, ...]
    rows: int
    columns: int

    @classmethod
    def of(cls, shape: tuple[int, ...], chunk: int) -> Cut:
        whole = (1, *shape) if len(shape) == 1 else shape
        sides = [max(d for d in range(1, chunk + 1) if n % d == 0) for n in whole]
        return cls(whole, sides[0], sides[1])

    def transformed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the coefficients of each tile, (tiles, rows * columns)."""
        tiles = x.reshape(self.shape).unfold(0, self.rows, self.rows).unfold(1, self.columns, self.columns)
        found = cosine_basis(self.rows, x) @ tiles.flatten(0, 1) @ cosine_basis(self.columns, x).T
        return found.flatten(1)

    def restored(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Invert `transformed`, as a matrix."""
        tiles = coefficients.view(-1, self.rows, self.columns)
        plain = cosine_basis(self.rows, coefficients).T @ tiles @ cosine_basis(self.columns, coefficients)
        across = self.shape[1] // self.columns
        bands = [torch.cat(list(band), dim=1) for band in plain.split(across)]
        return torch.cat(bands, dim=0)


class DemoWorkers:
    """K workers with a momentum each, which is the error feedback, too.

    Each step: delta <- decay * delta + lr * gradient; the k largest cosine coefficients of each tile are sent, and
    subtracted from delta; the update is the sign of the inverse transform of their mean, over the workers that sent a
    coefficient."""

    def __init__(
        self, like: Mapping[str, torch.Tensor], workers: int, *, decay: float = 0.999, topk: int = 32, chunk: int = 64
    ) -> None:
        self.decay, self.topk = decay, topk
        self.deltas = [{name: torch.zeros_like(tensor) for name, tensor in like.items()} for _ in range(workers)]
        self._cuts = {name: Cut.of(tuple(tensor.shape), chunk) for name, tensor in like.items()}

    def step(self, gradients: Sequence[Mapping[str, torch.Tensor]], lr: float) -> dict[str, torch.Tensor]:
        """Return the signs by which each parameter steps. `gradients`: each worker's, which are only read."""
        signs = {}
        for name, cut in self._cuts.items():
            sums, senders = torch.zeros(()), torch.zeros(())
            for delta, gradient in zip(self.deltas, gradients, strict=True):
                delta[name].mul_(self.decay).add_(gradient[name], alpha=lr)
                found = cut.transformed(delta[name])
                index = found.abs().topk(min(self.topk, found.shape[1]), dim=1).indices
                sent = torch.zeros_like(found).scatter_(1, index, found.gather(1, index))
                delta[name].sub_(cut.restored(sent).view_as(delta[name]))
                sums = sums + sent
                senders = senders + torch.zeros_like(found).scatter_(1, index, 1.0)
            mean = sums / senders.clamp(min=1)
            signs[name] = cut.restored(mean).view_as(self.deltas[0][name]).sign()
        return signs


class DemoGroup:
    """Workers at the same weights: `theta`, (P,) fp32, as the model needs them."""

    sends_gradients = True
    bytes_up = bytes_down = 0
    """Nothing is coded."""

    def __init__(self, layout: FlatLayout, theta: torch.Tensor, K: int, decay: float, topk: int, chunk: int) -> None:
        self.layout = layout
        self.local = [theta.clone()] * K
        self._wide = theta.double()
        self._workers = DemoWorkers(layout.views(self._wide), K, decay=decay, topk=topk, chunk=chunk)

    @property
    def theta(self) -> torch.Tensor:
        return self.local[0]

    def step(self, grads: Sequence[Mapping[str, torch.Tensor]], lr: float) -> None:
        """Make one step of all workers at the learning rate `lr`."""
        wide = [{name: gradient.double() for name, gradient in worker.items()} for worker in grads]
        for name, sign in self._workers.step(wide, lr).items():
            self.layout.views(self._wide)[name].sub_(sign, alpha=lr)
        self.local[0].copy_(self._wide)
