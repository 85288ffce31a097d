"""Adapters in the rows of one step: each session's logits are those of its own adapter, or of the bare base."""

from __future__ import annotations

import msgspec
import pytest
import torch

from peer.config import AdapterConfig, ModelConfig, Quantization
from peer.inference.blocks import SpanBlocks
from peer.inference.engine import Engine
from peer.inference.step_output import StepRefused
from peer.ipc.sampling_options import Sampling
from peer.ipc.span import Span
from peer.model.adapter_files import merged
from peer.model.decoder import Decoder
from peer.model.layout import FlatLayout, init_flat
from peer.model.matrices import load_matrix
from peer.model.quantize import quantized

CPU = torch.device("cpu")
BASE = ModelConfig(
    vocab_size=199, hidden_size=64, layers=3, heads=4, kv_heads=2, intermediate_size=128, max_seq_len=128,
    attention_bias=True, tie_embeddings=False,
)  # fmt: skip
PROMPT = [3 * at % 199 for at in range(40)]
ADAPTERS: list[AdapterConfig] = [
    AdapterConfig(rank=4, alpha=8.0),
    AdapterConfig(rank=2, alpha=6.0, targets=("k_proj", "v_proj", "up_proj", "down_proj")),
]


def base_values(quantization: Quantization | None) -> dict[str, torch.Tensor]:
    """Return the stored tensors of a base with gains and biases that are not those of a new model."""
    flat = init_flat(BASE, seed=3)
    found = {}
    for name, view in FlatLayout.of(BASE).views(flat).items():
        if view.dim() == 1:
            view.add_(torch.linspace(-0.3, 0.3, view.numel()))
        if quantization is not None and view.dim() == 2 and ".layers." in name:
            codes, scales = quantized(view, quantization)
            found[name] = codes
            found[name.removesuffix(".weight") + (".SCB" if quantization == "int8" else ".weight.absmax")] = scales
        else:
            found[name] = view
    return found


def adapter_values(number: int) -> tuple[ModelConfig, torch.Tensor]:
    model = msgspec.structs.replace(BASE, adapter=ADAPTERS[number])
    numel = FlatLayout.of(model).numel
    return model, 0.2 * torch.randn(numel, generator=torch.Generator().manual_seed(number))


def wanted(number: int | None, ids: list[int], quantization: Quantization | None) -> torch.Tensor:
    """Return the last logits of the model that an adapter makes of the base, by the decoder that trains."""
    stored = base_values(quantization)

    def dense(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if quantization is None or len(shape) == 1 or ".layers." not in name:
            return stored[name]
        return load_matrix(stored.__getitem__, [name], shape[1], quantization).dense(torch.float32)

    base = {name: dense(name, slot.shape) for name, slot in FlatLayout.of(BASE).slots.items()}
    if number is not None:
        base = merged(*adapter_values(number), base, torch.float32)
    whole = torch.cat([base[name].flatten() for name in FlatLayout.of(BASE).slots])
    with torch.no_grad():
        logits: torch.Tensor = Decoder(BASE, whole)(torch.tensor([ids]))[0, -1]
    return logits


def engines(spans: list[Span], quantization: Quantization | None) -> list[Engine]:
    stored, found = base_values(quantization), []
    for span in spans:
        blocks = SpanBlocks(BASE, span, stored.__getitem__, CPU, quantization=quantization)
        for number, adapter in enumerate(ADAPTERS):
            model, flat = adapter_values(number)
            blocks.add_adapter(adapter, FlatLayout.of(model).views(flat).__getitem__)
        found.append(Engine(blocks, 64, 64, 64))
        found[-1].keeps_logits = True
    return found


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_two_adapters_and_the_base_in_one_step(quantization: Quantization | None) -> None:
    """All begin alike. The prompts go one by one, the token behind them in one batch."""
    (engine,) = engines([Span.whole(3)], quantization)
    for id, adapter in enumerate((0, None, 1)):
        engine.open(id, Sampling(), adapter=adapter)
        engine.submit(id, 0, PROMPT, None, samples=True)
        (said,) = engine.step()
        assert said.logits is not None
        torch.testing.assert_close(said.logits, wanted(adapter, PROMPT, quantization), atol=1e-4, rtol=1e-4)
    for id in range(3):
        engine.submit(id, len(PROMPT), [11], None, samples=True)
    outputs = engine.step()
    assert len(outputs) == 3
    for said in outputs:
        assert said.logits is not None
        own = wanted((0, None, 1)[said.session], [*PROMPT, 11], quantization)
        torch.testing.assert_close(said.logits, own, atol=1e-4, rtol=1e-4)


def test_a_chain_of_spans_adds_each_block_s_part() -> None:
    first, last = engines([Span(0, 1, 3), Span(1, 3, 3)], None)
    for engine in (first, last):
        engine.open(1, Sampling(), adapter=1)
    first.submit(1, 0, PROMPT, None, samples=False)
    (passed,) = first.step()
    last.submit(1, 0, PROMPT, passed.hidden, samples=True)
    (said,) = last.step()
    assert said.logits is not None
    torch.testing.assert_close(said.logits, wanted(1, PROMPT, None), atol=1e-4, rtol=1e-4)


def test_pages_of_another_adapter_are_not_taken_over() -> None:
    """A client's second session begins with the pages of its first only if it has the same adapter."""
    (engine,) = engines([Span.whole(3)], None)
    names = [bytes([page]) * 16 for page in range(2)]
    engine.open(1, Sampling(), names, adapter=0)
    engine.submit(1, 0, PROMPT, None, samples=False)
    engine.step()
    engine.close(1)
    assert engine.open(2, Sampling(), names, adapter=1) == 0
    assert engine.open(3, Sampling(), names) == 0
    assert engine.open(4, Sampling(), names, adapter=0) == 32


def test_an_adapter_that_is_not_here_is_refused() -> None:
    (engine,) = engines([Span.whole(3)], None)
    with pytest.raises(StepRefused, match="no adapter 2 here, but 2"):
        engine.open(1, Sampling(), adapter=2)
