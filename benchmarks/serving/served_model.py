"""A served model for benchmarks: a random Llama on disk, its servers as processes, and a client in this one."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from benchmarks.common.resident import resident_bytes
from cli.demo.child_processes import ChildPeer, Children, Place, children
from peer.data.tokenizer import ByteTokenizer
from peer.identity import Identity
from peer.ipc.sampling_options import Sampling
from swarm.inference.client import ModelClient, open_model
from swarm.inference.session import RemoteSession
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.inviting import make_invite
from swarm.run.manifest import open_any_manifest
from swarm.run.manifest_transfer import load_run_files

START_S = 120.0
GUESTS = 64
MODELS: dict[str, dict[str, int]] = {
    "10M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 8},
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
}


def write_model(folder: Path, size: str, context: int = 8192) -> Any:
    """Write a random Llama with fp32 weights; return the model of `transformers`."""
    import torch

    transformers: Any = importlib.import_module("transformers")  # its types know less than it takes
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        **MODELS[size],
        vocab_size=8192,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.05)
    model.save_pretrained(folder)
    ByteTokenizer().save(folder)
    return model


@dataclass
class ServedModel:
    """The servers of one model."""

    folder: Path
    group: Children
    options: tuple[str, ...] = ()
    servers: dict[str, ChildPeer] = field(default_factory=dict)

    @property
    def invite(self) -> Invite:
        """One of the founder's, for as many servers as come, that works through one that lives."""
        living = next(server for server in self.servers.values() if server.alive)
        addresses = Invite.parse((living.home / "invite").read_text()).addresses
        founder = Home(next(iter(self.servers.values())).home)
        kept = load_run_files(founder.path)
        assert kept is not None
        identity = Identity.load_or_create(founder.identity)
        return make_invite(identity, (), open_any_manifest(kept[0]), addresses, guests=GUESTS, days=1)

    def serve(self, name: str, blocks: str, ip: str = "127.0.0.1", place: Place | None = None) -> ChildPeer:
        """Start a server and wait until it serves. `place`: as in `Children.start`."""
        source = [str(self.invite)] if self.servers else ["--model", str(self.folder / "checkpoint")]
        fixed = ["--name", name, "--threads", "1", "--blocks", blocks, "--listen", f"/ip4/{ip}/tcp/0"]
        server = self.group.start(name, self.folder / name, ["serve", *source, *fixed, *self.options], 1, place)
        self.servers[name] = server
        deadline = time.monotonic() + START_S
        while not any(event == "blocks_served" for _, event, _ in server.events.poll()):
            if not server.alive or time.monotonic() > deadline:
                raise RuntimeError(f"{name} does not serve: {server.log_tail()}")
            time.sleep(0.02)
        return server

    async def known(self, model: ModelClient) -> None:
        """Wait until a client sees all servers that live."""
        living = {name for name, server in self.servers.items() if server.alive}
        with trio.fail_after(60):
            while True:
                await model.servers.refresh(0.0)
                view = model.servers.view()
                if living <= {record.name for record in view.servers.values() if record.serves(view.now)}:
                    return
                await trio.sleep(0.2)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[ModelClient]:
        """Open a client that knows all servers that live."""
        async with open_model(self.invite) as model:
            await self.known(model)
            yield model

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each server's processes: its network process, and its worker."""
        return {
            f"{name} {kind}": used for name, s in self.servers.items() if s.alive for kind, used in _cpu(s.process.pid)
        }

    def worker_bytes(self, name: str) -> dict[str, int]:
        """Return the memory of a server's worker, by kind."""
        (worker,) = _children_of(self.servers[name].process.pid)
        return resident_bytes(worker)


@contextmanager
def served_model(folder: Path, **servers: str) -> Iterator[ServedModel]:
    """Start servers of these blocks, by name, of the model in folder/checkpoint."""
    with children() as group:
        model = ServedModel(folder, group)
        for name, blocks in servers.items():
            model.serve(name, blocks)
        yield model


def _cpu(pid: int) -> list[tuple[str, float]]:
    tick = os.sysconf("SC_CLK_TCK")

    def used(number: int) -> float:
        fields = Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / tick

    return [("network", used(pid)), *(("worker", used(child)) for child in _children_of(pid))]


def _children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def generate(session: RemoteSession, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Return the tokens that a session draws, and when each came (seconds, `time.perf_counter`)."""
    tokens, times = list[int](), list[float]()
    async for drawn in session.generate(prompt, count):
        tokens.append(drawn.token)
        times.append(time.perf_counter())
    return tokens, times


GREEDY = Sampling()
