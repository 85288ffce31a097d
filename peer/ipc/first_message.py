"""The first message to a worker: a union of one struct a program, so that it names the program, too."""

from __future__ import annotations

from peer.ipc.block_messages import LoadBlocks
from peer.ipc.build_messages import LoadBuild
from peer.ipc.corpus_messages import LoadCorpus
from peer.ipc.grammar_messages import LoadGrammar
from peer.ipc.messages import Command, Stop
from peer.ipc.stage_messages import LoadStage
from peer.ipc.text_messages import LoadText
from peer.ipc.train_messages import LoadTrain

FirstMessage = LoadTrain | LoadStage | LoadCorpus | LoadBlocks | LoadText | LoadGrammar | LoadBuild
ToWorker = FirstMessage | Stop | Command
