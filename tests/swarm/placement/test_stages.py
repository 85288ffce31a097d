"""The stages of a run: where the model is cut, and what a stage costs."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from optim.config import AllReduceConfig
from peer.config import ModelConfig
from peer.ipc.span import spans_of
from peer.model.decoder import Decoder
from peer.model.layout import FlatLayout, init_flat
from swarm.placement.costs import cut, stage_costs
from swarm.placement.stages import layout_of, state_bytes, vectors_of
from swarm.run.manifest import Manifest
from swarm.run.sections import PipelineConfig
from tests.swarm.run.test_manifest import make_manifest

MODEL = ModelConfig(
    hidden_size=32, layers=6, heads=2, kv_heads=1, intermediate_size=64, max_seq_len=64, tie_embeddings=False
)


def cuts_of(stages: int, model: ModelConfig) -> tuple[tuple[int, int], ...]:
    return cut(stages, model, 64)


def manifest_of(stages: int, model: ModelConfig = MODEL, **changes: object) -> Manifest:
    authority = "12D3KooWGatU9DY5tVYiaLN4sPy7MXDsM33yEEXjRcFp9yDuTqa9"
    parts = {"model": model, "cuts": cuts_of(stages, model), "genesis": (bytes(32),) * stages}
    return make_manifest(authority, **parts, pipeline=PipelineConfig(stages=stages), **changes)


def test_large_vocabulary_takes_blocks_off_the_last_stage() -> None:
    assert cuts_of(1, MODEL) == ((0, 6),)
    assert cuts_of(3, MODEL) == ((0, 2), (2, 4), (4, 6))
    large = msgspec.structs.replace(MODEL, vocab_size=4096)
    assert cuts_of(2, large) == ((0, 5), (5, 6))
    assert [end for _, end in cuts_of(3, large)][-2:] == [5, 6]


def test_blocks_that_share_parameters_stay_together() -> None:
    shared = msgspec.structs.replace(MODEL, layers=12, shared_blocks=4)
    assert cuts_of(3, shared) == ((0, 4), (4, 8), (8, 12))
    assert all(end % 4 == 0 for _, end in cuts_of(2, shared))


@pytest.mark.parametrize("shared_blocks", [1, 2])
@pytest.mark.parametrize("stages", [1, 3])
def test_work_matches_torchs_count(stages: int, shared_blocks: int) -> None:
    """torch counts attention in full; we count what the mask leaves."""
    model = msgspec.structs.replace(MODEL, shared_blocks=shared_blocks, vocab_size=300)
    manifest = manifest_of(stages, model)
    batch, length = manifest.micro_batch, manifest.data.seq_len
    for stage, span in enumerate(spans_of(manifest.cuts)):
        decoder = Decoder(model, init_flat(model, 0, span=span), span)
        x = torch.zeros(batch, length, dtype=torch.int64) if span.is_first else torch.zeros(batch, length, 32)
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            decoder(x)
        masked = span.count * batch * 2 * length * length * model.heads * model.head_size
        assert stage_costs(manifest)[stage].work == pytest.approx(3 * (counter.get_total_flops() - masked))


def test_stage_memory_and_state_sizes() -> None:
    manifest = manifest_of(3)
    whole = FlatLayout.of(MODEL).numel
    assert sum(layout_of(manifest, stage).numel for stage in range(3)) == whole
    assert sum(state_bytes(manifest, stage) for stage in range(3)) == 2 * 4 * whole
    assert [cost.state_bytes for cost in stage_costs(manifest)] == [state_bytes(manifest, stage) for stage in range(3)]
    assert all(cost.memory_bytes > cost.state_bytes for cost in stage_costs(manifest))
    synchronous = manifest_of(3, outer=AllReduceConfig(batch=8))
    assert [len(vectors_of(synchronous, stage)) for stage in range(3)] == [3, 3, 3]  # theta and two moments


def test_recomputing_costs_a_third_more() -> None:
    plain = manifest_of(3)
    again = msgspec.structs.replace(plain, pipeline=PipelineConfig(stages=3, recompute=True))
    for one, two in zip(stage_costs(plain), stage_costs(again), strict=True):
        assert two.work == pytest.approx(one.work * 4 / 3)
