"""The programs that a worker process can run, by their first message: what each is granted, and where its code is.

This table is read before the process is confined, so it imports no program. A program is imported when it is to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Protocol

from peer.confinement.grants import Grants
from peer.ipc.block_messages import LoadBlocks
from peer.ipc.build_messages import LoadBuild
from peer.ipc.corpus_messages import LoadCorpus
from peer.ipc.first_message import FirstMessage
from peer.ipc.grammar_messages import LoadGrammar
from peer.ipc.stage_messages import LoadStage
from peer.ipc.text_messages import LoadText
from peer.ipc.train_messages import LoadTrain
from peer.worker.control_link import ControlLink
from peer.worker.launch import BEHIND_THE_NETWORK

_BEHIND_TRAINING: Final = 19  # by the weights of Linux's scheduler an eighth of what a worker gets that trains


class Program(Protocol):
    """A worker's side of a set of commands. The constructor loads and sends ModelLoaded; it raises ConfigError for a
    configuration that does not work on this machine."""

    commands: ClassVar[Any]
    """The type, or union of types, of the commands that the program takes."""

    def __init__(self, link: ControlLink, load: Any) -> None:
        """`load`: the first message that the program is for."""
        ...

    def run(self) -> None:
        """Serve commands until the process is ended."""
        ...


@dataclass(frozen=True)
class ProgramEntry:
    """Facts about a program before it is imported."""

    find: Callable[[], type[Program]]
    """Imports it."""
    grants: Callable[[Any], Grants]
    """Returns what its first message needs beside Python and the devices."""
    niceness: Callable[[Any], int] = lambda load: BEHIND_THE_NETWORK
    """Returns how far its process gives way to others."""
    vectors: Callable[[Any], tuple[int, ...]] = lambda load: ()
    """Returns the descriptors of what it maps before it is confined."""


def _train() -> type[Program]:
    from peer.worker.train_worker import TrainWorker

    return TrainWorker


def _stage() -> type[Program]:
    from peer.worker.stage_worker import StageWorker

    return StageWorker


def _corpus() -> type[Program]:
    from peer.worker.corpus_worker import CorpusWorker

    return CorpusWorker


def _blocks() -> type[Program]:
    from peer.worker.block_worker import BlockWorker

    return BlockWorker


def _text() -> type[Program]:
    from peer.worker.text_worker import TextWorker

    return TextWorker


def _grammar() -> type[Program]:
    from peer.worker.grammar.worker import GrammarWorker

    return GrammarWorker


def _build() -> type[Program]:
    from peer.worker.building.worker import BuildWorker

    return BuildWorker


def _train_grants(load: LoadTrain) -> Grants:
    corpus = _corpus_grants(load.corpus)
    return replace(
        corpus,
        readable=(*corpus.readable, *_base_folders(load)),
        compiles=load.compute.compile,
        accelerators=load.compute.device_of(load.rank) != "cpu",
        tcp=load.layout.size > 1,
    )


def _stage_grants(load: LoadStage) -> Grants:
    return Grants(
        private=load.directory,
        readable=_base_folders(load),
        compiles=load.compute.compile,
        accelerators=load.compute.device_of(load.rank) != "cpu",
        tcp=load.layout.size > 1,
    )


def _base_folders(load: LoadTrain | LoadStage) -> tuple[str, ...]:
    return () if load.base is None else load.base.folders


def _corpus_grants(load: LoadCorpus) -> Grants:
    pages = () if load.pages is None else _named(load.pages.index, load.pages.cache, load.pages.built)
    return Grants(private=load.directory, readable=(*_named(load.text.folder, load.tokenizer), *pages))


def _block_grants(load: LoadBlocks) -> Grants:
    return Grants(
        private=load.directory,
        readable=(*load.folders, *(each.folder for each in load.adapters)),
        accelerators=load.device != "cpu",
    )


def _block_niceness(load: LoadBlocks) -> int:
    return _BEHIND_TRAINING if load.gives_way else BEHIND_THE_NETWORK


def _text_niceness(load: LoadText) -> int:
    return BEHIND_THE_NETWORK if load.chat_template else 0  # a tokenizer works between two tokens


def _text_grants(load: LoadText | LoadGrammar) -> Grants:
    return Grants(private=load.directory, readable=_named(load.tokenizer))


def _build_grants(load: LoadBuild) -> Grants:
    return Grants(private=load.directory, readable=_named(load.plan, load.tokenizer, *load.readable))


def _vectors(load: LoadTrain | LoadStage) -> tuple[int, ...]:
    return (load.vectors.outer, load.vectors.delta)


def _named(*paths: str) -> tuple[str, ...]:
    return tuple(filter(None, paths))


PROGRAMS: Final[dict[type[FirstMessage], ProgramEntry]] = {
    LoadTrain: ProgramEntry(_train, _train_grants, vectors=_vectors),
    LoadStage: ProgramEntry(_stage, _stage_grants, vectors=_vectors),
    LoadCorpus: ProgramEntry(_corpus, _corpus_grants),
    LoadBlocks: ProgramEntry(_blocks, _block_grants, niceness=_block_niceness),
    LoadText: ProgramEntry(_text, _text_grants, niceness=_text_niceness),
    LoadGrammar: ProgramEntry(_grammar, _text_grants, niceness=lambda load: 0),
    LoadBuild: ProgramEntry(_build, _build_grants),
}
