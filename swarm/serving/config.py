"""The user's choices for one block server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from peer.config import HiddenType, Quantization
from peer.footprint.layout import Compute
from peer.net.reach import Reach
from swarm.run.invite import Invite


@dataclass(frozen=True)
class ServeConfig:
    """The user's choices for one block server."""

    home: Path
    invite: Invite | None = None
    """Joins the served model of this invite; else `folder` founds one."""
    folder: Path | None = None
    """A checkpoint in the Hugging Face layout; with an invite: a copy to read parts from."""
    name: str = ""
    reach: Reach = field(default_factory=Reach)
    compute: Compute = field(default_factory=Compute)
    """Its memory is that for weights and caches; None: six tenths of what is free."""
    blocks: tuple[int, int] | None = None
    """The blocks to serve; None: where they are needed most."""
    is_open: bool = False
    """Whether any peer may serve and use a model that is founded; else only with its invite."""
    beside_training: bool = False
    """Whether this peer also trains in the run that it serves: its trainer goes first."""
    template: str | None = None
    """The chat template of a model that is founded (`TextRules.founded_with`); None: the one of its checkpoint by
    rule."""
    dtype: HiddenType | None = None
    """The type in which a founded model is served; None: that of its checkpoint."""
    quantization: Quantization | None = None
    """Of the blocks of a model that is founded; None: as its checkpoint is."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Of a model that is founded: the folders of adapters by name."""
    choices: bytes = b""
    """The choices that the next start from `home` takes over, as the command wrote them; empty: none."""
