"""The "grammar" program of a worker: it forks a process for each answer that a stranger's JSON schema binds.

It reads the vocabulary, which takes seconds for a large one, and no schema: what a schema costs, or breaks, is its own
answer's, and the kernel shares the processor between answers.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any, ClassVar, NoReturn

from peer.ipc.grammar_messages import GrammarBounds, LoadGrammar
from peer.ipc.messages import ModelLoaded, Stop
from peer.worker.control_link import ControlLink
from peer.worker.grammar.answer import follow_answer
from peer.worker.grammar.vocabulary import read_vocabulary
from peer.worker.text_worker import hold_memory, memory_held


class GrammarWorker:
    """Forks for each socket that comes."""

    commands: ClassVar[Any] = Stop  # those of an answer come over its own socket

    def __init__(self, link: ControlLink, load: LoadGrammar) -> None:
        self._link, self._load = link, load
        self._sockets = socket.socket(fileno=load.sockets)
        self._vocabulary = read_vocabulary(load.tokenizer, load.vocab_size)
        self._held_bytes = memory_held()
        link.send(ModelLoaded(device="", bf16=False, compiled=False))

    def run(self) -> None:
        """Serve answers until the process is ended."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the processes of answers
        while True:
            place, fds, _, _ = socket.recv_fds(self._sockets, 1, 1)
            if not fds:
                os._exit(0)  # the parent is gone
            if os.fork() == 0:
                self._become_answer(fds[0], self._load.bounds[place[0]])
            os.close(fds[0])

    def _become_answer(self, fd: int, bounds: GrammarBounds) -> NoReturn:
        """Follow one answer until its socket ends, in a fork: the thread that listens has stayed behind. It outlives
        this program, whose end says nothing of its schema."""
        code = 1
        try:
            self._sockets.close()
            self._link.close()
            os.nice(bounds.niceness)
            hold_memory(self._held_bytes + bounds.memory_bytes)
            follow_answer(socket.socket(fileno=fd), self._vocabulary, self._load.vocab_size, bounds)
            code = 0
        except BaseException:  # noqa: BLE001 - a panic of a Rust library, too; the log has it
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
