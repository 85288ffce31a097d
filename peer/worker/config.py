"""The configuration of a worker group, and the memory that it shares with the network process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.data.pages.corpus import PagedCorpus, open_corpus
from peer.data.tokenizer import BYTES
from peer.events import EventLog
from peer.footprint.layout import Compute, Layout
from peer.footprint.step_size import StepSize
from peer.ipc.corpus_messages import LoadCorpus, OwnText, PageFolders
from peer.ipc.messages import VectorFds
from peer.ipc.shared_memory import SharedBuffer
from peer.ipc.stage_spec import StageSpec
from peer.ipc.train_messages import LoadBase
from peer.model.layout import FlatLayout
from peer.worker.launch import BEHIND_THE_NETWORK


@dataclass(frozen=True)
class WorkerConfig:
    """A worker group's computation, and its devices."""

    model: ModelConfig
    data: DataConfig
    inner: InnerConfig
    directory: Path
    """Takes worker.log and, for the workers, `private_folder`."""
    events: EventLog
    run: str = ""
    """The id of the run. A worker takes the saved inner optimizer's state only of the same run."""
    tokenizer: str = BYTES
    text: OwnText = field(default_factory=OwnText)
    pages: PageFolders | None = None
    """Of a run that trains on a data set."""
    compute: Compute = field(default_factory=Compute)
    step_size: StepSize | None = None
    """Where nothing better is known: None for whole batches. On one GPU the worker measures what fits."""
    vectors_in_files: bool = False
    """Whether what is shared with the workers lies in files of `directory`, which memory only caches."""
    seed: int = 0
    silence_s: float = 15.0
    """A worker silent for this long is hung (stopped, or swapped out) and is killed."""
    stall_s: float = 300.0
    """A worker that makes no step for this long while it has a command is killed."""
    load_timeout_s: float = 600.0
    nice: int = BEHIND_THE_NETWORK
    """The niceness of the workers."""
    suspended: bool = False
    """Whether no worker is started before `WorkerCommands.resume`."""
    stage: StageSpec | None = None
    """The stage of a pipeline to compute; None: the whole model."""
    base: LoadBase | None = None
    """Of a model with an adapter: its frozen weights."""
    ranks: Layout = field(default_factory=Layout)
    """How the workers share the model."""

    @property
    def world_size(self) -> int:
        """The number of worker processes in the group."""
        return self.ranks.size

    @property
    def private_folder(self) -> Path:
        """The one folder that the workers may write: their home, with cached token ids, the inner
        optimizer's state and temporary files."""
        return self.directory.absolute() / "worker"

    @property
    def corpus_folder(self) -> Path:
        """The one folder that a worker that only tokenizes may write. This process maps the ids there, so no worker
        that lives on may change them."""
        return self.directory.absolute() / "corpus"

    def load_corpus(self, folder: Path) -> LoadCorpus:
        """Return the first message to a worker that reads the text; `folder` is the one that it may write."""
        return LoadCorpus(
            data=self.data,
            tokenizer=self.tokenizer,
            vocab_size=self.model.vocab_size,
            text=self.text,
            pages=self.pages,
            directory=str(folder),
        )

    @property
    def layout(self) -> FlatLayout:
        """The layout of what the group computes: the whole model, or its stage."""
        return FlatLayout.of(self.model, None if self.stage is None else self.stage.span)


@dataclass(frozen=True)
class WorkerBuffers:
    """The vectors that the network process and its workers share, and of a stage the slots of its micro-batches."""

    outer: SharedBuffer
    delta: SharedBuffer
    slots: SharedBuffer | None = None

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that a worker inherits."""
        return tuple(each.fd for each in (self.outer, self.delta, self.slots) if each is not None)

    @property
    def vectors(self) -> VectorFds:
        """The descriptors as sent to a worker."""
        return VectorFds(self.outer.fd, self.delta.fd)

    @classmethod
    @contextmanager
    def open(cls, config: WorkerConfig) -> Iterator[WorkerBuffers]:
        """Open buffers of the sizes that `config` needs. The memory lives as long as any of the tensors is
        referenced."""
        numel = config.layout.numel
        with (
            closing(SharedBuffer.create(config.directory, numel, in_file=config.vectors_in_files)) as outer,
            closing(SharedBuffer.create(config.directory, numel, in_file=config.vectors_in_files)) as delta,
        ):
            yield cls(outer, delta)


def opened_pages(load: LoadCorpus) -> PagedCorpus:
    """Return the corpus of a run's data set, whose pages come to the folders that `load` names. Raises ConfigError."""
    folders, wanted = load.pages, load.data.pages
    assert folders is not None and wanted is not None
    places = [Path(folder) for folder in (folders.cache, folders.built) if folder]  # the cache first: it is checked
    return open_corpus(Path(folders.index), wanted, load.vocab_size, places)
