"""The papers' algorithms with K workers in one process, in any dtype: the reference that strategies are tested against.

It is also the only driver of gossip, and of PowerSGD with two exchanges a step, without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from optim.algorithms.large_batch import LargeBatchStep
from optim.algorithms.outer_step import DilocoOuter
from optim.algorithms.packing import Sparse
from optim.algorithms.sparseloco import SparseLocoScheme
from optim.codecs import get_codec
from optim.codecs.interface import bytes_of
from optim.merge import merge_part
from peer.compute.adamw_fused import FusedAdamW
from peer.compute.build_optimizer import build_inner
from peer.compute.optimizer import InnerSpec
from peer.errors import ConfigError
from peer.model.layout import FlatLayout
from tests.optim.reference.allreduce import AllReduce
from tests.optim.reference.diloco import Diloco
from tests.optim.reference.eager import Eager
from tests.optim.reference.error_feedback import ErrorFeedback
from tests.optim.reference.gossip import Gossip
from tests.optim.reference.interface import Dense, OuterAlgorithm
from tests.optim.reference.lion import DistributedLion
from tests.optim.reference.powersgd import PowerSgd
from tests.optim.reference.sparse import Demo, SparseLoco, SparseMethod
from tests.optim.reference.streaming import Streaming
from tests.optim.support.layouts import layout_of

Config = dict[str, Any]


class Group:
    """K workers that train with one algorithm.

    `algo`: one of `ALGORITHMS`. `init`: name -> tensor; all have one dtype, in which everything is computed. `cfg`:
    the algorithm's own settings (see its class). `inner`: settings of `InnerSpec`, for algorithms with inner steps, and
    the optimizer of `allreduce` and `powersgd`. `codec`: codes dense messages on the way to the owner, `codec_down` on
    the way back (None: plain). Coded messages are fp32.
    """

    def __init__(
        self,
        algo: str,
        init: Mapping[str, torch.Tensor],
        K: int,
        *,
        inner: Mapping[str, Any] | None = None,
        codec: str | None = None,
        codec_down: str | None = None,
        **cfg: Any,
    ) -> None:
        if algo not in ALGORITHMS:
            raise ConfigError(f"there is no method {algo!r}: choose one of {', '.join(ALGORITHMS)}")
        self.layout = layout_of(init)
        theta = self._flat(init)
        try:
            spec = InnerSpec(**(inner or {}))
            self.methods: list[OuterAlgorithm[Any]] = [
                ALGORITHMS[algo](self.layout, theta, K, spec, cfg) for _ in range(K)
            ]
        except TypeError as error:
            raise ConfigError(f"method {algo!r} does not take these settings ({error}): correct them") from None
        self.local = [theta.clone() for _ in range(K)]
        build = FusedAdamW if spec.optimizer == "adamw" else build_inner
        self.inner = [build(spec, self.layout, theta) for _ in range(K)]
        self.steps = 0
        self.bytes_up = 0
        """Payload that each worker has sent."""
        self._up = get_codec(codec) if codec else None
        self._down = get_codec(codec_down or "fp32")
        self._feedback: dict[tuple[int, int, int], ErrorFeedback] = {}
        self._in_flight: list[list[torch.Tensor]] = []
        self._exchanges = 0

    def params(self, k: int) -> dict[str, torch.Tensor]:
        """Return worker k's current parameters: views, not copies."""
        return self.layout.views(self.local[k])

    def errors(self, k: int) -> dict[str, torch.Tensor]:
        """Return worker k's error feedback (`powersgd`, `sparseloco`)."""
        return self.layout.views(self.methods[k].state_dict()["error"])

    @property
    def gradient(self) -> dict[str, torch.Tensor]:
        """The last averaged gradient (`powersgd`)."""
        method = self.methods[0]
        assert isinstance(method, PowerSgd)
        return self.layout.views(method.gradient)

    def step(self, grads: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Make one inner step on every worker, then any synchronization that is due."""
        self.steps += 1
        flat = [self._flat(grad) for grad in grads]
        for method, inner, local, gradient in zip(self.methods, self.inner, self.local, flat, strict=True):
            if isinstance(method, AllReduce):
                method.add(gradient)
            elif not method.takes_gradients:
                inner.step(local, gradient)
        first = self.methods[0]
        for _ in range(first.exchanges):
            if first.sends(self.steps):
                self._in_flight.append(self._exchange(flat))
            if first.applies(self.steps):
                merged = self._in_flight.pop(0) if len(self._in_flight) > first.lag else [None] * len(self.methods)
                for method, update, local in zip(self.methods, merged, self.local, strict=True):
                    method.incoming(update, local)

    def _exchange(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Merge the workers' messages among partners and return what each worker gets."""
        messages = [m.outgoing(x, g) for m, x, g in zip(self.methods, self.local, gradients, strict=True)]
        merged: list[torch.Tensor] = [gradients[0]] * len(messages)
        for group in self.methods[0].partners(self._exchanges, len(messages)):
            result = self._merge(group, [messages[k] for k in group])
            for k in group:
                merged[k] = result
        self._exchanges += 1
        return merged

    def _merge(self, group: Sequence[int], messages: Sequence[Any]) -> torch.Tensor:
        """Merge in the order of the messages' own bytes, as the network does: the result does not depend on the
        senders' order."""
        weights = [1 / len(messages)] * len(messages)
        method, counted = self.methods[group[0]], 0 in group  # every worker sends as much as the first
        if self._up is None or isinstance(messages[0], Sparse):
            self.bytes_up += _plain_bytes(method, messages[0]) * counted
            return method.merge(sorted(messages, key=_content), weights)
        if not isinstance(method, Dense):
            raise ConfigError("only dense messages can be coded: leave codec out")
        numel = messages[0].numel()
        encoded = [self._encode(k, message.float()) for k, message in zip(group, messages, strict=True)]
        self.bytes_up += encoded[0].numel() * counted
        result = merge_part(self._up, sorted(encoded, key=bytes_of), weights, numel, self._down)
        return self._down.decode(result, numel).to(messages[0].dtype)

    def _encode(self, k: int, message: torch.Tensor) -> torch.Tensor:
        assert self._up is not None
        if not self._up.needs_error_feedback:
            return self._up.encode(message)
        phase = getattr(self.methods[k], "fragment", self._exchanges % self.methods[k].exchanges)
        key = (k, phase, message.numel())
        feedback = self._feedback.setdefault(key, ErrorFeedback(self._up, message.numel()))
        return feedback.encode(message)

    def _flat(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensors[name].detach().reshape(-1) for name in self.layout.slots])


