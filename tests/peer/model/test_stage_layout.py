"""The flat vectors of stages: split and joined bit for bit, with shared blocks, and with an untied head."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.config import ModelConfig
from peer.data.tokenizer import ByteTokenizer
from peer.ipc.span import Span, spans_of
from peer.model.decoder import Decoder
from peer.model.huggingface import export_pretrained, flatten, load_pretrained
from peer.model.layout import FlatLayout, init_flat, join_flat, split_flat, untie
from tests.peer.support.stage_harness import MODEL, SHARED, SPLITS


@given(st.sets(st.integers(1, 3)), st.sampled_from([MODEL, SHARED]))
def test_stages_join_bit_for_bit(inner_cuts: set[int], model: ModelConfig) -> None:
    unit = model.shared_blocks
    cuts = [0, *(unit * cut for cut in sorted(inner_cuts)), model.layers]
    stages = spans_of(pairwise(cuts))
    whole = torch.randint(-(2**31), 2**31, (FlatLayout.of(model).numel,)).int().view(torch.float32)  # NaNs, too
    parts = split_flat(model, whole, stages)
    for part, span in zip(parts, stages, strict=True):
        names = FlatLayout.of(model, span).views(part)
        for name, view in names.items():
            assert torch.equal(view.view(torch.int32), FlatLayout.of(model).views(whole)[name].view(torch.int32))
    joined = join_flat(model, [part.clone() for part in parts], stages)
    assert torch.equal(joined.view(torch.int32), whole.view(torch.int32))


def test_bad_sizes_are_refused() -> None:
    whole = init_flat(MODEL, seed=0)
    parts = split_flat(MODEL, whole, SPLITS[2])
    with pytest.raises(ValueError, match="these stages need"):
        split_flat(MODEL, whole[1:], SPLITS[2])
    with pytest.raises(ValueError, match="its layout needs"):
        join_flat(MODEL, parts[::-1], SPLITS[2])
    with pytest.raises(ValueError, match="not the whole model"):
        join_flat(MODEL, parts[:1], SPLITS[2][:1])
    with pytest.raises(ValueError, match="splits blocks"):
        Decoder(SHARED, whole, Span(0, 3, 8))
    with pytest.raises(ValueError, match="must divide layers"):
        msgspec.structs.replace(SHARED, shared_blocks=3)


def test_an_untied_model_computes_the_same() -> None:
    tied = msgspec.structs.replace(MODEL, tie_embeddings=True)
    flat = init_flat(tied, seed=4)
    config, untied = untie(tied, flat)
    assert config == MODEL and untie(config, untied) == (config, untied)
    tokens = torch.randint(0, 64, (2, 8))
    with torch.no_grad():
        assert torch.equal(Decoder(config, untied)(tokens), Decoder(tied, flat)(tokens))


def test_a_shared_block_is_exported_as_many(tmp_path: Path) -> None:
    """Hugging Face's families cannot express shared parameters. The exported model computes the same."""
    shared = msgspec.structs.replace(SHARED, vocab_size=256)
    flat = init_flat(shared, seed=0)
    assert FlatLayout.of(shared).numel < FlatLayout.of(msgspec.structs.replace(shared, shared_blocks=1)).numel * 0.7
    export_pretrained(tmp_path, shared, flat, ByteTokenizer())
    config, tensors = load_pretrained(tmp_path)
    assert config.shared_blocks == 1
    tokens = torch.randint(0, 256, (2, 8))
    with torch.no_grad():
        assert torch.equal(Decoder(config, flatten(config, tensors))(tokens), Decoder(shared, flat)(tokens))
