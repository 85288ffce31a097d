"""The hashes of a checkpoint's parts, which its founder signs."""

from __future__ import annotations

from pathlib import Path

import trio

from peer.checkpoint.hash_tree import StateTree, hash_state
from peer.events import EventLog
from peer.loading import loading
from peer.model.layout import FlatLayout
from peer.model.parameter_files import ParameterFiles, check_finite
from swarm.parts.part_files import part_tensors, quantize_part
from swarm.parts.weights import Weights, part_bytes, part_spans


async def hash_parts(
    folder: Path, files: ParameterFiles, weights: Weights, kept: Path, events: EventLog
) -> tuple[StateTree, ...]:
    """Return the hashes of each part of the checkpoint in `folder`, whose values must be finite. Each is read once.
    Those of a quantized model are made, and kept in the folder `kept`. Raises CheckpointError, ConfigError,
    ResourceError."""
    spans = part_spans(weights)

    def hash_part(number: int) -> StateTree:
        held, span = files, spans[number]
        if weights.quantization is not None:
            kept.mkdir(exist_ok=True)
            quantize_part(files, weights, number, kept)
            held = ParameterFiles([kept])
        else:
            for name in FlatLayout.of(weights.model, span).slots:
                check_finite(folder, name, files.tensor(name))
        return hash_state(part_tensors(held, weights, span), read.add)

    with loading(events.emit, "read", sum(part_bytes(weights, span) for span in spans)) as read:
        return tuple([await trio.to_thread.run_sync(hash_part, number) for number in range(len(spans))])
