"""Training an adapter beside `peft` in one process: the same data, order and start."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from peer.compute.device import resolve_device
from peer.compute.train_loop import InnerTrainer
from peer.config import (
    TARGETS,
    AdapterConfig,
    AdapterTarget,
    InnerConfig,
    ModelConfig,
    Quantization,
    StorageConfig,
)
from peer.errors import CheckpointError
from peer.footprint.parameters import parameter_shapes
from peer.model.adapter_files import CONFIG, WEIGHTS, export_adapter, load_adapter, merged
from peer.model.decoder import Decoder
from peer.model.frozen_weights import FrozenWeights, load_frozen
from peer.model.huggingface import load_pretrained
from peer.model.layout import FlatLayout, init_flat
from peer.model.parameter_files import ParameterFiles
from swarm.parts.part_files import quantize_part
from swarm.parts.weights import EvenWeights
from tests.peer.inference.quantized_reference import quantized_copy

STEPS = 36
ATTENTION: tuple[AdapterTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
INNER = InnerConfig(lr=5e-3, batch_size=4, total_steps=STEPS, warmup_steps=0, schedule="constant", weight_decay=0.0)


def base_model(folder: Path) -> Any:
    """Write a random Llama and return it."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(3)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, vocab_size=97, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def adapted(base: ModelConfig, targets: tuple[AdapterTarget, ...]) -> ModelConfig:
    return msgspec.structs.replace(base, adapter=AdapterConfig(rank=4, alpha=8.0, targets=targets))


