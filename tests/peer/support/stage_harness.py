"""A small model, whole and split into stages."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch
from torch import Tensor

from peer.compute.device import resolve_device
from peer.compute.stage import Stage
from peer.config import InnerConfig, ModelConfig
from peer.ipc.span import Span, spans_of
from peer.ipc.stage_spec import MicroBatch, StageSpec, Taken
from peer.model.decoder import Decoder
from peer.model.frozen_weights import FrozenWeights
from peer.model.layout import init_flat, join_flat, split_flat

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    layers=4,
    heads=4,
    kv_heads=2,
    intermediate_size=48,
    max_seq_len=16,
    tie_embeddings=False,
)
SHARED = msgspec.structs.replace(MODEL, layers=8, shared_blocks=2)
INNER = InnerConfig(lr=1e-2, batch_size=4, total_steps=100, dtype="fp32")
SPLITS = {
    1: spans_of([(0, 4)]),
    2: spans_of([(0, 1), (1, 4)]),
    3: spans_of([(0, 1), (1, 3), (3, 4)]),
    4: spans_of([(0, 1), (1, 2), (2, 3), (3, 4)]),
}


def spec_of(stages: tuple[Span, ...], index: int, **changes: object) -> StageSpec:
    values: dict[str, object] = {"span": stages[index], "index": index, "max_tokens": 64, **changes}
    return StageSpec(**values)  # type: ignore[arg-type]


def open_stages(
    stages: tuple[Span, ...],
    model: ModelConfig = MODEL,
    inner: InnerConfig = INNER,
    flat: Tensor | None = None,
    base: FrozenWeights | None = None,
    **changes: object,
) -> list[Stage]:
    """All stages of the model at epoch 0, with the weights `flat`; those of an adapter beside `base`."""
    parts = split_flat(model, init_flat(model, seed=0) if flat is None else flat, stages)
    chain = []
    for index, part in enumerate(parts):
        stage = Stage(model, inner, resolve_device("cpu"), spec_of(stages, index, **changes), base=base)
        stage.import_weights(part, epoch=0)
        chain.append(stage)
    return chain


def token_batches(count: int, vocab_size: int = MODEL.vocab_size) -> list[Tensor]:
    """Micro-batches (B, T+1) of several sizes."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(4, 17), (2, 9), (4, 17), (1, 17), (3, 12)]
    return [torch.randint(0, vocab_size, sizes[k % len(sizes)], generator=generator) for k in range(count)]


def forward(chain: list[Stage], name: str, tokens: Tensor, epoch: int = 0) -> Tensor:
    """Run the forward through all stages and return each token's loss."""
    x = tokens[:, :-1]
    for index, stage in enumerate(chain):
        x = stage.forward(MicroBatch(name, index, epoch), x, tokens[:, 1:] if stage.spec.is_last else None)
    return x


def backward(chain: list[Stage], name: str, epoch: int = 0) -> None:
    gradient: Tensor | None = None
    for index in reversed(range(len(chain))):
        gradient = chain[index].backward(MicroBatch(name, index, epoch), gradient)
    assert gradient is None


def taken(chain: list[Stage]) -> tuple[Tensor, list[Taken]]:
    """Take the gradient of each stage; return that of the whole model, and what the stages say of theirs."""
    parts = [torch.empty(stage.layout.numel) for stage in chain]
    found = [stage.take_gradient(part) for stage, part in zip(chain, parts, strict=True)]
    return join_flat(chain[0].model, parts, tuple(stage.spec.span for stage in chain)), found


def first_gradient(batches: Iterable[Tensor], model: ModelConfig = MODEL) -> tuple[float, Tensor]:
    """Return the mean loss and its gradient with the weights that `open_stages` begins with."""
    return whole_gradient(model, init_flat(model, seed=0), batches)


def whole_gradient(model: ModelConfig, flat: Tensor, batches: Iterable[Tensor]) -> tuple[float, Tensor]:
    """Mean loss and its gradient over all tokens, in float64."""
    decoder = Decoder(model, flat.double())
    decoder.cos, decoder.sin = decoder.cos.double(), decoder.sin.double()
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for tokens in batches:
        inputs = tokens[:, :-1]
        total = total + _loss64(decoder(inputs), tokens) * inputs.numel()
        count += inputs.numel()
    loss = total / count
    grads = torch.autograd.grad(loss, [parameter for _, parameter in decoder.canonical_parameters()])
    names = [name for name, _ in decoder.canonical_parameters()]
    by_name = dict(zip(names, grads, strict=True))
    return float(loss.detach()), torch.cat([by_name[name].flatten() for name in decoder.layout.slots])


def _loss64(logits: Tensor, tokens: Tensor) -> Tensor:
    """Not `next_token_loss`, which goes through fp32."""
    return -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


class ExactPass:
    """One micro-batch through one stage with `weights` in float64, by plain autograd: `out`, and the gradients of its
    input, None for token ids, and of the weights (flat) once `gradient` of its output is known (of losses: ones)."""

    def __init__(self, stage: Stage, weights: Tensor, x: Tensor, targets: Tensor | None = None) -> None:
        self._decoder = Decoder(stage.model, weights.double(), stage.spec.span)
        self._decoder.cos, self._decoder.sin = self._decoder.cos.double(), self._decoder.sin.double()
        self._x = x if stage.spec.is_first else x.double().requires_grad_()
        self.out = self._decoder(self._x)
        if targets is not None:
            self.out = -self.out.log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    def backward(self, gradient: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        by_name = dict(self._decoder.canonical_parameters())
        parameters = [by_name[name] for name in self._decoder.layout.slots]
        inputs = [*parameters, *([self._x] if self._x.requires_grad else [])]
        seed = torch.ones_like(self.out) if gradient is None else gradient.double()
        gradients = torch.autograd.grad(self.out, inputs, seed, retain_graph=True)
        flat = torch.cat([one.flatten() for one in gradients[: len(parameters)]])
        return (gradients[-1] if self._x.requires_grad else None), flat
