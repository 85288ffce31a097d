"""The decoder against its definition: layout, causality, stages, determinism. (test_huggingface.py: against
transformers.)"""

from __future__ import annotations

import hashlib

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.config import ModelConfig
from peer.ipc.span import Span, spans_of
from peer.model.decoder import Decoder, FlatLayout, init_flat
from tests.peer.model.reference_loss import next_token_loss

TINY = ModelConfig(hidden_size=16, layers=4, heads=4, kv_heads=2, intermediate_size=24, max_seq_len=32, vocab_size=40)
UNTIED = msgspec.structs.replace(TINY, tie_embeddings=False)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim = 2 * draw(st.integers(1, 4))
    qk_norm, output_bias = draw(st.booleans()), draw(st.booleans())
    return ModelConfig(
        vocab_size=draw(st.integers(2, 20)),
        hidden_size=draw(st.integers(1, 12)),
        layers=draw(st.integers(1, 3)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=draw(st.integers(1, 12)),
        max_seq_len=8,
        qk_norm=qk_norm,
        attention_bias=output_bias or (not qk_norm and draw(st.booleans())),
        output_bias=output_bias,
        tie_embeddings=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None)
@given(configs())
def test_layout_covers_every_parameter_once(config: ModelConfig) -> None:
    layout = FlatLayout.of(config)
    flat = torch.arange(layout.numel, dtype=torch.float32)
    parameters = dict(Decoder(config, flat).canonical_parameters())
    assert set(parameters) == set(layout.slots)
    assert torch.equal(torch.cat([parameters[name].detach().flatten() for name in layout.slots]), flat)


def test_parameters_and_gradients_are_views_of_the_flat_vectors() -> None:
    flat = init_flat(TINY, seed=0)
    model, gradient = Decoder(TINY, flat), torch.zeros_like(flat)
    model.bind_gradients(gradient)
    tokens = torch.randint(0, 40, (2, 9))
    before = float(next_token_loss(model(tokens[:, :-1]), tokens).detach())
    next_token_loss(model(tokens[:, :-1]), tokens).backward()
    assert gradient.norm() > 0
    flat.sub_(gradient, alpha=0.1)
    assert float(next_token_loss(model(tokens[:, :-1]), tokens).detach()) < before
    flat.zero_()
    assert all(not parameter.any() for parameter in model.parameters())


def test_no_token_sees_the_future() -> None:
    model = Decoder(TINY, init_flat(TINY, seed=0))
    tokens = torch.randint(0, 40, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 40
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert not difference[:7].any() and difference[7:].all()


def test_attention_sees_distances_not_positions() -> None:
    """With rotary embedding and one layer, a token's logits depend on the tokens before it, not on its position."""
    config = msgspec.structs.replace(TINY, layers=1)
    model = Decoder(config, init_flat(config, seed=0))
    model.cos, model.sin = model.cos.roll(-5, 0), model.sin.roll(-5, 0)
    shifted = Decoder(config, init_flat(config, seed=0))
    tokens = torch.randint(0, 40, (1, 10))
    with torch.no_grad():
        assert torch.allclose(model(tokens), shifted(tokens), atol=1e-5)


@given(cut=st.integers(1, 3))
@settings(max_examples=3, deadline=None)
def test_a_chain_of_spans_equals_the_model(cut: int) -> None:
    whole = init_flat(UNTIED, seed=5)
    spans = spans_of([(0, cut), (cut, 4)])
    slices = [init_flat(UNTIED, seed=5, span=span) for span in spans]
    assert torch.equal(torch.cat(slices), whole)  # so a stage's state is a slice of the model's
    tokens = torch.randint(0, 40, (2, 8))
    with torch.no_grad():
        x: torch.Tensor = tokens
        for part, span in zip(slices, spans, strict=True):
            x = Decoder(UNTIED, part, span)(x)
        assert torch.equal(x, Decoder(UNTIED, whole)(tokens))


def test_starting_weights_have_a_golden_hash() -> None:
    """Peers with different starting weights could never agree on the first state."""
    digest = hashlib.blake2b(init_flat(TINY, seed=42).numpy().tobytes(), digest_size=8).hexdigest()
    assert digest == "5e94fce61a2b571b"
    assert not torch.equal(init_flat(TINY, seed=42), init_flat(TINY, seed=43))


def test_starting_weights_predict_uniformly() -> None:
    tokens = torch.randint(0, 40, (4, 31))
    with torch.no_grad():
        loss = next_token_loss(Decoder(TINY, init_flat(TINY, seed=0))(tokens[:, :-1]), tokens)
    assert abs(float(loss) - torch.tensor(40.0).log()) < 0.1


def test_digest_distinguishes_layouts() -> None:
    variants = [TINY, UNTIED, msgspec.structs.replace(TINY, qk_norm=True), msgspec.structs.replace(TINY, layers=3)]
    assert len({FlatLayout.of(config).digest for config in variants}) == len(variants)
    assert FlatLayout.of(TINY).digest == FlatLayout.of(TINY).digest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_heads": 3}, "divide heads"),
        ({"hidden_size": 18}, "divide hidden_size"),
        ({"head_dim": 3}, "even"),
        ({"layers": 0}, "layers is 0"),
        ({"qk_norm": True, "attention_bias": True}, "exclude"),
        ({"output_bias": True}, "set attention_bias, too"),
        ({"rope_scaling": {"factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"factor": 2.0, "kind": "yarn"}}, "original_max_seq_len is missing"),
        ({"rope_scaling": {"factor": 2.0, "kind": "linear", "original_max_seq_len": 8}}, "no setting of the kind"),
        ({"rope_scaling": {"factor": 2.0, "kind": "linear", "beta_fast": 8.0}}, "no setting of the kind"),
        ({"rope_scaling": {"factor": 2.0, "kind": "dynamic", "original_max_seq_len": 31}}, "length of each text"),
    ],
)
def test_invalid_shapes_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        msgspec.convert({**msgspec.structs.asdict(TINY), **changes}, ModelConfig)


def test_misuse_is_refused() -> None:
    flat = init_flat(TINY, seed=0)
    with pytest.raises(ValueError, match="max_seq_len"):
        Decoder(TINY, flat)(torch.zeros(1, 33, dtype=torch.int64))
    with pytest.raises(ValueError, match="tie_embeddings"):
        Decoder(TINY, flat, Span(0, 2, TINY.layers))
    with pytest.raises(ValueError, match="belong to another model"):
        Decoder(UNTIED, flat, Span(2, 5, 5))
    with pytest.raises(ValueError, match="layout needs"):
        Decoder(TINY, flat[:-1])
