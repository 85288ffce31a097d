"""Both readers of a checkpoint, for tests that compare what they say."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import torch
import trio

from peer.events import EventLog
from peer.identity import Identity
from peer.model.decoder import Decoder
from peer.model.huggingface import flatten, load_pretrained
from peer.model.parameter_files import ParameterFiles
from swarm.run.manifest import ServedModelManifest
from swarm.serving.create_model import CreatedModel, PreparedModel, create_model, prepare_model

TOKENS: Final = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(3))


def created(prepared: PreparedModel, home: Path, identity: Identity) -> CreatedModel:
    """Found a model of a checkpoint that has been looked at."""
    return trio.run(create_model, home, prepared, identity, EventLog())


def founded(folder: Path, template: str | None = None) -> ServedModelManifest:
    home, prepared = Path(tempfile.mkdtemp(dir=folder.parent)), prepare_model(folder, "m", True, template=template)
    return created(prepared, home, Identity.generate()).manifest


def ours(folder: Path) -> torch.Tensor:
    """Return the logits that this program computes, after checking that both readers hold the same parameters."""
    shape, tensors = load_pretrained(folder)
    files = ParameterFiles([folder])
    assert all(torch.equal(files.tensor(name), tensor) for name, tensor in tensors.items())
    with torch.no_grad():
        return Decoder(shape, flatten(shape, tensors))(TOKENS)
