"""A tiny random Llama with a tokenizer and a chat template, served by two processes, with the gateway in a third."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from peer.data.tokenizer import FileTokenizer, _stand_in
from swarm.gateway.limits import key_hash
from tests.support.process_group import spawn
from tests.swarm.serving.serving_swarm import reference_model

REPO: Final = Path(__file__).parents[3]
KEY: Final = "sk-test"
NAME: Final = "checkpoint"
MERGES: Final = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n")]
TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
POLL_S: Final = 0.05
START_S: Final = 120.0


def tokenizer() -> Tokenizer:
    """Return a byte-level BPE of 263 tokens, two of them those of the template."""
    vocabulary = {_stand_in(byte): byte for byte in range(256)}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in ("<|im_start|>", "<|im_end|>")])
    return made


def encoded(text: str) -> list[int]:
    """Return the ids of a text."""
    return FileTokenizer(tokenizer()).encode(text)


def decoded(ids: list[int]) -> str:
    """Return the text of ids, without special tokens."""
    text: str = tokenizer().decode(ids, skip_special_tokens=True)
    return text


def write_checkpoint(folder: Path) -> None:
    """Write the model with its tokenizer and template. No token ends an answer, so that long ones are long."""
    reference_model().save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    named = {"chat_template": TEMPLATE, "eos_token": None, "bos_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


class ServedModel:
    """The processes of one module of tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def invite(self) -> Path:
        return self.folder / "s0" / "invite"

    def start(self, name: str, *arguments: str | Path) -> None:
        """Start `peer ARGUMENTS`, whose output goes to NAME.log."""
        self.processes.append(spawn([*map(str, arguments)], self.folder / f"{name}.log", {}))

    def serve(self, name: str, source: list[str | Path], blocks: str) -> None:
        place: list[str | Path] = ["--listen", "/ip4/127.0.0.1/tcp/0", "--home", self.folder / name]
        self.start(name, "serve", *source, "--blocks", blocks, "--name", name, "--threads", "1", "--json", *place)
        self.event(name, "serving")

    def event(self, name: str, event: str) -> dict[str, Any]:
        """Wait for a process to report an event; return the last of that name."""
        deadline = time.monotonic() + START_S
        while not (found := self.events(name, event)):
            ended = [process.returncode for process in self.processes if process.poll() is not None]
            assert not ended and time.monotonic() < deadline, (self.folder / f"{name}.log").read_text()
            time.sleep(POLL_S)
        return found[-1]

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Return what a process has reported by an event of that name."""
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        told = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [one for one in told if one["event"] == event]

    def end(self) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGINT)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()


@contextmanager
def served_model(folder: Path, *options: str, memory_gb: float = 1.0) -> Iterator[ServedModel]:
    """Serve the model inside the block. `options`: of `peer api`. `memory_gb`: of each server."""
    write_checkpoint(folder / NAME)
    (folder / "keys").write_text(f"{key_hash(KEY)} tests\n")
    served = ServedModel(folder)
    try:
        memory = ["--memory", str(memory_gb)]
        served.serve("s0", ["--model", folder / NAME, *memory], "0:3")
        served.serve("s1", [served.invite, *memory], "3:6")
        place: list[str | Path] = ["--listen", "127.0.0.1:0", "--key-file", folder / "keys", "--json"]
        served.start("api", "api", served.invite, *place, *options)
        served.url = served.event("api", "listening")["url"]
        yield served
    finally:
        served.end()
