"""The process group of a peer's ranks, over which they share one model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from peer.footprint.layout import Layout

_TIMEOUT: Final = timedelta(seconds=60)
_AXES: Final = ("replicate", "shard", "tensor")


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks. `mesh` is None for one device alone, which has no process group."""

    layout: Layout
    rank: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def batch_rank(self) -> int:
        """This rank's one of the `layout.batches`; the ranks of a tensor group share one."""
        return self.rank // self.layout.tensor

    def submesh(self, axis: str) -> DeviceMesh:
        """Return the ranks along one of the axes `replicate`, `shard`, `tensor`."""
        assert self.mesh is not None
        return self.mesh[axis]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks. All of them must call it, and get the same bits."""
        if self.mesh is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def sum_over_all(self, vector: torch.Tensor) -> None:
        """Sum a vector that is equally long at all ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(vector)

    def sum_over_replicas(self, vector: torch.Tensor) -> None:
        """Sum a vector like the local weights over the copies of the model, in place."""
        if self.layout.replicate > 1:
            dist.all_reduce(vector, group=self.submesh("replicate").get_group())


@contextmanager
def open_ranks(layout: Layout, rank: int, device: torch.device, store: Path) -> Iterator[Ranks]:
    """Join the group of `layout.size` ranks that meet at the file `store`, which no earlier group has used; leave it at
    the end. A rank that is silent for a minute in a collective ends all others."""
    if layout.size == 1:
        yield Ranks(layout, rank, device)
        return
    # gloo would listen on the interface that the host's name resolves to, NCCL on the first that is up, TCPStore on all
    # of them: no TCPStore.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(str(store), layout.size),  # type: ignore[attr-defined]  # in its documentation
        rank=rank,
        world_size=layout.size,
        timeout=_TIMEOUT,
        device_id=device if on_gpu else None,
    )
    try:
        shape = (layout.replicate, layout.shard, layout.tensor)
        yield Ranks(layout, rank, device, init_device_mesh(device.type, shape, mesh_dim_names=_AXES))
    finally:
        dist.destroy_process_group()