def batches(count: int) -> list[torch.Tensor]:
    """Text with something to learn: each token follows from the last one, with noise."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(count):
        rows = [torch.randint(0, 97, (4,), generator=draw)]
        for _ in range(24):
            noisy = torch.rand(4, generator=draw) < 0.1
            rows.append(torch.where(noisy, torch.randint(0, 97, (4,), generator=draw), (3 * rows[-1] + 1) % 97))
        found.append(torch.stack(rows, dim=1))
    return found


def trained(model: ModelConfig, base: FrozenWeights, flat: torch.Tensor) -> tuple[list[float], torch.Tensor]:
    """Return the losses of the steps, and the adapter after them."""
    trainer = InnerTrainer(model, INNER, resolve_device("cpu"), base=base)
    trainer.local.copy_(flat)
    losses = [trainer.step(tokens, step).loss for step, tokens in enumerate(batches(STEPS))]
    return losses, trainer.local


def trained_by_peft(model: Any, adapter: AdapterConfig, flat: torch.Tensor, shapes: FlatLayout) -> list[float]:
    """The same with `peft` and torch's AdamW and clipping."""
    peft: Any = importlib.import_module("peft")
    config = peft.LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, target_modules=list(adapter.targets), task_type="CAUSAL_LM"
    )
    tuned = peft.get_peft_model(model, config)
    parameters = dict(tuned.named_parameters())
    for name, view in shapes.views(flat).items():
        held = parameters["base_model.model." + name.replace(".weight", ".default.weight")]
        held.data.copy_(view)
    taught = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in taught) == shapes.numel
    optimizer = torch.optim.AdamW(taught, lr=INNER.lr, betas=INNER.betas, eps=INNER.eps, weight_decay=0.0)
    losses = []
    for tokens in batches(STEPS):
        out = tuned(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(taught, INNER.clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("targets", [ATTENTION, TARGETS], ids=["attention", "all"])
def test_losses_are_those_of_peft(tmp_path: Path, targets: tuple[AdapterTarget, ...]) -> None:
    model = base_model(tmp_path)
    config, base = load_pretrained(tmp_path)
    before = {name: value.clone() for name, value in base.items()}
    ours = adapted(config, targets)
    flat = init_flat(ours, seed=7)
    losses, _ = trained(ours, base, flat)
    assert ours.adapter is not None
    theirs = trained_by_peft(model, ours.adapter, flat, FlatLayout.of(ours))
    assert losses == pytest.approx(theirs, abs=1e-4)
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(base[name], value) for name, value in before.items())


def test_a_base_in_bf16_is_trained_upon(tmp_path: Path) -> None:
    """Its loss is near that of the same base in fp32, and its bits stay."""
    base_model(tmp_path)
    config, base = load_pretrained(tmp_path)
    ours = adapted(config, TARGETS)
    flat, narrow = init_flat(ours, seed=7), {name: value.bfloat16() for name, value in base.items()}
    kept = {name: value.clone() for name, value in narrow.items()}
    losses, _ = trained(ours, narrow, flat)
    wide, _ = trained(ours, base, flat)
    assert losses == pytest.approx(wide, abs=0.05) and losses[-1] < losses[0] - 0.3
    assert all(torch.equal(narrow[name], value) for name, value in kept.items())


@pytest.mark.parametrize(("quantization", "limit"), [("nf4", 1e-4), ("int8", 0.02)])
@pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")
def test_losses_beside_a_quantized_base_are_those_of_peft_with_bitsandbytes(
    tmp_path: Path, quantization: Quantization, limit: float
) -> None:
    """In int8 an input may be rounded up here and down there. Both learn about as much as beside the plain base."""
    model = base_model(tmp_path)
    config, plain = load_pretrained(tmp_path)
    ours, parts = adapted(config, ATTENTION), tmp_path / "parts"
    parts.mkdir()
    weights, form = EvenWeights(config, "fp32", quantization), StorageConfig(dtype="fp32", quantization=quantization)
    for number in range(len(weights.cuts)):
        quantize_part(ParameterFiles([tmp_path]), weights, number, parts)
    base = load_frozen(ParameterFiles([parts]), ours, form, torch.device("cpu"))
    flat = init_flat(ours, seed=7)
    losses, _ = trained(ours, base, flat)
    assert ours.adapter is not None
    theirs = trained_by_peft(quantized_copy(model, quantization), ours.adapter, flat, FlatLayout.of(ours))
    assert losses == pytest.approx(theirs, abs=limit)
    wide, _ = trained(ours, plain, flat)
    assert losses == pytest.approx(wide, abs=0.15) and losses[-1] < losses[0] - 0.1


def test_a_new_adapter_changes_nothing_and_has_equal_bits_everywhere() -> None:
    base = ModelConfig(hidden_size=32, layers=2, heads=4, kv_heads=2, intermediate_size=48, max_seq_len=32)
    model = adapted(base, TARGETS)
    flat, weights = init_flat(model, seed=2), init_flat(base, seed=1)
    named = FlatLayout.of(base).views(weights)
    tokens = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(Decoder(model, flat, base=named)(tokens), Decoder(base, weights)(tokens))
    views = FlatLayout.of(model).views(flat)
    for name, view in views.items():
        limit = view.shape[1] ** -0.5
        if "lora_B" in name:
            assert not view.any()
        else:
            assert 0.8 * limit < float(view.abs().max()) <= limit
    assert torch.equal(flat, init_flat(model, seed=2)) and not torch.equal(flat, init_flat(model, seed=3))


def test_peft_reads_what_is_exported_and_the_merged_model_says_the_same(tmp_path: Path) -> None:
    model = base_model(tmp_path / "base")
    config, base = load_pretrained(tmp_path / "base")
    ours = adapted(config, TARGETS)
    _, flat = trained(ours, base, init_flat(ours, seed=7))
    export_adapter(tmp_path / "adapter", ours, flat, str(tmp_path / "base"))
    tokens = batches(1)[0]
    with torch.no_grad():
        said = Decoder(ours, flat, base=base)(tokens)
        peft: Any = importlib.import_module("peft")
        theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()(tokens).logits
        torch.testing.assert_close(said, theirs, atol=1e-4, rtol=1e-4)
        whole = merged(ours, flat, base, torch.float32)
        views = FlatLayout.of(config).views(torch.cat([whole[name].flatten() for name, _ in parameter_shapes(config)]))
        plain = Decoder(config, torch.cat([view.flatten() for view in views.values()]))
        torch.testing.assert_close(plain(tokens), theirs, atol=1e-4, rtol=1e-4)
    again, found = load_adapter(tmp_path / "adapter", config)
    assert again == ours and torch.equal(found, flat)


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers")
def test_an_adapter_of_peft_is_read_and_others_are_refused_by_name(tmp_path: Path) -> None:
    model = base_model(tmp_path / "base")
    config, base = load_pretrained(tmp_path / "base")
    peft: Any = importlib.import_module("peft")
    saved = tmp_path / "theirs"

    def save(**settings: Any) -> None:
        chosen = peft.LoraConfig(**({"r": 3, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | settings))
        tuned = peft.get_peft_model(base_model(tmp_path / "base"), chosen)
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
        tuned.save_pretrained(saved)

    save(target_modules=["v_proj", "q_proj"])
    ours, flat = load_adapter(saved, config)
    assert ours.adapter == AdapterConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj"))
    tokens = batches(1)[0]
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(model, saved).eval()(tokens).logits
        torch.testing.assert_close(Decoder(ours, flat, base=base)(tokens), theirs, atol=1e-4, rtol=1e-4)
    other = msgspec.structs.replace(config, hidden_size=96)
    with pytest.raises(CheckpointError, match=r"is not of shape .*: use the adapter's own base"):
        load_adapter(saved, other)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.2\.self_attn\.q_proj\.lora_A\.weight"):
        load_adapter(saved, msgspec.structs.replace(config, layers=3))
    save(target_modules=["q_proj", "lm_head"])
    with pytest.raises(CheckpointError, match="target_modules lm_head: take an adapter of q_proj, "):
        load_adapter(saved, config)
    save(target_modules=["q_proj"], use_dora=True)
    with pytest.raises(CheckpointError, match="sets use_dora, which is not computed here"):
        load_adapter(saved, config)
    save(target_modules=["q_proj"])
    (saved / WEIGHTS).write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        load_adapter(saved, config)
    (saved / CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        load_adapter(saved, config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 0}, "rank is 0: set it between 1 and 4096"),
        ({"targets": ()}, "targets is empty"),
        ({"targets": ("v_proj", "q_proj")}, "targets are not in order"),
        ({"alpha": 0.0}, "alpha is 0.0"),
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdapterConfig(**settings)