def _content(message: torch.Tensor | Sparse) -> bytes:
    parts = [message] if isinstance(message, torch.Tensor) else [t for part in message.parts for t in part]
    return b"".join(bytes_of(part) for part in parts)


def _plain_bytes(method: OuterAlgorithm[Any], message: torch.Tensor | Sparse) -> int:
    """Return the bytes of an uncoded message. Dense ones count as fp32, whatever the dtype."""
    if isinstance(method, SparseMethod):
        return method.packing.size
    assert isinstance(message, torch.Tensor)
    return 4 * message.numel()


Build = Callable[[FlatLayout, torch.Tensor, int, InnerSpec, Config], OuterAlgorithm[Any]]


def _outer(cfg: Config) -> Config:
    """Gather the outer step's settings of `cfg` into one object."""
    names = {"outer_lr": "lr", "outer_momentum": "momentum", "nesterov": "nesterov"}
    rest = {key: value for key, value in cfg.items() if key not in names}
    return {**rest, "outer": DilocoOuter(**{new: cfg[old] for old, new in names.items() if old in cfg})}


def _all_reduce(layout: FlatLayout, theta: torch.Tensor, K: int, spec: InnerSpec, cfg: Config) -> OuterAlgorithm[Any]:
    if spec.optimizer not in ("adamw", "lamb"):
        raise ConfigError(f"allreduce does not step with {spec.optimizer!r}: choose adamw or lamb")
    rule = LargeBatchStep(spec.optimizer, spec.betas, spec.eps, spec.weight_decay)
    return AllReduce(layout, theta, rule, spec.lr, **cfg)


def _sparse_loco(layout: FlatLayout, theta: torch.Tensor, K: int, spec: InnerSpec, cfg: Config) -> OuterAlgorithm[Any]:
    own = {name: cfg[name] for name in ("H", "chunk") if name in cfg}
    scheme = SparseLocoScheme(**{name: value for name, value in cfg.items() if name not in own})
    return SparseLoco(layout, theta, scheme=scheme, **own)


ALGORITHMS: Final[Mapping[str, Build]] = {
    "diloco": lambda layout, theta, K, spec, cfg: Diloco(layout, theta, **_outer(cfg)),
    "streaming": lambda layout, theta, K, spec, cfg: Streaming(layout, theta, **_outer(cfg)),
    "eager": lambda layout, theta, K, spec, cfg: Eager(layout, theta, share=1 / K, **_outer(cfg)),
    "demo": lambda layout, theta, K, spec, cfg: Demo(layout, theta, **cfg),
    "sparseloco": _sparse_loco,
    "lion": lambda layout, theta, K, spec, cfg: DistributedLion(layout, theta, **cfg),
    "powersgd": lambda layout, theta, K, spec, cfg: PowerSgd(layout, theta, build_inner(spec, layout, theta), **cfg),
    "gossip": lambda layout, theta, K, spec, cfg: Gossip(layout, theta, **cfg),
    "allreduce": _all_reduce,
}
